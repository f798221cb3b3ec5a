"""Which degrees and engine: every legal combination is priced, those that do not fit are set aside.

Estimates are not measurements: a step may take `ERROR` more or less. Such errors move all splits together, so they
seldom turn an order; but speeds that differ by less than `SPEED_STEP` are not told apart, and one rule decides: memory
to spare, then Ulysses inside a node, the smallest context-parallel group, the fewest ring steps, `auto` before a fixed
engine, the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hf_cp.config import RING_COMMS, ContextParallelConfig, divisors, sensible_ulysses_degrees
from hf_cp.data.manifest import PackingManifest
from hf_cp.data.order import attention_areas
from hf_cp.planning.attention_memory import attention_memory
from hf_cp.planning.devices import GIB, Cluster, Device, find_device
from hf_cp.planning.memory import Memory, Training, run_memory
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.packing_preview import spread_samples
from hf_cp.planning.step_time import Cost, SampleCost
from hf_cp.sequence.costs import choose_engine
from hf_cp.sequence.packing import pack_documents
from hf_cp.sequence.placement import causal_area

# With measured rates, 36 of the 40 attention cases of docs/benchmarks/plan_vs_bench.json are within this share of what
# was measured (a test counts them). Rates of the data sheets differ from what long runs sustain by about as much.
ERROR = 0.25
SPEED_STEP = 0.05  # of the fastest split's speed
MEMORY_SHARE = 0.9  # of the memory that a split may use: estimates err, allocators fragment
SPARE = 0.1  # of what may be used: less free memory is little
TOKENS_STEP = 1024  # of the longest document that fits
LONG_ENOUGH = 2**14  # local tokens; from there on no part of the memory depends on chunk sizes
PRICED_SAMPLES = 8


@dataclass(frozen=True)
class Candidate:
    """One way to split samples over the GPUs.

    Attributes:
        config (`ContextParallelConfig`): degrees, engine, layout.
        engines (`tuple[str, ...]`): what runs: the config's engine, or what `auto` takes for the priced samples.
        dp_size (`int`): samples that are trained on at the same time.
        memory (`Memory`): of one GPU, for the sample that needs most.
        step (`Cost`): a micro-step, mean over the samples.
        tokens_per_second (`float`): per GPU.
        free (`float`): share of the memory that may be used and is not; below 0 the split does not fit.
        ulysses_in_node (`bool`): whether a Ulysses group stays on one node.
        longest_document (`int`): tokens of the longest document that fits.
    """

    config: ContextParallelConfig
    engines: tuple[str, ...]
    dp_size: int
    memory: Memory
    step: Cost
    tokens_per_second: float
    free: float
    ulysses_in_node: bool
    longest_document: int

    @property
    def fits(self) -> bool:
        """Whether the memory is enough."""
        return self.free >= 0

    @property
    def is_tight(self) -> bool:
        """Whether little of the memory is free."""
        return self.free < SPARE

    @property
    def order(self) -> tuple:
        """The rule between splits of the same speed."""
        config = self.config
        sent = self.step.ring_bytes + self.step.ulysses_bytes
        is_fixed = config.ring_comm != "auto"
        return self.is_tight, not self.ulysses_in_node, config.cp_size, config.ring_degree, is_fixed, sent


@dataclass(frozen=True)
class Plan:
    """All candidates, the best first; `recommended` is `None` if none fits."""

    model: ModelShape
    training: Training
    cluster: Cluster
    seq_len: int
    num_samples: int
    num_documents: int
    candidates: tuple[Candidate, ...]

    @property
    def recommended(self) -> Candidate | None:
        """The first choice."""
        return self.candidates[0] if self.candidates[0].fits else None

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document that any of the candidates holds."""
        return max(candidate.longest_document for candidate in self.candidates)


