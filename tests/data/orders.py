"""Orders and positions that the data tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_cp.data.order import RowOrder
from hf_cp.data.position import LoaderPosition


def make_order(costs: Sequence[int], **settings: Any) -> RowOrder:
    """Shuffled, on 1 dp rank, one row a step."""
    return RowOrder(
        costs, **{"dp_size": 1, "rows_per_step": 1, "shuffle": True, "seed": 0, "drop_last": False, **settings}
    )


def position(order: RowOrder, *, epoch: int = 0, step: int = 0, data_digest: str = "ab") -> LoaderPosition:
    return LoaderPosition.of(order, data_digest=data_digest, epoch=epoch, step=step)
