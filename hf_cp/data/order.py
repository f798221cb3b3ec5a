"""In which order an epoch visits the rows, and who gets which.

An epoch is a permutation of the rows, given by (seed, epoch) alone, cut into windows: the rows of one optimizer step.
Which rows share a window does not depend on the number of dp ranks, so a run may go on with another cp_size (and thus
dp_size) and see the same rows in the same steps. *Inside* a window the order is free, since gradients are added up; it
is used to even out the work: costly rows of a window meet in one micro-step, where dp ranks wait for each other. With
rows of cost 1 to 4, dp_size 2 and windows of 4:

| micro-step | dp 0 | dp 1 |
|---|---|---|
| 0 | cost 4 | cost 3 |
| 1 | cost 1 | cost 2 |

Every second micro-step is given out backwards, so that no rank gets the costlier row each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_cp.sequence.packing import PackingManifest
from hf_cp.sequence.placement import causal_area

MASKED_ROW = -1  # stands for a row without targets, where rows do not divide over dp ranks
MAX_WINDOWS_PER_POOL = 50  # rows are sorted by cost inside pools of this many windows


def attention_areas(manifest: PackingManifest) -> tuple[int, ...]:
    """Visible (query, key) pairs of each row: the cost in which rows of about equally many tokens differ."""
    return tuple(sum(causal_area(manifest.lengths[document]) for document in row) for row in manifest.rows)


def check_rows_per_step(rows_per_step: int, dp_size: int) -> None:
    """Raises ValueError unless the rows of an optimizer step fill whole micro-steps."""
    if rows_per_step < 1 or rows_per_step % dp_size:
        raise ValueError(
            f"rows_per_step={rows_per_step} is not a multiple of dp_size={dp_size}.\n"
            "  An optimizer step has dp_size rows per micro-step: use dp_size * gradient_accumulation_steps."
        )


def even_out(rows: Sequence[int], costs: Sequence[int], dp_size: int) -> list[int]:
    """Deals the rows of one step: similar costs in a micro-step, every second micro-step backwards.

    Returns:
        `list[int]`: as [`RowOrder.rows`], filled up to whole micro-steps with `MASKED_ROW`.
    """
    if len(rows) > dp_size > 1:  # one rank, or one micro-step: nothing to even out
        rows = sorted(rows, key=lambda row: -costs[row])
    steps = [list(rows[start : start + dp_size]) for start in range(0, len(rows), dp_size)]
    steps[-1] += [MASKED_ROW] * (dp_size - len(steps[-1]))
    return [row for number, step in enumerate(steps) for row in (step[::-1] if number % 2 else step)]


@dataclass(frozen=True)
class RowOrder:
    """The order of rows for every epoch; equal on all ranks.

    Args:
        costs (`Sequence[int]`): of each row, in any unit.
        dp_size (`int`): rows of a micro-step.
        rows_per_step (`int`): rows of a window, a multiple of `dp_size`.
        shuffle (`bool`): permute by (seed, epoch), and even out costs; otherwise natural order.
        seed (`int`): not negative.
        drop_last (`bool`): leave out a last micro-step that has too few rows.
        group_by_cost (`bool`): rows of a window have similar costs, so that dp ranks are even although a window has
            one micro-step. Windows are then homogeneous, which changes what one optimizer step averages over.

    Raises:
        ValueError: `rows_per_step` is not a multiple of `dp_size`, costs are grouped without `shuffle`, or no step is
            left.
    """

    costs: Sequence[int]
    dp_size: int
    rows_per_step: int
    shuffle: bool
    seed: int
    drop_last: bool
    group_by_cost: bool = False

    def __post_init__(self):
        check_rows_per_step(self.rows_per_step, self.dp_size)
        if self.group_by_cost and not self.shuffle:
            raise ValueError("group_by_cost=True needs shuffle=True: natural order cannot be grouped.")
        if self.drop_last and self.num_rows < self.dp_size:
            raise ValueError(
                f"drop_last leaves no step: {self.num_rows} rows for dp_size={self.dp_size}.\n"
                "  Use drop_last=False, a smaller max_tokens (more rows), or fewer data-parallel ranks."
            )

    @property
    def num_rows(self) -> int:
        """Rows of the data set."""
        return len(self.costs)

    @property
    def num_given(self) -> int:
        """Rows that an epoch visits."""
        return self.num_rows // self.dp_size * self.dp_size if self.drop_last else self.num_rows

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of an epoch, the same for every dp rank."""
        return -(-self.num_given // self.dp_size)

    def rows(self, epoch: int) -> list[int]:
        """Rows in the order in which they are given out: micro-step s, dp rank d gets entry s * dp_size + d."""
        if not self.shuffle:
            order = list(range(self.num_given))
            return order + [MASKED_ROW] * (self.num_micro_steps * self.dp_size - self.num_given)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.num_rows)[: self.num_given]
        if self.group_by_cost:
            order = self._grouped(order, rng)
        windows = (order[start : start + self.rows_per_step] for start in range(0, len(order), self.rows_per_step))
        return [row for window in windows for row in even_out(window.tolist(), self.costs, self.dp_size)]

    @cached_property
    def _costs(self) -> np.ndarray:
        return np.asarray(self.costs)

    def _falling(self, order: np.ndarray) -> np.ndarray:
        """Sorted by falling cost; equal costs keep their (random) order."""
        return order[np.argsort(-self._costs[order], kind="stable")]

    def _grouped(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Windows of similar rows in random order, the costliest first: if memory is short, it shows in step 1."""
        size = self.rows_per_step
        num_windows = len(order) // size
        if num_windows == 0:
            return order
        # few windows: at least 4 pools, so that epochs still differ in who shares a window
        pool = size * max(1, min(MAX_WINDOWS_PER_POOL, num_windows // 4))
        order = np.concatenate([self._falling(order[start : start + pool]) for start in range(0, len(order), pool)])
        whole, rest = order[: num_windows * size].reshape(num_windows, size), order[num_windows * size :]
        whole = whole[rng.permutation(num_windows)]
        first = int(self._costs[whole].max(axis=1).argmax())
        whole[[0, first]] = whole[[first, 0]]
        return np.concatenate([whole.reshape(-1), rest])
