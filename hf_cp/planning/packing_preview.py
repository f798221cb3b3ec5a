"""What packing and splitting will do to a data set, before anything runs.

Everything comes from the code that training runs: [`PackedDataset`] reads and packs, [`SequenceLayout`] and
[`AttentionPlan`] split, `sequence/costs.py` counts bytes, [`RowOrder`] deals rows to data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_cp.attention.usp import choose_engine
from hf_cp.config import ContextParallelConfig
from hf_cp.data.order import RowOrder, attention_areas
from hf_cp.data.packed import PackedDataset
from hf_cp.sequence.costs import AttentionShape, ring_bytes, ring_tokens, ulysses_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.packing import PackingManifest
from hf_cp.sequence.plan import AttentionPlan

__all__ = ["ENGINES", "Bin", "EngineTraffic", "LayoutPreview", "ModelAttention", "ReplicaBalance"]
__all__ += ["length_histogram", "preview_layout", "replica_balance", "sample_rows"]

ENGINES = ("p2p", "allgather", "exchange")


@dataclass(frozen=True)
class Bin:
    """Documents of `low` to `high` tokens (both included): how many, and their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class ModelAttention:
    """The attention layers of a model.

    Args:
        shape (`AttentionShape`, *optional*): sizes of a layer; without it no bytes are counted.
        windows (sequence of (`int` or `None`, `int`)): sliding windows and their numbers of layers.
    """

    shape: AttentionShape | None = None
    windows: Sequence[tuple[int | None, int]] = ((None, 1),)

    @property
    def num_layers(self) -> int:
        """Attention layers, whatever their windows."""
        return sum(count for _, count in self.windows)


@dataclass(frozen=True)
class EngineTraffic:
    """What an engine moves over the ring axis; of the rank that sends most, mean over rows.

    Args:
        engine (`str`): "p2p", "allgather", "exchange", or "auto": in each row the one that `ring_comm="auto"` takes.
        kv_rows (`float`): K/V rows that it sends in one pass of one layer.
        share (`float`): of what a full ring sends, R - 1 shards; 0 for a ring of one.
        num_bytes (`float`, *optional*): forward and backward pass of all layers.
        rows_by_rank (`tuple[float, ...]`): K/V rows of each ring rank in one pass of one layer, mean over rows.
    """

    engine: str
    kv_rows: float
    share: float
    num_bytes: float | None
    rows_by_rank: tuple[float, ...]


@dataclass(frozen=True)
class LayoutPreview:
    """A layout on the looked-at rows.

    Args:
        layout (`str`): its name.
        balance, worst_balance (`float`): mean over largest attention area of a rank, 1 is even: of all rows (sums of
            both), and of the worst row.
        padding (`float`): share of the slots that hold no token.
        local_length (`int`): slots of a rank, of the longest shard.
        areas (`tuple[float, ...]`): attention area (visible pairs, all layers) of each ring rank, mean over rows; the
            Ulysses ranks of a ring rank share it by heads.
        traffic (`tuple[EngineTraffic, ...]`): of every engine, then of "auto"; empty for a ring of one.
        auto (`dict`): engine that `ring_comm="auto"` takes -> number of rows.
        ulysses_bytes (`float`, *optional*): forward and backward pass of all layers, mean over rows.
    """

    layout: str
    balance: float
    worst_balance: float
    padding: float
    local_length: int
    areas: tuple[float, ...]
    traffic: tuple[EngineTraffic, ...]
    auto: dict[str, int]
    ulysses_bytes: float | None


@dataclass(frozen=True)
class ReplicaBalance:
    """How evenly attention cost falls on data-parallel ranks, which wait for each other in every micro-step.

    Args:
        dp_size, rows_per_step (`int`): ranks with rows of their own; rows of an optimizer step.
        num_micro_steps (`int`): of an epoch.
        balance (`float`): mean over largest attention area of a rank, over all micro-steps of an epoch.
        grouped_balance (`float`): the same with rows of similar cost in a step (`group_by_cost`).
    """

    dp_size: int
    rows_per_step: int
    num_micro_steps: int
    balance: float
    grouped_balance: float


def length_histogram(lengths: Sequence[int]) -> list[Bin]:
    """Bins that double in width: 1, 2-3, 4-7, ... from the shortest to the longest document.

    >>> length_histogram([1, 5, 6])
    [Bin(low=1, high=1, documents=1, tokens=1), Bin(low=2, high=3, documents=0, tokens=0), \
Bin(low=4, high=7, documents=2, tokens=11)]
    """
    lengths = np.asarray(lengths)
    exponents = np.frexp(lengths)[1] - 1  # 2**e <= length < 2**(e + 1)
    bins = []
    for exponent in range(int(exponents.min()), int(exponents.max()) + 1):
        inside = lengths[exponents == exponent]
        bins.append(Bin(2**exponent, 2 ** (exponent + 1) - 1, len(inside), int(inside.sum())))
    return bins


def sample_rows(manifest: PackingManifest, count: int) -> list[tuple[int, ...]]:
    """Document lengths of up to `count` rows: all, or evenly spread from the cheapest to the costliest attention."""
    order = np.argsort(attention_areas(manifest), kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))]
    return [tuple(manifest.lengths[document] for document in manifest.rows[row]) for row in chosen.tolist()]


