"""The numbers that a run logs about itself, from the records of all ranks.

| name | meaning |
|---|---|
| `cp/tokens_per_second` | tokens of documents, all ranks, over the time of the slowest rank's steps |
| `cp/tokens` | tokens of documents in an optimizer step, all ranks |
| `cp/targets` | those with loss |
| `cp/padding` | share of all slots without a token, 0 to 1 |
| `cp/work_max_over_mean` | attention work (visible pairs) of the rank with most of it, over the mean of all ranks |
| `cp/ring_bytes`, `cp/ulysses_bytes` | sent over the axis by a rank in an optimizer step, mean over ranks |
| `cp/flight_seconds` | transfers of attention from start to use, in an optimizer step, mean over ranks |
| `cp/exposed` | share of these seconds in which a rank did nothing but wait, 0 to 1 |
| `cp/wait_share` | share of the step in which a rank waited for peers, mean over ranks, 0 to 1 |
| `cp/slowest_rank` | the rank that needed most time by itself (see `work_seconds` of [`StepRecord`]) |
| `cp/slowest_over_mean` | that time, over the mean of all ranks |
| `cp/peak_memory_gib_max`, `cp/peak_memory_gib_min` | peak memory of a rank so far, in GiB |
| `cp/mfu` | needed operations over the peak of all devices, 0 to 1; where the peak is known |

All of them are over the optimizer steps since the last log. What needs several ranks, or an axis with several, is left
out where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cp.environment import GIB
from hf_cp.planning.flops import training_flops
from hf_cp.planning.model_shape import ModelShape
from hf_cp.training.telemetry.records import StepRecord

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """What MFU is measured with.

    Args:
        tflops (`float`): peak of one process's device, in TFLOP/s.
        model (`ModelShape`): whose operations are counted.
        trains_weights (`bool`): `False` where only adapters are trained.
    """

    tflops: float
    model: ModelShape
    trains_weights: bool

    def utilization(self, *, tokens: float, area: float, device_seconds: float) -> float:
        """Needed operations over possible ones (arXiv:2204.02311, appendix B); recomputed ones are not needed."""
        needed = training_flops(self.model, tokens=tokens, area=area, trains_weights=self.trains_weights)
        return needed / (self.tflops * TERA * device_seconds)


def run_scalars(
    records: Sequence[StepRecord],
    *,
    num_steps: int,
    ring_size: int = 1,
    ulysses_size: int = 1,
    peak: Peak | None = None,
) -> dict[str, float]:
    """The table above.

    Args:
        records (`Sequence[StepRecord]`): of every rank, the sum over its last `num_steps` optimizer steps.
        num_steps (`int`): at least 1.
        ring_size, ulysses_size (`int`): of the mesh.
        peak (`Peak`, *optional*): without it there is no `cp/mfu`.
    """
    size = len(records)
    total = records[0]
    for record in records[1:]:
        total += record
    seconds = max(record.seconds for record in records)
    memory = [record.peak_memory_bytes / GIB for record in records]
    scalars = {
        "cp/tokens_per_second": round(total.tokens / seconds, 1),
        "cp/tokens": _per(total.tokens, num_steps),
        "cp/targets": _per(total.targets, num_steps),
        "cp/padding": round(1 - total.tokens / total.slots, 6),
        "cp/peak_memory_gib_max": round(max(memory), 3),
        "cp/peak_memory_gib_min": round(min(memory), 3),
    }
    if ring_size > 1:
        scalars["cp/ring_bytes"] = _per(total.ring_bytes, num_steps * size)
    if ulysses_size > 1:
        scalars["cp/ulysses_bytes"] = _per(total.ulysses_bytes, num_steps * size)
    if ring_size * ulysses_size > 1:
        flight = total.ring_flight_seconds + total.ulysses_flight_seconds
        waited = total.ring_wait_seconds + total.ulysses_wait_seconds
        scalars["cp/flight_seconds"] = round(flight / (num_steps * size), 6)
        scalars["cp/exposed"] = round(waited / flight, 4) if flight else 0.0
        scalars |= _slowest([record.busy_seconds for record in records])
    if size > 1:
        scalars["cp/work_max_over_mean"] = round(_max_over_mean([record.area for record in records]), 4)
        scalars["cp/wait_share"] = round(total.wait_seconds / total.seconds, 4)
    if peak is not None:
        used = peak.utilization(tokens=total.tokens, area=total.area, device_seconds=seconds * size)
        scalars["cp/mfu"] = float(f"{used:.4g}")
    return scalars


def _slowest(busy: Sequence[float]) -> dict[str, float]:
    return {"cp/slowest_rank": busy.index(max(busy)), "cp/slowest_over_mean": round(_max_over_mean(busy), 4)}


def _per(amount: float, count: int) -> float:
    """The mean; whole numbers stay exact."""
    return amount // count if amount % count == 0 else round(amount / count, 3)


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0
