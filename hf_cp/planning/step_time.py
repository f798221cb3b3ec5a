"""Seconds of one micro-step: arithmetic, bytes over links, and what of the bytes is not hidden behind arithmetic.

The attention of a row is not guessed from its length: areas, steps and rows come from the plan of the layout that
would really run, so packed rows are priced as what they are.

Dimensions: n = local tokens, T = n * u = tokens of a ring shard, u = ulysses_degree, R = ring_degree, P = u * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf, sqrt

from hf_cp.config import ContextParallelConfig
from hf_cp.planning.devices import Device
from hf_cp.planning.memory import Training, trainable_parameters
from hf_cp.planning.model_shape import ModelShape
from hf_cp.sequence.costs import (
    BACKWARD_FLOPS,
    AttentionShape,
    attention_flops,
    choose_engine,
    ring_bytes,
    ring_tokens,
    row_elements,
    ulysses_bytes,
)
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan

SAMPLED_RANKS = 8  # ring ranks whose work is looked at; layouts balance it to about 1 %
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Link:
    """One process's way out over an axis; `error` is how far its speed may be off, relative."""

    bytes_per_second: float
    latency: float
    overlap: float = 1.0
    error: float = 0.0

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        """Of so many bytes in so many messages, one after another; nothing to send takes no time."""
        return messages * self.latency + num_bytes / self.bytes_per_second if num_bytes else 0.0

    def measured_as(self, gbs: float | None, latency: float | None) -> Link:
        """With these instead, where they are known."""
        rate = self.bytes_per_second if gbs is None else gbs * GIGA
        return replace(self, bytes_per_second=rate, latency=self.latency if latency is None else latency)

    def exposed(self, seconds: float, compute: float) -> float:
        """What transfers of so many seconds add to so much arithmetic that runs beside them."""
        return seconds - self.overlap * min(seconds, compute)


@dataclass(frozen=True)
class Pass:
    """Attention in one pass on the busiest rank: seconds of arithmetic, of communication that nothing hides; bytes."""

    compute: float = 0.0
    exposed: float = 0.0
    ring_bytes: float = 0.0
    ulysses_bytes: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Pass)))

    def __mul__(self, factor: float) -> Pass:
        return Pass(*(getattr(self, f.name) * factor for f in fields(Pass)))


@dataclass(frozen=True)
class AttentionCost:
    """Attention of one or more layers."""

    forward: Pass
    backward: Pass

    @property
    def ring_bytes(self) -> float:
        """Bytes that leave the rank over the ring axis, in both passes."""
        return self.forward.ring_bytes + self.backward.ring_bytes

    @property
    def ulysses_bytes(self) -> float:
        """Bytes that leave the rank in all-to-alls, in both passes."""
        return self.forward.ulysses_bytes + self.backward.ulysses_bytes


