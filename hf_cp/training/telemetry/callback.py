"""`ContextParallelCallback`: a run's speed, balance, traffic and waits in the Trainer's logs; records and traces.

The callback decides when numbers are gathered and written. What a step did is noted by a [`StepMeter`], which
[`ContextParallelTrainerMixin`] moves along with the training loop.

Invariant: ranks talk to each other (one gather of a few numbers) only at the end of a step after which the Trainer
logs, which all ranks know alike; never in `log`, which a user may call on one rank.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import gather_objects
from hf_cp.models.moe import is_mixture
from hf_cp.models.patch import context_parallel_state
from hf_cp.planning.devices import device_of_gpu
from hf_cp.planning.model_shape import ModelShape, layer_windows
from hf_cp.sequence.sample import SAMPLE_KEY
from hf_cp.training.telemetry.meter import StepMeter
from hf_cp.training.telemetry.records import WHOLE_SAMPLES, RecordWriter, RunInfo, StepRecord
from hf_cp.training.telemetry.scalars import Peak, run_scalars


class ContextParallelCallback(TrainerCallback):
    """Adds the numbers of hf_cp/training/telemetry/scalars.py (`cp/tokens_per_second`, ...) to the training logs.

    [`ContextParallelTrainer`] has one by default; `trainer.remove_callback(ContextParallelCallback)` switches all of
    it off. Pass your own in `callbacks` for more:

        ContextParallelTrainer(..., callbacks=[ContextParallelCallback(record_dir="runs/a", profile_steps={10})])

    Args:
        record_dir (`str` or `os.PathLike`, *optional*): where every rank writes `rank<r>.jsonl`, a line per optimizer
            step (see [`StepRecord`]), and rank 0 `run.json`; `hf-cp report` reads it. All nodes must share it.
        profile_steps (`Collection[int]`, *optional*): optimizer steps, from 1, that torch.profiler records; every rank
            writes a Chrome trace to `record_dir`, `trace_step<first>_rank<r>.json`; steps that follow one another
            share one.
        peak_tflops (`float`, *optional*): peak of one process's device in the training dtype, in TFLOP/s, for
            `cp/mfu`. By default that of bf16 for GPUs in the table of hf_cp/planning/devices.py; there is no `cp/mfu`
            for others, nor for mixtures of experts.

    Raises:
        ValueError: an argument is out of range, or `profile_steps` is given without `record_dir`.
    """

    def __init__(
        self,
        *,
        record_dir: str | os.PathLike | None = None,
        profile_steps: Collection[int] = (),
        peak_tflops: float | None = None,
    ):
        wrong = [step for step in profile_steps if not isinstance(step, int) or step < 1]
        if wrong:
            raise ValueError(
                f"profile_steps has {wrong}; steps are counted from 1. Give their numbers, e.g. profile_steps={{3}}."
            )
        if profile_steps and record_dir is None:
            raise ValueError(
                f"profile_steps={sorted(profile_steps)} writes traces, but there is no folder yet. Set record_dir."
            )
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops={peak_tflops} must be positive: TFLOP/s of one device. Leave it out else.")
        self.record_dir = None if record_dir is None else Path(record_dir)
        self.profile_steps, self.peak_tflops = frozenset(profile_steps), peak_tflops
        self.meter: StepMeter | None = None
        self._writer: RecordWriter | None = None
        self._profile: profile | None = None  # of the steps since `_first_profiled`
        self._first_profiled = 0
        self._peak: Peak | None = None
        self._has_announced = False
        self._scalars: dict[str, float] = {}

    # Called by the Trainer itself

    def begin(self, model: nn.Module, comm: Communicator) -> StepMeter:
        """A training run of `model` begins; its steps go through the meter that is returned."""
        self.meter = StepMeter(comm, Counter(layer_windows(model.config.get_text_config())))
        self._peak, self._scalars, self._has_announced = self._find_peak(model), {}, False
        return self.meter

    def announce(self, trainer: Trainer, batch: Mapping[str, Any]) -> None:
        """The first micro-step has shown what runs: rank 0 prints it, once, to standard error.

        No logger: at the levels that nobody has set, the line would never be seen. tqdm keeps it clear of its bars.
        """
        if self._has_announced:
            return
        self._has_announced = True
        if self.meter.mesh.rank == 0:
            info = run_info(trainer, batch)
            tqdm.write(str(info), file=sys.stderr)
            if self._writer is not None:
                self._writer.write_info(info)

    def take_scalars(self) -> dict[str, float]:
        """What was gathered for the log that is being written; once."""
        scalars, self._scalars = self._scalars, {}
        return scalars

    # Called by the training loop

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if self.meter is None:
            raise ValueError(
                "ContextParallelCallback works in a ContextParallelTrainer with a DataCollatorForContextParallel; "
                "this is another Trainer, or it has another collator.\n  Use that Trainer (or "
                "attach_context_parallel), or leave the callback out."
            )
        if self.record_dir is not None:
            self._writer = RecordWriter(self.record_dir, rank=self.meter.mesh.rank, appends=state.global_step > 0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if state.global_step + 1 in self.profile_steps and self._profile is None:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile, self._first_profiled = profile(activities=activities), state.global_step + 1
            self._profile.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.meter.stop(state.global_step)
        if state.global_step + 1 not in self.profile_steps:
            self._write_trace()
        if control.should_log:  # DefaultFlowCallback comes first
            self._report()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if control.should_log:
            self._report()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._write(self.meter.take_records())
        self._write_trace()

    def _report(self) -> None:
        """Gathers the records since the last report; all ranks are here."""
        records, mesh = self.meter.take_records(), self.meter.mesh
        if not records:  # logged already, at the end of the step
            return
        self._write(records)
        ranks = gather_objects(reduce(add, records), comm=self.meter.comm)
        sizes = {"ring_size": mesh.ring_size, "ulysses_size": mesh.ulysses_size}
        self._scalars = run_scalars(ranks, num_steps=len(records), peak=self._peak, **sizes)

    def _write(self, records: list[StepRecord]) -> None:
        if self._writer is not None:
            self._writer.write(records)

    def _write_trace(self) -> None:
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        name = f"trace_step{self._first_profiled}_rank{self.meter.mesh.rank}.json"
        running.export_chrome_trace(str(self.record_dir / name))

    def _find_peak(self, model: nn.Module) -> Peak | None:
        tflops = self.peak_tflops
        if tflops is None and self.meter.mesh.device_type == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            device = device_of_gpu(properties.name, properties.total_memory)
            tflops = None if device is None else device.peak_tflops
        if tflops is None or any(map(is_mixture, model.modules())):
            return None
        return Peak(tflops, ModelShape.from_config(model.config), trains_weights=not hasattr(model, "peft_config"))


def run_info(trainer: Trainer, batch: Mapping[str, Any]) -> RunInfo:
    """Of a [`ContextParallelTrainerMixin`] whose model has seen `batch`."""
    state, sample, mesh = context_parallel_state(trainer.model), batch.get(SAMPLE_KEY), trainer.cp_mesh
    return RunInfo(
        mesh.dp_size,
        mesh.ring_size,
        mesh.ulysses_size,
        layout=WHOLE_SAMPLES if sample is None else sample.layout.layout,
        engine="none" if state is None or mesh.ring_size == 1 else state.comm.progress.engine,
        kernel="that of the model" if state is None else state.comm.progress.kernel,
        max_tokens=trainer.data_collator.max_tokens,
        samples_per_step=trainer.get_total_train_batch_size(trainer.args),
        first_step=trainer.state.global_step + 1,
        device=torch.cuda.get_device_name() if mesh.device_type == "cuda" else "cpu",
    )
