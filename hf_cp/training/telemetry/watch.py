"""What goes along with a Trainer's steps: its meter, its [`ContextParallelCallback`], and the notes on its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from hf_cp.training.telemetry.callback import ContextParallelCallback
from hf_cp.training.telemetry.meter import StepMeter


class RunWatch:
    """Of one Trainer; it is told where the training loop is. Without a callback nothing is measured.

    Args:
        trainer (`Trainer`): a [`ContextParallelTrainerMixin`].
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._callback: ContextParallelCallback | None = None  # in train(), unless the user has removed it
        self._meter = StepMeter()  # off, but in train() with a callback
        self._steps_before: int | None = None  # optimizer steps that were done when the latest one began, in train()

    def find_callback(self) -> ContextParallelCallback | None:
        """The Trainer's own, or the one that the user has passed."""
        callbacks = self._trainer.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, ContextParallelCallback)), None)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, steps are measured, and an error of whatever library gets a note with the rank and the step."""
        self._steps_before, self._callback = None, self.find_callback()
        if self._callback is not None:
            self._meter = self._callback.begin(self._trainer.model, self._trainer.cp_comm)
        try:
            yield
        except Exception as error:
            comm = self._trainer.cp_comm
            error.add_note(f"hf_cp: {comm.mesh.name}, {self._step_name()}; {comm.progress}.")
            raise
        finally:
            self._meter.close()
            self._callback, self._meter = None, StepMeter()

    def _step_name(self) -> str:
        done = self._trainer.state.global_step
        if self._steps_before is None:
            return "before the first optimizer step"
        return f"optimizer step {done + 1}" if self._steps_before == done else f"after optimizer step {done}"

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """An optimizer step begins: inside, its batches are fetched."""
        self._steps_before = self._trainer.state.global_step
        self._meter.start()
        yield
        self._meter.fetched()

    @contextmanager
    def micro_step(self, batch: Mapping[str, Any], *, num_tokens: int) -> Iterator[None]:
        """Inside, a micro-step runs forward and backward; `num_tokens` as [`StepMeter`] counts them."""
        self._meter.start_micro_step(batch, num_tokens=num_tokens)
        yield
        self._meter.end_micro_step()
        if self._callback is not None:
            self._callback.announce(self._trainer, batch)

    def add_scalars(self, logs: dict[str, float]) -> None:
        """Adds the numbers of the run to a training log."""
        if self._callback is not None and "loss" in logs:
            logs.update(self._callback.take_scalars())
