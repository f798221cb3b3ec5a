"""Seconds of one micro-step: arithmetic, bytes over links, and what of the bytes is not hidden behind arithmetic.

The attention of a packed sample is not guessed from its length: areas, steps and K/V tokens come from the attention
plan of the layout that would really run, so many short documents are priced as what they are.

Dimensions: n = local tokens, T = n * u = tokens of a ring shard, u = ulysses_degree, R = ring_degree, P = u * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf, sqrt
from typing import NamedTuple

from hf_cp.config import ContextParallelConfig
from hf_cp.planning.devices import TERA, Cluster, Link
from hf_cp.planning.memory import Training, trainable_parameters
from hf_cp.planning.model_shape import ModelShape
from hf_cp.sequence.costs import (
    BACKWARD_FLOPS,
    AttentionShape,
    attention_flops,
    choose_engine,
    ring_bytes,
    ring_tokens,
    token_elements,
    ulysses_bytes,
)
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan

SAMPLED_RANKS = 8  # ring ranks whose work is looked at; layouts balance it to about 1 %


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes on the busiest rank, of a layer or of a micro-step.

    Attributes:
        compute, exposed (`float`): seconds of arithmetic, and of communication that nothing hides.
        ring_bytes, ulysses_bytes (`float`): what leaves the rank over the two axes.
    """

    compute: float = 0.0
    exposed: float = 0.0
    ring_bytes: float = 0.0
    ulysses_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.compute + self.exposed

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(getattr(self, f.name) * factor for f in fields(Cost)))


class AttentionCost(NamedTuple):
    """Attention of one or more layers."""

    forward: Cost
    backward: Cost

    @property
    def total(self) -> Cost:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class SampleCost:
    """What one packed sample costs under a config; make it with [`SampleCost.of`].

    Args:
        plans (`tuple[AttentionPlan, ...]`): of the sample, one for each of the model's windows.
        config (`ContextParallelConfig`): degrees, engine (`auto` is priced as what it takes for this sample), layout.
        model (`ModelShape`), training (`Training`), cluster (`Cluster`): what runs, how, and where.
    """

    plans: tuple[AttentionPlan, ...]
    config: ContextParallelConfig
    model: ModelShape
    training: Training
    cluster: Cluster

    @classmethod
    def of(
        cls,
        doc_lengths: Sequence[int],
        config: ContextParallelConfig,
        model: ModelShape,
        training: Training,
        cluster: Cluster,
    ) -> SampleCost:
        """Of documents of these lengths."""
        layout = SequenceLayout(doc_lengths, config)
        plans = tuple(AttentionPlan(layout, window=window) for window, _ in model.windows)
        return cls(plans, config, model, training, cluster)

    def with_engine(self, ring_comm: str) -> SampleCost:
        """The same sample with another engine, on which layout and attention plans do not depend."""
        return replace(self, config=replace(self.config, ring_comm=ring_comm))

    @property
    def layout(self) -> SequenceLayout:
        """Where the sample's tokens are."""
        return self.plans[0].layout

    @property
    def shape(self) -> AttentionShape:
        """The sizes of an attention layer, as they are computed with and as they travel."""
        model, b = self.model, self.training.itemsize
        grad = b if self.config.grad_comm_dtype == "compute" else max(4, b)
        return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, b, grad)

    @property
    def engines(self) -> tuple[str, ...]:
        """What moves keys and values over the ring axis: one engine, or two where windows differ; none without."""
        if self.config.ring_degree == 1:
            return ()
        return tuple(dict.fromkeys(choose_engine(self.config, plan) for plan in self.plans))

    def attention(self, plan: AttentionPlan) -> AttentionCost:
        """One layer with this attention plan."""
        degree = self.config.ulysses_degree
        ring = _ring(self, plan)
        sent = ulysses_bytes(self.shape, local_length=self.layout.local_length, ulysses_degree=degree)
        link = self.cluster.link_to_all(degree, degree, for_all_to_all=True)
        # two all-to-alls a pass; with head groups only the first one waits, the others travel beside attention
        seconds = link.seconds(sent, 2 * (degree - 1))
        first = seconds / self.config.head_chunks
        ulysses = Cost(exposed=first + link.exposed(seconds - first, inf), ulysses_bytes=sent)
        return AttentionCost(ring.forward + ulysses, ring.backward + ulysses)

    def layers(self) -> AttentionCost:
        """All layers together."""
        forward, backward = Cost(), Cost()
        for plan, (_, count) in zip(self.plans, self.model.windows, strict=True):
            cost = self.attention(plan)
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

    def step(self) -> Cost:
        """One micro-step."""
        attention, (dense_forward, dense_backward) = self.layers(), self.dense_seconds()
        forward, backward = attention
        if self.training.checkpointing == "full":  # attention is computed again, with its communication
            backward = backward + forward
        link = self.cluster.link(self.cluster.num_gpus)
        gather, reduce = self._zero_seconds(link)
        zero = link.exposed(gather, forward.compute + dense_forward)
        zero += link.exposed(gather + reduce, backward.compute + dense_backward)
        return forward + backward + Cost(compute=dense_forward + dense_backward, exposed=zero)

    def _zero_seconds(self, link: Link) -> tuple[float, float]:
        """(gathering the weights for a pass, reducing gradients) of ZeRO over all processes."""
        world, b = self.cluster.num_gpus, self.training.itemsize
        share = (world - 1) / world
        gathered = self.model.num_parameters * b * share if self.training.zero_stage == 3 else 0.0
        # sent in fp32; an all-reduce (stages 0 and 1) sends twice what a reduce-scatter does
        trained = trainable_parameters(self.model, self.training.lora_r) * 4 * share
        return link.seconds(gathered), link.seconds(trained * (1 if self.training.zero_stage >= 2 else 2))