def preview_layout(
    rows: Sequence[tuple[int, ...]], config: ContextParallelConfig, attention: ModelAttention, *, layout: str
) -> LayoutPreview:
    """Splits every row by `layout` and adds up.

    Args:
        rows (sequence of `tuple[int, ...]`): document lengths of each row.
        config (`ContextParallelConfig`): the degrees; its own layout does not count.
        attention (`ModelAttention`): of the model.
        layout (`str`): one of `hf_cp.config.LAYOUTS`.
    """
    config = replace(config, layout=layout)
    split = [_SplitRow(SequenceLayout(row, config), config, attention) for row in rows]
    areas = np.array([row.areas for row in split], dtype=float)  # [rows, R]
    slots = sum(row.layout.local_length * config.cp_size for row in split)
    has_ring = config.ring_degree > 1
    return LayoutPreview(
        layout=config.resolved_layout,
        balance=float(areas.mean(1).sum() / areas.max(1).sum()),
        worst_balance=float((areas.mean(1) / areas.max(1)).min()),
        padding=1 - sum(row.layout.num_tokens for row in split) / slots,
        local_length=max(row.layout.local_length for row in split),
        areas=tuple(areas.mean(0).tolist()),
        traffic=tuple(map(_mean_traffic, zip(*(row.traffic() for row in split), strict=True))) if has_ring else (),
        auto=_counted([row.auto for row in split]) if has_ring else {},
        ulysses_bytes=None if attention.shape is None else float(np.mean([row.ulysses_bytes for row in split])),
    )


@dataclass(frozen=True)
class _SplitRow:
    """One row under one layout, all attention layers."""

    layout: SequenceLayout
    config: ContextParallelConfig
    attention: ModelAttention

    @cached_property
    def plans(self) -> list[tuple[AttentionPlan, int]]:
        return [(AttentionPlan(self.layout, window=window), count) for window, count in self.attention.windows]

    @property
    def areas(self) -> list[int]:
        """Of every ring rank; the ranks of a Ulysses group share theirs by heads."""
        ranks = range(self.config.ring_degree)
        return [sum(count * plan.area(rank) for plan, count in self.plans) for rank in ranks]

    @property
    def auto(self) -> str:
        return choose_engine(replace(self.config, ring_comm="auto"), self.plans[0][0])

    def traffic(self) -> list[EngineTraffic]:
        """Of every engine, and again of the one that auto takes."""
        found = {engine: self._traffic(engine) for engine in ENGINES}
        return [*found.values(), replace(found[self.auto], engine="auto")]

    def _traffic(self, engine: str) -> EngineTraffic:
        """Of the rank that sends most rows in a forward pass, and of the one that sends most bytes in both."""
        ranks, shape = range(self.config.ring_degree), self.attention.shape
        sent = [sum(n * ring_tokens(plan, rank, engine)[0] for plan, n in self.plans) for rank in ranks]
        by_rank = tuple(total / self.attention.num_layers for total in sent)
        full = (self.config.ring_degree - 1) * self.layout.ring_shard_length
        most = None
        if shape is not None:
            both = [sum(n * sum(ring_bytes(shape, plan, rank, engine)) for plan, n in self.plans) for rank in ranks]
            most = float(max(both))
        return EngineTraffic(engine, max(by_rank), max(by_rank) / full, most, by_rank)

    @property
    def ulysses_bytes(self) -> int:
        """Two passes of every layer."""
        degree = self.config.ulysses_degree
        one = ulysses_bytes(self.attention.shape, local_length=self.layout.local_length, ulysses_degree=degree)
        return 2 * one * self.attention.num_layers


def replica_balance(packed: PackedDataset, *, dp_size: int, num_accumulated: int, seed: int) -> ReplicaBalance:
    """Deals the rows of one epoch to `dp_size` ranks as the loader does, shuffled.

    Args:
        packed (`PackedDataset`): the rows.
        dp_size, num_accumulated (`int`): an optimizer step has dp_size x num_accumulated rows.
        seed (`int`): of the order.
    """
    costs = attention_areas(packed.manifest)
    rows_per_step = dp_size * num_accumulated
    common = {"dp_size": dp_size, "rows_per_step": rows_per_step, "shuffle": True, "seed": seed, "drop_last": False}
    plain, grouped = (RowOrder(costs, **common, group_by_cost=by_cost) for by_cost in (False, True))
    return ReplicaBalance(dp_size, rows_per_step, plain.num_micro_steps, _balance(plain), _balance(grouped))


def _balance(order: RowOrder) -> float:
    """Ranks wait for the costliest row of each micro-step: sum of means over sum of maxima."""
    costs = [0 if row < 0 else order.costs[row] for row in order.rows(0)]  # a masked row costs next to nothing
    steps = np.array(costs, dtype=float).reshape(-1, order.dp_size)
    return float(steps.mean(1).sum() / steps.max(1).sum())


def _mean_traffic(rows: Sequence[EngineTraffic]) -> EngineTraffic:
    known = [row.num_bytes for row in rows if row.num_bytes is not None]
    return EngineTraffic(
        rows[0].engine,
        float(np.mean([row.kv_rows for row in rows])),
        float(np.mean([row.share for row in rows])),
        float(np.mean(known)) if known else None,
        tuple(np.mean([row.rows_by_rank for row in rows], axis=0).tolist()),
    )


def _counted(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}
