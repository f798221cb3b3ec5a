"""What `hf-cp bench` finds for one case, and the table of a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_cp.output import Table
from hf_cp.tools.bench.cases import Case

NOISE = 0.15  # (p90 - p10) / median: from here on a time is called noisy
# root mean square of the difference over that of the values, of output and gradients; about 30 roundings
ERROR_LIMITS = {"float64": 1e-13, "float32": 4e-6, "bfloat16": 3e-2, "float16": 4e-3}
DERIVED = ("is_noisy", "is_exact", "overlap", "gigabytes_per_second", "tokens_per_second")
MIB = 2**20


@dataclass(frozen=True)
class Spread:
    """Seconds of the slowest rank over the rounds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Of the seconds of each round."""
        p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
        return cls(median, p10, p90)

    @property
    def width(self) -> float:
        """p90 - p10, relative to the median."""
        return (self.p90 - self.p10) / abs(self.median) if self.median else 0.0


@dataclass(frozen=True)
class Result:
    """What was found for one case.

    Attributes:
        seconds (`Spread`): forward and backward pass.
        communication (`Spread`): the transfers alone, one after another.
        exposed (`Spread`): communication that nothing hides; below zero it is noise.
        without (`Spread`): the pass with copies in place of the transfers.
        slowest_rank (`int`): the rank that takes longest without communication.
        imbalance (`float`): its time over the mean of the ranks.
        sent_bytes (`int`): by the rank that sends most.
        peak_bytes (`int`): made by the pass and alive at once, without q, k, v; of the rank that has most.
        error (`float`): against fp64 math in one process, on a short sample; see `ERROR_LIMITS`.
        rounds (`list[float]`): seconds of each round.
    """

    case: Case
    seconds: Spread
    communication: Spread
    exposed: Spread
    without: Spread
    slowest_rank: int
    imbalance: float
    sent_bytes: int
    peak_bytes: int
    error: float
    rounds: list[float]

    @property
    def is_noisy(self) -> bool:
        """Whether the seconds vary by more than `NOISE`."""
        return self.seconds.width > NOISE

    @property
    def is_exact(self) -> bool:
        """Whether the error is what roundings of the type explain; NaN is not."""
        return self.error <= ERROR_LIMITS[self.case.setting.dtype]

    @property
    def overlap(self) -> float | None:
        """Share of the communication that is hidden behind arithmetic."""
        total = self.communication.median
        return None if not self.sent_bytes else min(1.0, max(0.0, 1 - self.exposed.median / total))

    @property
    def gigabytes_per_second(self) -> float | None:
        """Bytes of the rank that sends most, over the time of the transfers alone."""
        return self.sent_bytes / self.communication.median / 1e9 if self.sent_bytes else None

    @property
    def tokens_per_second(self) -> float:
        """Of one packed sample, by all of its ranks together."""
        return self.case.setting.num_tokens / self.seconds.median

    def as_json(self) -> dict[str, Any]:
        """The entry of `bench.json`: the case, everything measured and what follows from it."""
        values = {name: value for name, value in vars(self).items() if name != "case"}
        return self.case.as_json() | values | {name: getattr(self, name) for name in DERIVED}


def setting_table(results: Sequence[Result]) -> Table:
    """The methods of one setting, a row for each."""
    fastest = min(result.seconds.median for result in results)
    columns = ("method", "ms (p10-p90)", "comm ms", "exposed ms", "hidden", "slowest rank", "GB/s", "peak MiB")
    title = f"{results[0].case.setting}; forward + backward"
    return Table(title, (*columns, "error", "tokens/s", "vs best", "note"), [_cells(r, fastest) for r in results])


def _cells(result: Result, fastest: float) -> tuple[str, ...]:
    seconds, is_split = result.seconds, result.sent_bytes > 0
    notes = ["noisy"] * result.is_noisy + ["NOT EXACT"] * (not result.is_exact)
    return (
        result.case.method,
        f"{seconds.median * 1e3:.2f} ({seconds.p10 * 1e3:.2f}-{seconds.p90 * 1e3:.2f})",
        f"{result.communication.median * 1e3:.2f}" if is_split else "-",
        f"{result.exposed.median * 1e3:.2f}" if is_split else "-",
        f"{result.overlap:.0%}" if is_split else "-",
        f"{result.slowest_rank} ({result.imbalance:.2f}x)",
        f"{result.gigabytes_per_second:.2f}" if is_split else "-",
        f"{result.peak_bytes / MIB:.1f}",
        f"{result.error:.0e}",
        f"{result.tokens_per_second:,.0f}",
        f"{seconds.median / fastest:.2f}x",
        ", ".join(notes),
    )
