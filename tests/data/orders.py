"""Orders and positions that the data tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_cp.data.order import LoaderPosition, SampleOrder


def make_order(costs: Sequence[int], **settings: Any) -> SampleOrder:
    """Shuffled, on 1 dp rank, one sample a step."""
    return SampleOrder(
        costs, **{"dp_size": 1, "samples_per_step": 1, "shuffle": True, "seed": 0, "drop_last": False, **settings}
    )


def position(order: SampleOrder, *, epoch: int = 0, step: int = 0, data_digest: str = "ab") -> LoaderPosition:
    return LoaderPosition.of(order, data_digest=data_digest, epoch=epoch, step=step)