def plan_context_parallel(
    model_config: Any,
    *,
    seq_len: int,
    num_gpus: int,
    gpus_per_node: int = 8,
    gpu: str | Device = "h100",
    training: Training | None = None,
    lengths: Sequence[int] | None = None,
    cp_size: int | None = None,
    measured: str | None = None,
) -> Plan:
    """Prices every legal (dp, ring, ulysses, engine) for packed samples of up to `seq_len` tokens.

    Args:
        model_config (`PretrainedConfig`): of a causal LM.
        seq_len (`int`): tokens of the longest sample.
        num_gpus (`int`): processes in all.
        gpus_per_node (`int`, *optional*, defaults to 8): processes that share fast links.
        gpu (`str` or `Device`, *optional*, defaults to `"h100"`): see [`find_device`].
        training (`Training`, *optional*): ZeRO stage, LoRA rank, checkpointing; ZeRO-3 with checkpointing by default.
        lengths (sequence of `int`, *optional*): document lengths; they are packed into samples of at most `seq_len`.
            By default a sample is one document.
        cp_size (`int`, *optional*): only groups of this size.
        measured (path, *optional*): `bench.json` of `hf-cp bench`.

    Raises:
        ValueError: a size is not positive, the GPUs do not fill their nodes, `cp_size` does not divide `num_gpus`, a
            document is longer than `seq_len`, or no split of the heads is legal.
    """
    _check_sizes(seq_len=seq_len, num_gpus=num_gpus, gpus_per_node=gpus_per_node)
    _check_groups(num_gpus, gpus_per_node, cp_size)
    cluster = Cluster(find_device(gpu, measured=measured), num_gpus, min(gpus_per_node, num_gpus))
    model, training = ModelShape.from_config(model_config), training or Training()
    lengths = (seq_len,) if lengths is None else tuple(int(length) for length in lengths)
    manifest = PackingManifest(lengths, tuple(map(tuple, pack_documents(lengths, seq_len))), seq_len)
    candidates = [
        _candidates(config, manifest, model, training, cluster) for config in _configs(model, num_gpus, cp_size)
    ]
    return Plan(model, training, cluster, seq_len, len(manifest.samples), len(lengths), _ranked(sum(candidates, [])))