@dataclass(frozen=True)
class Cluster:
    """GPUs, and how many of them share a node."""

    device: Device
    num_gpus: int
    gpus_per_node: int

    def link(self, span: int) -> Link:
        """The slowest link between neighbours of the groups of `span` consecutive processes."""
        inside, between = self._links()
        return inside if self.is_in_node(span) else between

    def _links(self, *, for_trades: bool = False) -> tuple[Link, Link]:
        """Inside a node, and between nodes."""
        d = self.device
        inside = Link(d.intra_gbs * GIGA, d.intra_latency, d.intra_overlap, d.intra_error)
        between = Link(d.inter_gbs * GIGA, d.inter_latency, d.inter_overlap, d.inter_error)
        if not for_trades:
            return inside, between
        return (
            inside.measured_as(d.intra_trade_gbs, d.intra_trade_latency),
            between.measured_as(d.inter_trade_gbs, d.inter_trade_latency),
        )

    def link_to_all(self, size: int, span: int, *, for_trades: bool = False) -> Link:
        """The way out to all others of a group of `size` in `span` consecutive processes, some maybe on the own node.

        Of the size - 1 parts of what is sent, only those for other nodes take the slow link; the others travel at the
        same time.
        """
        inside, between = self._links(for_trades=for_trades)
        if self.is_in_node(span):
            return inside
        is_regular = span % self.gpus_per_node == 0
        own_node = max(1, self.gpus_per_node * size // span) if is_regular else 1
        crossing = (size - own_node) / (size - 1)
        fastest = inside.bytes_per_second / (1 - crossing) if crossing < 1 else inf
        return replace(between, bytes_per_second=min(between.bytes_per_second / crossing, fastest))

    def is_in_node(self, span: int) -> bool:
        """Whether each group of `span` consecutive processes is on one node.

        Group i begins at process i * span: all groups keep to a node exactly if `span` divides its processes. With 8
        a node, the third group of 3 would be on two.
        """
        return self.gpus_per_node % span == 0 or (self.num_nodes == 1 and span <= self.num_gpus)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one maybe not full."""
        return -(-self.num_gpus // self.gpus_per_node)


@dataclass(frozen=True)
class RowCost:
    """What one row costs under a config.

    Args:
        doc_lengths (`tuple[int, ...]`): the row.
        config (`ContextParallelConfig`): degrees, engine (`auto` is priced as what it takes for this row), layout.
        model (`ModelShape`), training (`Training`), cluster (`Cluster`): what runs, how, and where.
    """

    doc_lengths: tuple[int, ...]
    config: ContextParallelConfig
    model: ModelShape
    training: Training
    cluster: Cluster

    @cached_property
    def layout(self) -> SequenceLayout:
        """Where the row's tokens are."""
        return SequenceLayout(self.doc_lengths, self.config)

    @cached_property
    def shape(self) -> AttentionShape:
        """The sizes of an attention layer, as they are computed with and as they travel."""
        model, b = self.model, self.training.itemsize
        grad = b if self.config.grad_comm_dtype == "compute" else max(4, b)
        return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, b, grad)

    def with_engine(self, ring_comm: str) -> RowCost:
        """The same row with another engine; the layout, which does not depend on it, and its plans are shared."""
        other = replace(self, config=replace(self.config, ring_comm=ring_comm))
        other.__dict__["layout"] = self.layout
        return other

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """What moves keys and values over the ring axis: one engine, or two where windows differ; none without."""
        if self.config.ring_degree == 1:
            return ()
        plans = [AttentionPlan(self.layout, window=window) for window, _ in self.model.windows]
        return tuple(dict.fromkeys(choose_engine(self.config, plan) for plan in plans))

    def attention(self, window: int | None) -> AttentionCost:
        """One layer with this window."""
        plan, config = AttentionPlan(self.layout, window=window), self.config
        ring = _ring(self, plan)
        traded = ulysses_bytes(self.shape, local_length=self.layout.local_length, ulysses_degree=config.ulysses_degree)
        link = self.cluster.link_to_all(config.ulysses_degree, config.ulysses_degree, for_trades=True)
        # two all-to-alls a pass; with groups of heads only the first group waits, the others travel beside attention
        trade = link.seconds(traded, 2 * (config.ulysses_degree - 1))
        first = trade / config.head_chunks
        ulysses = Pass(exposed=first + link.exposed(trade - first, inf), ulysses_bytes=traded)
        return AttentionCost(ring.forward + ulysses, ring.backward + ulysses)

    def layers(self) -> AttentionCost:
        """All layers together."""
        forward, backward = Pass(), Pass()
        for window, count in self.model.windows:
            cost = self.attention(window)
            forward, backward = forward + cost.forward * count, backward + cost.backward * count
        return AttentionCost(forward, backward)

    def dense_seconds(self) -> tuple[float, float]:
        """(forward, backward) of linear layers and output head: 2 operations per weight and token in the forward pass.

        Backward: 2 for the inputs, and 2 for the weights if they are trained. Recomputation repeats the forward pass
        of layers (not attention, if its output is kept), or of a feed-forward part in chunks; the head's is repeated
        always.
        """
        rate = self.cluster.device.matmul_tflops * TERA
        tokens, model = self.layout.local_length, self.model
        layers = 2.0 * model.linear_parameters * tokens / rate
        head = 2.0 * model.vocab_size * model.hidden_size * tokens / rate
        trained = 1 if self.training.lora_r else 2
        repeats = 1.0
        if self.training.checkpointing == "none":
            mlp = 3 * model.hidden_size * model.intermediate_size * model.num_layers
            repeats = mlp / model.linear_parameters if self.training.mlp_chunk_tokens else 0.0
        return layers + head, layers * (trained + repeats) + head * (trained + 1)

    def step(self) -> StepTime:
        """One micro-step of one row."""
        attention, (dense_forward, dense_backward) = self.layers(), self.dense_seconds()
        backward = attention.backward
        if self.training.checkpointing == "full":  # attention is computed again, with its communication
            backward = backward + attention.forward
        zero_link = self.cluster.link(self.cluster.num_gpus)
        gather, reduce = self._zero_seconds(zero_link)
        forward_compute = attention.forward.compute + dense_forward
        backward_compute = backward.compute + dense_backward
        zero = zero_link.exposed(gather, forward_compute) + zero_link.exposed(gather + reduce, backward_compute)
        device, both, dense = self.cluster.device, attention.forward + backward, dense_forward + dense_backward
        errors = (
            device.attention_error * both.compute,
            device.matmul_error * dense,
            self.cluster.link(self.config.cp_size).error * both.exposed,
            zero_link.error * zero,
        )
        return StepTime(
            compute=both.compute + dense,
            exposed=both.exposed + zero,
            ring_bytes=both.ring_bytes,
            ulysses_bytes=both.ulysses_bytes,
            error=sum(errors),
        )

    def _zero_seconds(self, link: Link) -> tuple[float, float]:
        """(gathering the weights for a pass, reducing gradients) of ZeRO over all processes."""
        world, b = self.cluster.num_gpus, self.training.itemsize
        share = (world - 1) / world
        gathered = self.model.num_parameters * b * share if self.training.zero_stage == 3 else 0.0
        # fp32 on the wire; an all-reduce (stages 0 and 1) sends twice what a reduce-scatter does
        trained = trainable_parameters(self.model, self.training.lora_r) * 4 * share
        return link.seconds(gathered), link.seconds(trained * (1 if self.training.zero_stage >= 2 else 2))


