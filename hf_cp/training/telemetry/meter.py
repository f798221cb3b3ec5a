"""What one process does in an optimizer step: samples, work, bytes, waits, seconds.

The meter follows the training loop:

    start   fetched   start_micro_step  end_micro_step   ...   stop
    |-data--|---------|-----forward, backward---|--------------|update|     (then evaluation, saving: nothing is noted)

Nothing is sent, and the device is not waited for until the records are asked for: a step's marks are turned into its
record, and freed, at the start of a later step that finds them passed.

Invariant: what a record holds comes from the sample's layout and plan, from the counter of sent bytes, and from the
clock's marks; never from the shapes of local tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.distributed.clock import Clock, Mark, Point, Wait, seconds_between
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.environment import peak_memory_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import SAMPLE_KEY, PackedSample
from hf_cp.training.telemetry.records import StepRecord


@dataclass
class _MicroStep:
    began: Point
    taken: Point
    forward: Point | None = None
    last_attention: Point | None = None
    ended: Point | None = None

    def work_seconds(self, waits: list[Wait]) -> float:
        if self.forward is None or self.last_attention is None:
            return _own_seconds(self.began, self.ended, waits)
        inside = _own_seconds(self.forward, self.last_attention, waits)
        return _own_seconds(self.began, self.taken, waits) + inside


def _own_seconds(start: Point, end: Point, waits: list[Wait]) -> float:
    """Between two points, without the waits between them."""
    waited = sum(wait.waited for wait in waits[start.num_waits : end.num_waits])
    return seconds_between(start.mark, end.mark) - waited


@dataclass
class _OpenStep:
    """A step whose marks may still lie ahead on the device."""

    clock: Clock
    began: Mark
    began_on_host: Mark
    ring_bytes: int
    ulysses_bytes: int
    fetched: Point | None = None
    fetched_on_host: Mark | None = None
    ended: Mark | None = None
    step: int = 0
    tokens: int = 0
    slots: int = 0
    area: float = 0.0
    peak_memory_bytes: int = 0
    targets: list[torch.Tensor] = field(default_factory=list)  # scalars, maybe on the device; on the host once ended
    micro_steps: list[_MicroStep] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """Whether the device has come to the end of the step."""
        return isinstance(self.ended, float) or self.ended.query()

    def record(self) -> StepRecord:
        """Waits for the device."""
        seconds = seconds_between(self.began, self.ended)  # first: `targets` are on the host from then on
        waits = self.clock.waits
        waited, in_flight = Counter(), Counter()
        for wait in waits:
            waited[wait.axis] += wait.waited
            in_flight[wait.axis] += wait.in_flight
        fetch_waits = sum(wait.waited for wait in waits[: self.fetched.num_waits])
        return StepRecord(
            step=self.step,
            seconds=seconds,
            data_seconds=max(0.0, seconds_between(self.began_on_host, self.fetched_on_host) - fetch_waits),
            work_seconds=max(0.0, sum(micro_step.work_seconds(waits) for micro_step in self.micro_steps)),
            ring_wait_seconds=float(waited["ring"]),
            ulysses_wait_seconds=float(waited["ulysses"]),
            other_wait_seconds=float(sum(waited.values()) - waited["ring"] - waited["ulysses"]),
            ring_flight_seconds=float(in_flight["ring"]),
            ulysses_flight_seconds=float(in_flight["ulysses"]),
            ring_bytes=self.ring_bytes,
            ulysses_bytes=self.ulysses_bytes,
            samples=len(self.micro_steps),
            tokens=self.tokens,
            targets=sum(int(count) for count in self.targets),
            slots=self.slots,
            area=self.area,
            peak_memory_bytes=self.peak_memory_bytes,
        )


class StepMeter:
    """Measures the steps of this process.

    Args:
        comm (`Communicator`, *optional*): whose bytes and waits are noted; without one the meter is off.
        windows (`Mapping[int | None, int]`): sliding windows (`None`: full attention) and their numbers of layers.
    """

    def __init__(self, comm: Communicator | None = None, windows: Mapping[int | None, int] | None = None):
        self.comm, self.windows = comm, dict(windows or {})
        self._open: _OpenStep | None = None
        self._stopped: deque[_OpenStep] = deque()
        self._records: list[StepRecord] = []  # of steps before those

    @property
    def mesh(self) -> ContextParallelMesh:
        return self.comm.mesh

    def start(self) -> None:
        """A step begins; one that was begun before and not stopped is forgotten."""
        if self.comm is None:
            return
        while self._stopped and self._stopped[0].is_passed:  # else every wait of the run would be held
            self._records.append(self._stopped.popleft().record())
        comm, clock = self.comm, Clock(self.mesh.device_type)
        comm.clock = clock
        self._open = _OpenStep(clock, clock.mark(), clock.mark(on_host=True), comm.ring_bytes, comm.ulysses_bytes)

    def fetched(self) -> None:
        """The step's batches are there."""
        step = self._open
        if step is not None:
            step.fetched, step.fetched_on_host = step.clock.point(), step.clock.mark(on_host=True)

    def start_micro_step(self, batch: Mapping[str, Any], *, num_tokens: int) -> None:
        """A micro-step begins.

        Args:
            batch: as the collator made it.
            num_tokens (`int`): tokens of documents in it that this rank counts (those of a shared sample on its first
                rank, of a dummy sample nowhere).
        """
        step = self._open
        if step is None:  # off, or a training step outside of the loop
            return
        sample = batch.get(SAMPLE_KEY)
        step.tokens += num_tokens
        step.slots += batch["input_ids"].numel() if sample is None else sample.layout.local_length
        step.targets.append((batch["shift_labels"] != IGNORE_INDEX).sum())
        step.area += self._area(sample or _whole_sample(batch))
        step.clock.forward = step.clock.last_attention = None
        # what lies between two micro-steps belongs to the later one
        began = step.micro_steps[-1].ended if step.micro_steps else step.fetched
        step.micro_steps.append(_MicroStep(began, step.clock.point()))

    def end_micro_step(self) -> None:
        """A micro-step's backward pass has been issued."""
        if self._open is not None:
            done, clock = self._open.micro_steps[-1], self._open.clock
            done.forward, done.last_attention, done.ended = clock.forward, clock.last_attention, clock.point()

    def stop(self, step: int) -> None:
        """Step number `step` is done."""
        if self._open is None:
            return
        done, comm = self._open, self.comm
        # copied before the mark: reading it after the mark has passed waits for nothing
        done.targets = [count.to("cpu", non_blocking=True) for count in done.targets]
        done.step, done.ended = step, done.clock.mark()
        done.ring_bytes = comm.ring_bytes - done.ring_bytes
        done.ulysses_bytes = comm.ulysses_bytes - done.ulysses_bytes
        done.peak_memory_bytes = peak_memory_bytes(self.mesh.device_type)
        self._stopped.append(done)
        self.close()

    def close(self) -> None:
        """Nothing is noted any more, until the next start."""
        if self.comm is not None:
            self._open = self.comm.clock = None

    def take_records(self) -> list[StepRecord]:
        """Of the steps since the last call; waits for the device."""
        records = self._records + [step.record() for step in self._stopped]
        self._records = []
        self._stopped.clear()
        return records

    def _area(self, sample: PackedSample) -> float:
        """Of all layers, this rank's share of the heads."""
        plans = ((sample.attention_plan(window=window), layers) for window, layers in self.windows.items())
        return sum(layers * plan.area(self.mesh.ring_rank) for plan, layers in plans) / self.mesh.ulysses_size


def _whole_sample(batch: Mapping[str, Any]) -> PackedSample:
    borders = batch["cu_seq_lens_q"].tolist()
    lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    return PackedSample(SequenceLayout(lengths, ContextParallelConfig()))