def _configs(model: ModelShape, num_gpus: int, cp_size: int | None) -> list[ContextParallelConfig]:
    """Every legal split, with the engine left to `auto`."""
    configs = [
        ContextParallelConfig(ring_degree=size // ulysses, ulysses_degree=ulysses)
        for size in ([cp_size] if cp_size else divisors(num_gpus))
        for ulysses in sensible_ulysses_degrees(size, model.num_heads, model.num_kv_heads)
    ]
    if not configs:
        raise ValueError(
            f"No split of {num_gpus if cp_size is None else cp_size} processes fits {model.num_heads} query and "
            f"{model.num_kv_heads} K/V heads. Choose another cp_size."
        )
    return configs


def _candidates(
    config: ContextParallelConfig, manifest: PackingManifest, model: ModelShape, training: Training, cluster: Cluster
) -> list[Candidate]:
    """The split with `auto`, and with every engine that is not the one which `auto` takes for all samples."""
    wanted = {*spread_samples(manifest, PRICED_SAMPLES), _fullest(manifest), *_probes(config, training)}
    costs = {sample: SampleCost.of(sample, config, model, training, cluster) for sample in wanted}
    auto = _price(costs, manifest)
    others = [name for name in RING_COMMS if config.ring_degree > 1 and name != "auto" and auto.engines != (name,)]
    return [auto, *(_price({sample: c.with_engine(name) for sample, c in costs.items()}, manifest) for name in others)]


def _price(costs: Mapping[tuple[int, ...], SampleCost], manifest: PackingManifest) -> Candidate:
    """One split; `costs` has some samples, among them those that need most memory, and the probes of the longest."""
    priced = [costs[sample] for sample in spread_samples(manifest, PRICED_SAMPLES)]
    *_, largest = priced
    config, cluster = largest.config, largest.cluster
    dp_size = cluster.num_gpus // config.cp_size
    step = _mean_step(priced, manifest)
    memory = max((_memory(cost) for cost in (largest, costs[_fullest(manifest)])), key=lambda memory: memory.total)
    return Candidate(
        config,
        tuple(dict.fromkeys(engine for cost in priced for engine in cost.engines)),
        dp_size,
        memory,
        step,
        manifest.num_tokens / len(manifest.samples) * dp_size / step.seconds / cluster.num_gpus,
        1 - memory.total / _usable_bytes(cluster),
        cluster.is_in_node(config.ulysses_degree),
        _longest_document([costs[document] for document in _probes(config, largest.training)]),
    )


def _mean_step(priced: Sequence[SampleCost], manifest: PackingManifest) -> Cost:
    """Mean over all samples: those that were not priced lie between the others, by their attention area."""
    known, first = np.unique([sum(map(causal_area, cost.layout.doc_lengths)) for cost in priced], return_index=True)
    steps = [priced[number].step() for number in first]
    areas = attention_areas(manifest)
    return Cost(*(float(np.interp(areas, known, [getattr(s, f.name) for s in steps]).mean()) for f in fields(Cost)))


def _fullest(manifest: PackingManifest) -> tuple[int, ...]:
    """The sample with most tokens; the costliest one, which may need more memory, is priced anyway."""
    return max((tuple(manifest.lengths[document] for document in row) for row in manifest.samples), key=sum)


def _usable_bytes(cluster: Cluster) -> float:
    return MEMORY_SHARE * cluster.device.memory_gib * GIB


def _memory(cost: SampleCost) -> Memory:
    """Of one GPU; attention's buffers are those of the first rank, in the pass and layer that need most."""
    config = cost.config
    passes = [
        part
        for plan in cost.plans
        for part in attention_memory(
            cost.shape, plan, 0, choose_engine(config, plan), head_chunks=config.head_chunks, bands=True
        )
    ]
    return run_memory(
        cost.model,
        cost.training,
        world_size=cost.cluster.num_gpus,
        local_tokens=cost.layout.local_length,
        attention_transients=max(part.transient for part in passes),
        ulysses_degree=config.ulysses_degree,
    )


def _ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Fitting ones first, by speed in steps of `SPEED_STEP` below the fastest, then the rule; then by memory."""
    fitting = [c for c in candidates if c.fits]
    fastest = max((c.tokens_per_second for c in fitting), default=0.0)
    fitting.sort(key=lambda c: (int((1 - c.tokens_per_second / fastest) / SPEED_STEP), c.order))
    return (*fitting, *sorted((c for c in candidates if not c.fits), key=lambda c: c.memory.total))


def _probes(config: ContextParallelConfig, training: Training) -> list[tuple[int]]:
    """Two documents so long that the memory grows in proportion from one to the other."""
    local = max(LONG_ENOUGH, training.mlp_chunk_tokens or 0, training.loss_chunk_tokens)
    return [(local * config.cp_size,), (2 * local * config.cp_size,)]


def _longest_document(probes: Sequence[SampleCost]) -> int:
    """Tokens of the longest document that fits, in steps of 1,024: everything but the states grows with its tokens.

    (The logits of a short one are less than a chunk's; that does not matter here.)
    """
    one, two = (_memory(probe).total for probe in probes)
    tokens, room = probes[0].layout.num_tokens, _usable_bytes(probes[0].cluster) - (2 * one - two)  # at no tokens
    return max(0, int(room / (two - one) * tokens) // TOKENS_STEP * TOKENS_STEP)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def _check_groups(num_gpus: int, gpus_per_node: int, cp_size: int | None) -> None:
    if cp_size is not None and (cp_size < 1 or num_gpus % cp_size):
        raise ValueError(
            f"cp_size={cp_size} does not divide {num_gpus} GPUs. Choose one of {divisors(num_gpus)}, or leave it out."
        )
    if num_gpus <= gpus_per_node or num_gpus % gpus_per_node == 0:
        return
    nodes, rest = divmod(num_gpus, gpus_per_node)
    even = max(size for size in divisors(num_gpus) if size <= gpus_per_node)
    raise ValueError(
        f"{num_gpus} GPUs with {gpus_per_node} a node are {nodes} full node{'s' * (nodes > 1)} and "
        f"{rest} GPUs on another: groups would not all have the same links.\n"
        f"  Use {num_gpus - rest} or {num_gpus - rest + gpus_per_node} GPUs, or {even} a node "
        f"(--gpus-per-node {even})."
    )
