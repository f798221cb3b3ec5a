"""The rows of a run: some are priced, the others follow from them, and data-parallel ranks wait for the costliest.

Rows are sorted by attention area, in which rows of equally many tokens differ. One from the middle of each of
`SAMPLED_ROWS` equal parts is priced, and the costliest; the others lie between, by their area. Invariant: every row
counts once, so a last row that is almost empty weighs no more than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from hf_cp.planning.step_time import StepTime
from hf_cp.sequence.packing import pack_documents

SAMPLED_ROWS = 5


@dataclass(frozen=True)
class Rows:
    """All rows, by rising attention area.

    Args:
        doc_lengths (`tuple[tuple[int, ...], ...]`): of the documents of each row.
    """

    doc_lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def packed(cls, lengths: Sequence[int], max_tokens: int) -> Rows:
        """The rows that the loader would pack.

        Raises:
            ValueError: there is no document, or one is empty or longer than `max_tokens`.
        """
        lengths = [int(length) for length in lengths]
        rows = [tuple(lengths[document] for document in row) for row in pack_documents(lengths, max_tokens)]
        return cls(tuple(sorted(rows, key=_area)))

    @property
    def mean_tokens(self) -> float:
        """Of all rows, exactly."""
        return float(np.mean([sum(row) for row in self.doc_lengths]))

    @cached_property
    def sampled(self) -> list[tuple[int, ...]]:
        """The rows to be priced, in their order."""
        return [self.doc_lengths[place] for place in self._places]

    @property
    def largest(self) -> set[tuple[int, ...]]:
        """The rows that can need most memory: the one with most tokens, and the one with the largest area."""
        return {max(self.doc_lengths, key=sum), self.doc_lengths[-1]}

    def micro_step(self, steps: Sequence[StepTime], *, dp_size: int) -> StepTime:
        """The mean over all rows, and how long ranks wait for the costliest row of a micro-step.

        `dp_size` random rows meet: that is how the loader deals a step of one micro-step. (With accumulation, or
        `group_by_length`, rows of similar cost meet, and ranks wait less.) The costliest of d rows is the k-th of N
        with probability (k / N)^d - ((k - 1) / N)^d.

        Args:
            steps (sequence of `StepTime`): of the `sampled` rows.
            dp_size (`int`): rows that are trained on at the same time.
        """
        areas = np.array([_area(row) for row in self.doc_lengths], dtype=float)
        known, first = np.unique(areas[self._places], return_index=True)
        rows = {
            field.name: np.interp(areas, known, np.array([getattr(step, field.name) for step in steps])[first])
            for field in fields(StepTime)
        }
        mean = StepTime(**{name: float(values.mean()) for name, values in rows.items()})
        share = np.arange(len(areas) + 1) / len(areas)
        costliest = float(np.diff(share**dp_size) @ np.sort(rows["compute"] + rows["exposed"]))
        return replace(mean, waiting=max(0.0, costliest - mean.seconds) if dp_size > 1 else 0.0)

    @cached_property
    def _places(self) -> list[int]:
        """The middles of equal parts, and the last."""
        count = min(SAMPLED_ROWS, len(self.doc_lengths))
        middles = (np.arange(count) + 0.5) / count * len(self.doc_lengths)
        return sorted({*middles.astype(int).tolist(), len(self.doc_lengths) - 1})


def _area(row: Sequence[int]) -> int:
    return sum(length * (length + 1) // 2 for length in row)
