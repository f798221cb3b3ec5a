"""What packing and splitting will do to a data set, before anything runs.

Everything comes from the code that training runs: [`PackedDataset`] reads and packs, [`SequenceLayout`] and
[`AttentionPlan`] split, `sequence/costs.py` counts bytes, [`SampleOrder`] gives samples to data-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_cp.config import RING_COMMS, ContextParallelConfig
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.manifest import PackingManifest
from hf_cp.data.order import SampleOrder, attention_areas
from hf_cp.sequence.costs import AttentionShape, choose_engine, ring_bytes, ring_tokens, ulysses_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan


class Bin(NamedTuple):
    """Documents of `low` to `high` tokens (both included): how many, and their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


class ModelAttention(NamedTuple):
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


class EngineTraffic(NamedTuple):
    """What an engine moves over the ring axis; of the rank that sends most, mean over samples.

    Args:
        engine (`str`): "p2p", "allgather", "exchange", or "auto": in each sample what `ring_comm="auto"` takes.
        kv_tokens (`float`): K/V tokens that it sends in one pass of one layer.
        share (`float`): of what a full ring sends, R - 1 shards; 0 for a ring of one.
        num_bytes (`float`, *optional*): forward and backward pass of all layers.
        tokens_by_rank (`tuple[float, ...]`): K/V tokens of each ring rank in one pass of one layer, mean over samples.
    """

    engine: str
    kv_tokens: float
    share: float
    num_bytes: float | None
    tokens_by_rank: tuple[float, ...]


