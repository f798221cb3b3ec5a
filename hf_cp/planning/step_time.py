"""Seconds of one micro-step: arithmetic, bytes over links, and what of the bytes is not hidden behind arithmetic.

The attention of a row is not guessed from its length: areas, steps and rows come from the plan of the layout that
would really run, so packed rows are priced as what they are.

Dimensions: n = local tokens, T = n * u = tokens of a ring shard, u = ulysses_degree, R = ring_degree, P = u * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf, sqrt

from hf_cp.config import ContextParallelConfig
from hf_cp.planning.devices import Device
from hf_cp.planning.memory import Training, trainable_parameters
from hf_cp.planning.model_shape import ModelShape
from hf_cp.sequence.costs import BACKWARD_FLOPS, AttentionShape, attention_flops, ring_bytes, ulysses_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan

SAMPLED_RANKS = 8  # ring ranks whose work is looked at; layouts balance it to about 1 %
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Link:
    """One process's way out over an axis."""

    bytes_per_second: float
    latency: float
    overlap: float = 1.0

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        return messages * self.latency + num_bytes / self.bytes_per_second if num_bytes else 0.0

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
        return self.forward.ring_bytes + self.backward.ring_bytes

    @property
    def ulysses_bytes(self) -> float:
        return self.forward.ulysses_bytes + self.backward.ulysses_bytes


@dataclass(frozen=True)
class Cluster:
    """GPUs, and how many of them share a node."""

    device: Device
    num_gpus: int
    gpus_per_node: int

    def link(self, span: int) -> Link:
        """The link between neighbours of a group of `span` consecutive processes."""
        device = self.device
        if span <= self.gpus_per_node:
            return Link(device.intra_gbs * GIGA, device.intra_latency, device.intra_overlap)
        return Link(device.inter_gbs * GIGA, device.inter_latency, device.inter_overlap)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)


@dataclass(frozen=True)
class RowCost:
    """What one row costs under a config.

    Args:
        doc_lengths (`tuple[int, ...]`): the row.
        config (`ContextParallelConfig`): with a concrete `ring_comm`.
        model (`ModelShape`), training (`Training`), cluster (`Cluster`): what runs, how, and where.
    """

    doc_lengths: tuple[int, ...]
    config: ContextParallelConfig
    model: ModelShape
    training: Training
    cluster: Cluster

    @cached_property
    def layout(self) -> SequenceLayout:
        return SequenceLayout(self.doc_lengths, self.config)

    @cached_property
    def shape(self) -> AttentionShape:
        model, b = self.model, self.training.itemsize
        grad = b if self.config.grad_comm_dtype == "compute" else max(4, b)
        return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, b, grad)

    def attention(self, window: int | None) -> AttentionCost:
        """One layer with this window."""
        plan, config = AttentionPlan(self.layout, window=window), self.config
        ring = _ring(self, plan)
        traded = ulysses_bytes(self.shape, local_length=self.layout.local_length, ulysses_degree=config.ulysses_degree)
        link = self.cluster.link(config.ulysses_degree)
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
        of layers (not attention, if its output is kept); the head's is repeated always.
        """
        rate = self.cluster.device.matmul_tflops * TERA
        tokens, model = self.layout.local_length, self.model
        layers = 2.0 * model.linear_parameters * tokens / rate
        head = 2.0 * model.vocab_size * model.hidden_size * tokens / rate
        trained = 1 if self.training.lora_r else 2
        repeats = 0 if self.training.checkpointing == "none" else 1
        return layers + head, layers * (trained + repeats) + head * (trained + 1)

    def step(self) -> StepTime:
        """One micro-step of one row."""
        attention, (dense_forward, dense_backward) = self.layers(), self.dense_seconds()
        backward = attention.backward
        if self.training.checkpointing in ("full", "offload"):  # attention is computed again, with its communication
            backward = backward + attention.forward
        zero_link = self.cluster.link(self.cluster.num_gpus)
        gather, reduce = self._zero_seconds(zero_link)
        forward_compute = attention.forward.compute + dense_forward
        backward_compute = backward.compute + dense_backward
        zero = zero_link.exposed(gather, forward_compute) + zero_link.exposed(gather + reduce, backward_compute)
        return StepTime(
            compute=forward_compute + backward_compute,
            exposed=attention.forward.exposed + backward.exposed + zero,
            ring_bytes=attention.forward.ring_bytes + backward.ring_bytes,
            ulysses_bytes=attention.forward.ulysses_bytes + backward.ulysses_bytes,
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
    """Seconds and bytes of one micro-step on the busiest rank."""

    compute: float
    exposed: float
    ring_bytes: float
    ulysses_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def _ring(row: RowCost, plan: AttentionPlan) -> AttentionCost:
    """The ring axis: what each engine overlaps, from the areas of the plan."""
    size, comm = row.config.ring_degree, row.config.ring_comm
    ranks = sorted({round(i * (size - 1) / max(1, SAMPLED_RANKS - 1)) for i in range(SAMPLED_RANKS)})
    rank = max(ranks, key=plan.area)
    per_step = [plan.pair_area(rank, (rank - step) % size) for step in range(size)]
    rate = _kernel_rate(row, per_step)
    forward = [attention_flops(row.shape, area)[0] / row.config.ulysses_degree / rate for area in per_step]
    backward = [BACKWARD_FLOPS * seconds for seconds in forward]
    if size == 1 or not plan.needs_traffic:
        return AttentionCost(Pass(sum(forward)), Pass(sum(backward)))
    kv_bytes, both = ring_bytes(row.shape, plan, rank, comm)
    grad_bytes = both - kv_bytes
    link = row.cluster.link(row.config.cp_size)
    if comm == "p2p":
        exposed = _relay(forward, backward, kv_bytes / (size - 1), grad_bytes / (size - 1), link)
    else:
        exposed = _at_once(forward, backward, kv_bytes, grad_bytes, link, size - 1)
    return AttentionCost(Pass(sum(forward), exposed[0], kv_bytes), Pass(sum(backward), exposed[1], both))


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