@dataclass(frozen=True)
class StepTime:
    """Seconds and bytes of one micro-step on the busiest rank of a row.

    Attributes:
        compute, exposed (`float`): seconds of arithmetic, and of communication that nothing hides.
        ring_bytes, ulysses_bytes (`float`): what leaves the rank over the two axes.
        error (`float`): seconds that the step may be off if every rate is off by its error in the same direction.
        waiting (`float`): seconds until the costliest row of the micro-step is done.
    """

    compute: float
    exposed: float
    ring_bytes: float
    ulysses_bytes: float
    error: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """From the start of the micro-step until all data-parallel ranks are done."""
        return self.compute + self.exposed + self.waiting


def _ring(row: RowCost, plan: AttentionPlan) -> AttentionCost:
    """The ring axis: what each engine overlaps, from the areas of the plan."""
    size, comm = row.config.ring_degree, choose_engine(row.config, plan)
    ranks = sorted({round(i * (size - 1) / max(1, SAMPLED_RANKS - 1)) for i in range(SAMPLED_RANKS)})
    rank = max(ranks, key=plan.area)
    per_step = [plan.pair_area(rank, (rank - step) % size) for step in range(size)]
    rate = _kernel_rate(row, per_step)
    forward = [attention_flops(row.shape, area)[0] / row.config.ulysses_degree / rate for area in per_step]
    backward = [BACKWARD_FLOPS * seconds for seconds in forward]
    if size == 1 or not plan.needs_traffic:
        return AttentionCost(Pass(sum(forward)), Pass(sum(backward)))
    kv_bytes, both = ring_bytes(row.shape, plan, rank, comm)
    if comm == "p2p":
        link = row.cluster.link(row.config.cp_size)
        exposed = _relay(forward, backward, kv_bytes / (size - 1), (both - kv_bytes) / (size - 1), link)
    else:
        link = row.cluster.link_to_all(size, row.config.cp_size)
        busiest = max(_one_way(*ring_tokens(plan, rank, comm), link) for rank in ranks) * row_elements(
            row.shape, row.config.ulysses_degree
        )
        exposed = _at_once(
            forward, backward, busiest * row.shape.itemsize, busiest * row.shape.grad_itemsize, link, size - 1
        )
    return AttentionCost(Pass(sum(forward), exposed[0], kv_bytes), Pass(sum(backward), exposed[1], both))


def _one_way(sent: int, received: int, link: Link) -> float:
    """Rows of a hop, which sends as much as it receives, that takes as long.

    A wire takes as long as its fuller direction (a zigzagged document's first rank receives all that the others hold,
    and sends half as much); a processor that sends and receives itself takes as long as both together.
    """
    return link.overlap * max(sent, received) + (1 - link.overlap) * (sent + received) / 2


def _relay(
    forward: Sequence[float], backward: Sequence[float], kv_bytes: float, grad_bytes: float, link: Link
) -> tuple[float, float]:
    """Each step hides the next hop of K/V, and from the second on a hop of dK/dV; the last one waits alone."""
    hop, grad_hop = link.seconds(kv_bytes), link.seconds(grad_bytes)
    exposed_forward = sum(link.exposed(hop, compute) for compute in forward[:-1])
    hops = [hop] + [hop + grad_hop] * (len(backward) - 2)
    exposed_backward = sum(link.exposed(h, compute) for h, compute in zip(hops, backward, strict=False))
    return exposed_forward, exposed_backward + grad_hop


def _at_once(
    forward: Sequence[float], backward: Sequence[float], kv_bytes: float, grad_bytes: float, link: Link, peers: int
) -> tuple[float, float]:
    """Own tiles hide the rows that come; in the backward pass, half of them those and half the gradients that go."""
    fetch, home = link.seconds(kv_bytes, peers), link.seconds(grad_bytes, peers)
    half = backward[0] / 2
    return link.exposed(fetch, forward[0]), link.exposed(fetch, half) + link.exposed(home, half)


def _kernel_rate(row: RowCost, per_step: Sequence[int]) -> float:
    """Operations per second; blocks as large as a document's part of a shard, but no larger than a step's square."""
    parts = min(len(row.doc_lengths), max(1, row.layout.ring_shard_length))
    block = min(row.layout.ring_shard_length / max(1, parts / row.config.ring_degree), sqrt(max(1, *per_step, 1)))
    device = row.cluster.device
    return device.attention_tflops * TERA * block / (block + device.half_efficiency_tokens)
