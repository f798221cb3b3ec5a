"""Which degrees, engine and layout: every legal combination is priced, those that do not fit are set aside.

Estimates are not measurements. Combinations within `TIE` of the fastest are called equal, and one stated rule decides
among them: Ulysses inside a node, then the smallest context-parallel group, then the fewest ring steps, then the
fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_cp.config import ContextParallelConfig, divisors, sensible_ulysses_degrees
from hf_cp.planning.devices import GIB, Device, find_device
from hf_cp.planning.memory import Memory, Training, run_memory
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.step_time import Cluster, RowCost, StepTime
from hf_cp.sequence.costs import AttentionShape
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.memory import attention_memory
from hf_cp.sequence.packing import pack_documents
from hf_cp.sequence.plan import AttentionPlan

TIE = 0.05  # relative difference of estimates that is no difference
MEMORY_SHARE = 0.9  # of the memory that a plan may use: estimates err, allocators fragment
SAMPLED_ROWS = 5  # packed rows that are priced, from the lightest to the heaviest
TOKENS_STEP = 1024  # of the longest row that fits
LONG_ENOUGH = 2**14  # local tokens from where on no part of the memory depends on chunk sizes
RING_COMMS = ("p2p", "exchange", "allgather")


@dataclass(frozen=True)
class Candidate:
    """One way to split rows over the GPUs.

    Attributes:
        config (`ContextParallelConfig`): degrees, engine, layout.
        dp_size (`int`): rows that are trained on at the same time.
        memory (`Memory`): of one GPU.
        step (`StepTime`): of the sampled rows, on average.
        tokens_per_second (`float`): per GPU.
        fits (`bool`): whether the memory is enough.
        ulysses_in_node (`bool`): whether a Ulysses group stays on one node.
    """

    config: ContextParallelConfig
    dp_size: int
    memory: Memory
    step: StepTime
    tokens_per_second: float
    fits: bool
    ulysses_in_node: bool

    @property
    def order(self) -> tuple:
        """The rule among equals."""
        config = self.config
        sent = self.step.ring_bytes + self.step.ulysses_bytes
        return not self.ulysses_in_node, config.cp_size, config.ring_degree, sent


@dataclass(frozen=True)
class Plan:
    """All candidates, the best first; `recommended` is `None` if none fits."""

    model: ModelShape
    training: Training
    cluster: Cluster
    seq_len: int
    num_rows: int
    num_documents: int
    candidates: tuple[Candidate, ...]
    longest_row: int

    @property
    def recommended(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.fits), None)

    def ties(self) -> list[Candidate]:
        """Candidates that fit and are as fast as the recommended one, as far as an estimate can tell."""
        fastest = max((c.tokens_per_second for c in self.candidates if c.fits), default=0.0)
        return [c for c in self.candidates if c.fits and c.tokens_per_second >= (1 - TIE) * fastest]


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
    """Prices every legal (dp, ring, ulysses, engine) for rows of up to `seq_len` tokens.

    Args:
        model_config (`PretrainedConfig`): of a causal LM.
        seq_len (`int`): tokens of the longest row.
        num_gpus (`int`): processes in all.
        gpus_per_node (`int`, *optional*, defaults to 8): processes that share fast links.
        gpu (`str` or `Device`, *optional*, defaults to `"h100"`): see [`find_device`].
        training (`Training`, *optional*): ZeRO stage, LoRA rank, checkpointing; ZeRO-3 with checkpointing by default.
        lengths (sequence of `int`, *optional*): document lengths; they are packed into rows of at most `seq_len`. By
            default a row is one document.
        cp_size (`int`, *optional*): only groups of this size.
        measured (path, *optional*): `bench.json` of `hf-cp bench`.

    Raises:
        ValueError: a size is not positive, `cp_size` does not divide `num_gpus`, a document is longer than `seq_len`,
            or no split of the heads is legal.
    """
    _check_sizes(seq_len=seq_len, num_gpus=num_gpus, gpus_per_node=gpus_per_node)
    if cp_size is not None and (cp_size < 1 or num_gpus % cp_size):
        raise ValueError(
            f"cp_size={cp_size} does not divide {num_gpus} GPUs. Choose one of {divisors(num_gpus)}, or leave it out."
        )
    cluster = Cluster(find_device(gpu, measured=measured), num_gpus, min(gpus_per_node, num_gpus))
    model, training = ModelShape.from_config(model_config), training or Training()
    rows = [(seq_len,)] if lengths is None else _rows(lengths, seq_len)
    sampled = _sample(rows)
    configs = _configs(model, num_gpus, cp_size)
    candidates = [_price(config, sampled, model, training, cluster) for config in configs]
    return Plan(
        model,
        training,
        cluster,
        seq_len,
        len(rows),
        len(lengths) if lengths is not None else 1,
        _ranked(candidates),
        max(_longest_row(config, model, training, cluster) for config in configs),
    )


def _rows(lengths: Sequence[int], seq_len: int) -> list[tuple[int, ...]]:
    return [tuple(int(lengths[i]) for i in row) for row in pack_documents([int(n) for n in lengths], seq_len)]


def _sample(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Rows at equal distances in the order of their attention area, the heaviest among them."""
    ordered = sorted(rows, key=lambda row: sum(n * (n + 1) // 2 for n in row))
    places = np.linspace(0, len(ordered) - 1, min(SAMPLED_ROWS, len(ordered)))
    return [ordered[round(place)] for place in places]


def _configs(model: ModelShape, num_gpus: int, cp_size: int | None) -> list[ContextParallelConfig]:
    """Every legal split; engines where there is a ring."""
    configs = []
    for size in [cp_size] if cp_size else divisors(num_gpus):
        for ulysses in sensible_ulysses_degrees(size, model.num_heads, model.num_kv_heads):
            ring = size // ulysses
            for comm in RING_COMMS if ring > 1 else RING_COMMS[:1]:
                config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, ring_comm=comm)
                configs.append(config)
    if not configs:
        raise ValueError(
            f"No split of {num_gpus if cp_size is None else cp_size} processes fits {model.num_heads} query and "
            f"{model.num_kv_heads} K/V heads. Choose another cp_size."
        )
    return configs


def _price(
    config: ContextParallelConfig,
    rows: Sequence[tuple[int, ...]],
    model: ModelShape,
    training: Training,
    cluster: Cluster,
) -> Candidate:
    costs = [RowCost(row, config, model, training, cluster) for row in rows]
    steps = [cost.step() for cost in costs]
    step = StepTime(*(float(np.mean([getattr(s, name) for s in steps])) for name in StepTime.__dataclass_fields__))
    fullest = max(costs, key=lambda cost: cost.layout.local_length)
    memory = _memory(fullest.layout.local_length, fullest.doc_lengths, config, model, training, cluster)
    dp_size = cluster.num_gpus // config.cp_size
    tokens = float(np.mean([sum(row) for row in rows]))
    return Candidate(
        config,
        dp_size,
        memory,
        step,
        tokens * dp_size / step.seconds / cluster.num_gpus,
        memory.total <= MEMORY_SHARE * cluster.device.memory_gib * GIB,
        config.ulysses_degree <= cluster.gpus_per_node and cluster.gpus_per_node % config.ulysses_degree == 0,
    )


def _memory(
    local_tokens: int,
    doc_lengths: tuple[int, ...],
    config: ContextParallelConfig,
    model: ModelShape,
    training: Training,
    cluster: Cluster,
) -> Memory:
    return run_memory(
        model,
        training,
        world_size=cluster.num_gpus,
        local_tokens=local_tokens,
        attention_transients=_transients(doc_lengths, config, model, training.itemsize),
        ulysses_degree=config.ulysses_degree,
    )


def _ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Fitting ones first; the tie rule among the fastest, then by estimated speed; then those that do not fit."""
    fitting = sorted((c for c in candidates if c.fits), key=lambda c: -c.tokens_per_second)
    fastest = fitting[0].tokens_per_second if fitting else 0.0
    tied = sorted((c for c in fitting if c.tokens_per_second >= (1 - TIE) * fastest), key=lambda c: c.order)
    rest = [c for c in fitting if c not in tied]
    return (*tied, *rest, *sorted((c for c in candidates if not c.fits), key=lambda c: c.memory.total))


def _longest_row(config: ContextParallelConfig, model: ModelShape, training: Training, cluster: Cluster) -> int:
    """Tokens of the longest document that fits, in steps of 1,024: everything but the states grows with its tokens.

    (A short row's logits are less than a chunk's; that does not matter here.)
    """
    local = max(LONG_ENOUGH, training.mlp_chunk_tokens or 0, training.loss_chunk_tokens)
    one, two = (_memory(n, (n * config.cp_size,), config, model, training, cluster).total for n in (local, 2 * local))
    room = MEMORY_SHARE * cluster.device.memory_gib * GIB - (2 * one - two)  # what is left at no tokens
    return max(0, int(room / (two - one) * local) * config.cp_size // TOKENS_STEP * TOKENS_STEP)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def _transients(doc_lengths: tuple[int, ...], config: ContextParallelConfig, model: ModelShape, itemsize: int) -> int:
    """Bytes that an attention call needs for a moment, on the first rank, in the pass that needs more."""
    plan = AttentionPlan(SequenceLayout(doc_lengths, config))
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, itemsize)
    memory = attention_memory(shape, plan, 0, config.ring_comm, head_chunks=config.head_chunks, bands=True)
    return max(memory.forward.transient, memory.backward.transient)
