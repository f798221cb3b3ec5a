"""A place in the data that outlives the run: which rows are done, whoever has done them.

Rows are counted over all dp ranks, so a place can be found again with another cp_size or dp_size: both runs deal the
same rows to the same optimizer step, as long as a step has as many rows (hf_cp/data/order.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hf_cp.data.order import RowOrder

# Whatever of these differs, the rows of an epoch come in another order, or are other rows.
SAME = ("data_digest", "shuffle", "seed", "group_by_cost", "rows_per_epoch")


@dataclass(frozen=True)
class LoaderPosition:
    """Where a loader is.

    Args:
        epoch (`int`): the epoch that is being read.
        next_step (`int`): micro-steps of it that are done.
        dp_size (`int`): rows of a micro-step.
        rows_per_step (`int`): rows of an optimizer step.
        rows_per_epoch (`int`, *optional*): rows that an epoch visits; `None` for a stream, which goes on for ever.
        shuffle, seed, group_by_cost: of the [`RowOrder`].
        data_digest (`str`): of the documents and of how they are packed ([`PackedDataset.digest`]).
    """

    epoch: int
    next_step: int
    dp_size: int
    rows_per_step: int
    rows_per_epoch: int | None
    shuffle: bool
    seed: int
    group_by_cost: bool
    data_digest: str

    @classmethod
    def of(cls, order: RowOrder, *, data_digest: str, epoch: int, step: int) -> LoaderPosition:
        """Micro-step `step` of `epoch` in `order`."""
        return cls(
            epoch=epoch,
            next_step=step,
            dp_size=order.dp_size,
            rows_per_step=order.rows_per_step,
            rows_per_epoch=order.num_given,
            shuffle=order.shuffle,
            seed=order.seed,
            group_by_cost=order.group_by_cost,
            data_digest=data_digest,
        )

    @classmethod
    def load(cls, state: dict[str, Any]) -> LoaderPosition:
        """From `dataclasses.asdict`, maybe through JSON.

        Raises:
            ValueError: it was written by another version.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if known != set(state):
            raise ValueError(
                f"The saved position of the data loader has the fields {sorted(state)}, this version of hf_cp needs "
                f"{sorted(known)}.\n  Resume with the version that wrote it, or start the epoch anew."
            )
        return cls(**state)

    @property
    def rows_done(self) -> int:
        """Rows of the epoch that are done, over all dp ranks."""
        done = self.next_step * self.dp_size
        return done if self.rows_per_epoch is None else min(done, self.rows_per_epoch)

    def next_step_in(self, current: LoaderPosition) -> int:
        """The micro-step of another loader that continues here.

        Args:
            current (`LoaderPosition`): any position of that loader.

        Raises:
            ValueError: the other loader has other rows or another order, or this is not the end of a step of both.
        """
        self.check_same_rows(current)
        if (self.dp_size, self.rows_per_step) == (current.dp_size, current.rows_per_step):
            return self.next_step
        if self.rows_done == self.rows_per_epoch:
            return -(-self.rows_per_epoch // current.dp_size)
        unequal = self.rows_per_step != current.rows_per_step
        if self.rows_done % self.rows_per_step or self.rows_done % current.rows_per_step or (
            unequal and self.group_by_cost
        ):  # fmt: skip
            raise ValueError(
                f"The saved position cannot be continued in this layout: {self.rows_done} rows of epoch {self.epoch} "
                f"are done with dp_size={self.dp_size} and {self.rows_per_step} rows per optimizer step; here "
                f"dp_size={current.dp_size}, {current.rows_per_step} rows per step.\n"
                "  Resume with gradient_accumulation_steps such that a step has "
                f"{self.rows_per_step} rows, from the end of a step or of an epoch."
            )
        return self.rows_done // current.dp_size

    def check_same_rows(self, current: LoaderPosition) -> None:
        """Raises ValueError unless both runs have the same rows in the same order."""
        for name in SAME:
            saved, own = getattr(self, name), getattr(current, name)
            if saved != own:
                raise ValueError(
                    f"The saved position does not fit this data: {name} was {saved}, here it is {own}.\n"
                    "  Resume with the same documents, max_tokens, overflow, seed, shuffling and drop_last, or start "
                    "the epoch anew."
                )