@dataclass(frozen=True)
class LayoutPreview:
    """A layout on the looked-at samples.

    Args:
        layout (`str`): its name.
        balance, worst_balance (`float`): mean over largest attention area of a rank, 1 is even: of all samples (sums
            of both), and of the worst one.
        padding (`float`): share of the slots that hold no token.
        local_length (`int`): slots of a rank, of the longest shard.
        areas (`tuple[float, ...]`): attention area (visible pairs, all layers) of each ring rank, mean over samples;
            the Ulysses ranks of a ring rank share it by heads.
        traffic (`tuple[EngineTraffic, ...]`): of every engine, then of "auto"; empty for a ring of one.
        auto (`dict`): engine that `ring_comm="auto"` takes -> number of samples.
        ulysses_bytes (`float`, *optional*): forward and backward pass of all layers, mean over samples.
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


class ReplicaBalance(NamedTuple):
    """How evenly attention cost falls on data-parallel ranks, which wait for each other in every micro-step.

    Args:
        dp_size, num_micro_steps (`int`): ranks with samples of their own; micro-steps of an epoch.
        balance (`float`): mean over largest attention area of a rank, over all micro-steps of an epoch.
        grouped_balance (`float`): the same with samples of similar cost in a step (`group_by_cost`).
    """

    dp_size: int
    num_micro_steps: int
    balance: float
    grouped_balance: float


@dataclass(frozen=True)
class PackPreview:
    """Everything that `hf-cp pack` shows.

    Args:
        num_features, num_documents, num_tokens, num_samples, longest, max_tokens (`int`): the data set as it is
            packed.
        fill (`float`): share of the samples' capacity that holds tokens.
        counts (`dict`): documents that were empty, truncated, split or dropped.
        histogram (sequence of `Bin`): documents by length.
        looked_at (`int`): samples that were split.
        layouts (sequence of `LayoutPreview`): first the one that training takes, then best balance first.
        replicas (`ReplicaBalance`, *optional*): with several data-parallel ranks.
    """

    num_features: int
    num_documents: int
    num_tokens: int
    num_samples: int
    longest: int
    max_tokens: int
    fill: float
    counts: dict[str, int]
    histogram: Sequence[Bin]
    looked_at: int
    layouts: Sequence[LayoutPreview]
    replicas: ReplicaBalance | None


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


def spread_samples(manifest: PackingManifest, count: int) -> list[tuple[int, ...]]:
    """Document lengths of up to `count` samples: all, or evenly spread from the cheapest to the costliest attention.

    >>> spread_samples(PackingManifest((5, 2, 4, 1), ((0, 3), (1, 2))), count=1)
    [(2, 4)]
    """
    order = np.argsort(attention_areas(manifest), kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))]
    return [tuple(manifest.lengths[document] for document in manifest.samples[sample]) for sample in chosen.tolist()]


def preview_layout(
    samples: Sequence[tuple[int, ...]], config: ContextParallelConfig, attention: ModelAttention, *, layout: str
) -> LayoutPreview:
    """Splits every sample by `layout` and adds up.

    Args:
        samples (sequence of `tuple[int, ...]`): document lengths of each.
        config (`ContextParallelConfig`): the degrees; its own layout does not count.
        attention (`ModelAttention`): of the model.
        layout (`str`): one of `hf_cp.config.LAYOUTS`.
    """
    config = replace(config, layout=layout)
    split = [_SplitSample(SequenceLayout(lengths, config), config, attention) for lengths in samples]
    areas = np.array([sample.areas for sample in split], dtype=float)  # [samples, R]
    slots = sum(sample.layout.local_length * config.cp_size for sample in split)
    has_ring = config.ring_degree > 1
    return LayoutPreview(
        layout=config.resolved_layout,
        balance=float(areas.mean(1).sum() / areas.max(1).sum()),
        worst_balance=float((areas.mean(1) / areas.max(1)).min()),
        padding=1 - sum(sample.layout.num_tokens for sample in split) / slots,
        local_length=max(sample.layout.local_length for sample in split),
        areas=tuple(areas.mean(0).tolist()),
        traffic=tuple(_mean_traffic(split, engine) for engine in _ENGINES) if has_ring else (),
        auto=dict(Counter(sample.engine("auto") for sample in split)) if has_ring else {},
        ulysses_bytes=None if attention.shape is None else float(np.mean([s.ulysses_bytes for s in split])),
    )


_ENGINES = (*(name for name in RING_COMMS if name != "auto"), "auto")


@dataclass(frozen=True)
class _SplitSample:
    """One sample under one layout, all attention layers."""

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

    def engine(self, name: str) -> str:
        """What `ring_comm=name` takes."""
        return choose_engine(replace(self.config, ring_comm=name), self.plans[0][0])

    def tokens(self, engine: str) -> list[float]:
        """K/V tokens that every ring rank sends in one pass, mean over layers."""
        return [
            sum(count * ring_tokens(plan, rank, self.engine(engine))[0] for plan, count in self.plans)
            / self.attention.num_layers
            for rank in range(self.config.ring_degree)
        ]

    def num_bytes(self, engine: str) -> int:
        """Of the rank that sends most in both passes of all layers."""
        shape = self.attention.shape
        return max(
            sum(count * sum(ring_bytes(shape, plan, rank, self.engine(engine))) for plan, count in self.plans)
            for rank in range(self.config.ring_degree)
        )

    @property
    def ulysses_bytes(self) -> int:
        """Two passes of every layer."""
        degree = self.config.ulysses_degree
        one = ulysses_bytes(self.attention.shape, local_length=self.layout.local_length, ulysses_degree=degree)
        return 2 * one * self.attention.num_layers


def _mean_traffic(split: Sequence[_SplitSample], engine: str) -> EngineTraffic:
    tokens = np.array([sample.tokens(engine) for sample in split])  # [samples, R]
    most, ring_degree = tokens.max(1), tokens.shape[1]
    full = (ring_degree - 1) * np.array([sample.layout.ring_shard_length for sample in split])
    has_shape = split[0].attention.shape is not None
    num_bytes = float(np.mean([sample.num_bytes(engine) for sample in split])) if has_shape else None
    return EngineTraffic(
        engine, float(most.mean()), float((most / full).mean()), num_bytes, tuple(tokens.mean(0).tolist())
    )


def replica_balance(packed: PackedDataset, *, dp_size: int, num_accumulated: int, seed: int) -> ReplicaBalance:
    """Gives the samples of one epoch to `dp_size` ranks as the loader does, shuffled.

    Args:
        packed (`PackedDataset`): the samples.
        dp_size, num_accumulated (`int`): an optimizer step has dp_size x num_accumulated samples.
        seed (`int`): of the order.
    """
    costs = attention_areas(packed.manifest)
    common = {"samples_per_step": dp_size * num_accumulated, "shuffle": True, "seed": seed, "drop_last": False}
    plain, grouped = (
        SampleOrder(costs, dp_size=dp_size, **common, group_by_cost=by_cost) for by_cost in (False, True)
    )
    return ReplicaBalance(dp_size, plain.num_micro_steps, _balance(plain), _balance(grouped))


def _balance(order: SampleOrder) -> float:
    """Ranks wait for the costliest sample of each micro-step: sum of means over sum of maxima."""
    costs = [0 if row < 0 else order.costs[row] for row in order.samples(0)]  # a dummy sample costs next to nothing
    steps = np.array(costs, dtype=float).reshape(-1, order.dp_size)
    return float(steps.mean(1).sum() / steps.max(1).sum())
