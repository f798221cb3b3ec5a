"""The part of [`ContextParallelTrainerMixin`] that moves a [`StepMeter`] along with the training loop.

Without a [`ContextParallelCallback`] among the Trainer's callbacks there is no meter, and every method is that of the
Trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import TrainOutput

from hf_cp.training.callback import ContextParallelCallback
from hf_cp.training.meter import StepMeter
from hf_cp.training.run_info import RunInfo


class TelemetryMixin:
    """Stands behind the other mixins: what it times is the stock step."""

    _observer: ContextParallelCallback | None = None
    _meter: StepMeter | None = None

    def _add_observer(self) -> None:
        """A callback of its own, unless the user has passed one."""
        if self._find_observer() is None:
            self.add_callback(ContextParallelCallback())

    def _find_observer(self) -> ContextParallelCallback | None:
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, ContextParallelCallback)), None)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As stock, with the meter running."""
        self._observer = self._find_observer() if self._own_rows else None
        if self._observer is None:
            return super().train(*args, **kwargs)
        self._meter = self._observer.begin(self.model, self.cp_comm)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._meter.close()
            self._observer = self._meter = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, torch.Tensor | int | None]:
        """As stock. A step begins with its batches."""
        if self._meter is None:
            return super().get_batch_samples(*args, **kwargs)
        self._meter.start()
        samples = super().get_batch_samples(*args, **kwargs)
        self._meter.fetched()
        return samples

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock, between two marks."""
        if self._meter is None:
            return super().training_step(model, inputs, *args, **kwargs)
        self._meter.take_row(inputs, num_tokens=self._count_own_tokens(inputs))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._meter.finish_row()
        if not self._observer.has_announced:
            self._observer.announce(self._run_info(inputs))
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As stock; a training log gets the numbers of the run."""
        if self._observer is not None and "loss" in logs:
            logs.update(self._observer.take_scalars())
        super().log(logs, *args, **kwargs)

    def _run_info(self, batch: dict[str, Any]) -> RunInfo:
        return RunInfo.of(
            self.model,
            batch,
            mesh=self.cp_mesh,
            collator=self.data_collator,
            rows_per_step=self.get_total_train_batch_size(self.args),
            first_step=self.state.global_step + 1,
            device=torch.cuda.get_device_name() if self.cp_mesh.device_type == "cuda" else "cpu",
        )