def _ring(sample: SampleCost, plan: AttentionPlan) -> AttentionCost:
    """The ring axis: what each engine overlaps, from the areas of the plan."""
    shape, config, comm = sample.shape, sample.config, choose_engine(sample.config, plan)
    size = config.ring_degree
    ranks = sorted({round(i * (size - 1) / max(1, SAMPLED_RANKS - 1)) for i in range(SAMPLED_RANKS)})
    rank = max(ranks, key=plan.area)
    per_step = [plan.pair_area(rank, (rank - step) % size) for step in range(size)]
    rate = _kernel_rate(sample, per_step)
    forward = [attention_flops(shape, area)[0] / config.ulysses_degree / rate for area in per_step]
    backward = [BACKWARD_FLOPS * seconds for seconds in forward]
    if size == 1 or not plan.needs_traffic:
        return AttentionCost(Cost(sum(forward)), Cost(sum(backward)))
    kv_bytes, both = ring_bytes(shape, plan, rank, comm)
    if comm == "p2p":
        link = sample.cluster.link(config.cp_size)
        exposed = _hop_by_hop(forward, backward, kv_bytes / (size - 1), (both - kv_bytes) / (size - 1), link)
    else:
        link = sample.cluster.link_to_all(size, config.cp_size)
        busiest = max(_one_way(*ring_tokens(plan, other, comm), link) for other in ranks)
        busiest *= token_elements(shape, config.ulysses_degree)
        exposed = _at_once(forward, backward, busiest * shape.itemsize, busiest * shape.grad_itemsize, link, size - 1)
    return AttentionCost(Cost(sum(forward), exposed[0], kv_bytes), Cost(sum(backward), exposed[1], both))


def _one_way(sent: int, received: int, link: Link) -> float:
    """K/V tokens of a hop, which sends as much as it receives, that takes as long.

    A link takes as long as its fuller direction (a zigzagged document's first rank receives all that the others hold,
    and sends half as much); a processor that sends and receives itself takes as long as both together.
    """
    return link.overlap * max(sent, received) + (1 - link.overlap) * (sent + received) / 2


def _hop_by_hop(
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
    """Own tiles hide what comes; in the backward pass one half of them hides it, the other the gradients that go."""
    fetch, home = link.seconds(kv_bytes, peers), link.seconds(grad_bytes, peers)
    half = backward[0] / 2
    return link.exposed(fetch, forward[0]), link.exposed(fetch, half) + link.exposed(home, half)


def _kernel_rate(sample: SampleCost, per_step: Sequence[int]) -> float:
    """Operations per second; blocks as large as a document's part of a shard, but no larger than a step's square."""
    length = sample.layout.ring_shard_length
    parts = min(len(sample.layout.doc_lengths), max(1, length))
    block = min(length / max(1, parts / sample.config.ring_degree), sqrt(max(1, *per_step, 1)))
    device = sample.cluster.device
    return device.attention_tflops * TERA * block / (block + device.half_efficiency_tokens)
