"""Which degrees and engine: every legal combination is priced, those that do not fit are set aside.

Estimates are not measurements. Combinations within `TIE` of the fastest are called equal, and those whose order the
errors of the rates could turn round; one stated rule decides among them: memory to spare, then Ulysses inside a node,
the smallest context-parallel group, the fewest ring steps, `auto` before a fixed engine, the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_cp.config import ContextParallelConfig, divisors, sensible_ulysses_degrees
from hf_cp.planning.attention_memory import attention_memory
from hf_cp.planning.devices import GIB, Device, find_device
from hf_cp.planning.memory import Memory, Training, run_memory
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.rows import Rows
from hf_cp.planning.step_time import Cluster, RowCost, StepTime
from hf_cp.sequence.costs import choose_engine
from hf_cp.sequence.plan import AttentionPlan

TIE = 0.05  # relative difference of estimates that is no difference
MEMORY_SHARE = 0.9  # of the memory that a plan may use: estimates err, allocators fragment
SPARE = 0.1  # of what may be used: less free memory is little
TOKENS_STEP = 1024  # of the longest row that fits
LONG_ENOUGH = 2**14  # local tokens from where on no part of the memory depends on chunk sizes
ENGINES = ("p2p", "exchange", "allgather")


@dataclass(frozen=True)
class Candidate:
    """One way to split rows over the GPUs.

    Attributes:
        config (`ContextParallelConfig`): degrees, engine, layout.
        engines (`tuple[str, ...]`): what runs: the config's engine, or what `auto` takes for the priced rows.
        dp_size (`int`): rows that are trained on at the same time.
        memory (`Memory`): of one GPU, for the row that needs most.
        step (`StepTime`): a micro-step, mean over the rows.
        tokens_per_second (`float`): per GPU.
        free (`float`): share of the memory that may be used and is not; below 0 the split does not fit.
        ulysses_in_node (`bool`): whether a Ulysses group stays on one node.
        longest_row (`int`): tokens of the longest document that fits.
    """

    config: ContextParallelConfig
    engines: tuple[str, ...]
    dp_size: int
    memory: Memory
    step: StepTime
    tokens_per_second: float
    free: float
    ulysses_in_node: bool
    longest_row: int

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
        """The rule among equals."""
        config = self.config
        sent = self.step.ring_bytes + self.step.ulysses_bytes
        is_fixed = config.ring_comm != "auto"
        return self.is_tight, not self.ulysses_in_node, config.cp_size, config.ring_degree, is_fixed, sent

    def is_as_fast(self, other: Candidate) -> bool:
        """Whether estimates cannot tell the two apart.

        Let C be the GPU seconds of arithmetic and waiting for a row, E those of exposed communication. Splits are
        equal where C + E differ by no more than `TIE`. Beyond, an error of the rates scales differences but does not
        turn them, unless one split saves C and the other E, and what remains is within the larger relative error e of
        the two: |dC + dE| <= e (|dC| + |dE|).
        """
        (compute, exposed), (other_compute, other_exposed) = self._gpu_seconds, other._gpu_seconds
        longest = max(compute + exposed, other_compute + other_exposed)
        compute, exposed = compute - other_compute, exposed - other_exposed
        error = max(step.error / step.seconds for step in (self.step, other.step))
        return abs(compute + exposed) <= max(TIE * longest, error * (abs(compute) + abs(exposed)))

    @property
    def _gpu_seconds(self) -> tuple[float, float]:
        """For one row, of all GPUs that share it: (arithmetic and waiting, exposed communication)."""
        step, size = self.step, self.config.cp_size
        return (step.compute + step.waiting) * size, step.exposed * size


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
        """The first choice."""
        return next((candidate for candidate in self.candidates if candidate.fits), None)

    def ties(self) -> list[Candidate]:
        """Candidates that fit and are as fast as the fastest one, as far as an estimate can tell."""
        return _ties(self.candidates)


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
        ValueError: a size is not positive, the GPUs do not fill their nodes, `cp_size` does not divide `num_gpus`, a
            document is longer than `seq_len`, or no split of the heads is legal.
    """
    _check_sizes(seq_len=seq_len, num_gpus=num_gpus, gpus_per_node=gpus_per_node)
    _check_nodes(num_gpus, gpus_per_node)
    if cp_size is not None and (cp_size < 1 or num_gpus % cp_size):
        raise ValueError(
            f"cp_size={cp_size} does not divide {num_gpus} GPUs. Choose one of {divisors(num_gpus)}, or leave it out."
        )
    cluster = Cluster(find_device(gpu, measured=measured), num_gpus, min(gpus_per_node, num_gpus))
    model, training = ModelShape.from_config(model_config), training or Training()
    rows = Rows(((seq_len,),)) if lengths is None else Rows.packed(lengths, seq_len)
    candidates = [
        candidate
        for config in _configs(model, num_gpus, cp_size)
        for candidate in _candidates(config, rows, model, training, cluster)
    ]
    return Plan(
        model,
        training,
        cluster,
        seq_len,
        len(rows.doc_lengths),
        len(lengths) if lengths is not None else 1,
        _ranked(candidates),
        max(candidate.longest_row for candidate in candidates),
    )


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
    config: ContextParallelConfig, rows: Rows, model: ModelShape, training: Training, cluster: Cluster
) -> list[Candidate]:
    """The split with `auto`, and with every engine that is not the one which `auto` takes for all rows."""
    lengths = (*rows.sampled, *rows.largest, *_probes(config, training))
    costs = {row: RowCost(row, config, model, training, cluster) for row in lengths}
    auto = _price(costs, rows)
    others = [engine for engine in ENGINES if config.ring_degree > 1 and auto.engines != (engine,)]
    return [auto, *(_price({row: c.with_engine(engine) for row, c in costs.items()}, rows) for engine in others)]


def _price(costs: Mapping[tuple[int, ...], RowCost], rows: Rows) -> Candidate:
    """One split; `costs` has the sampled and the largest rows, and the probes of the longest one."""
    one = costs[rows.sampled[0]]
    config, cluster = one.config, one.cluster
    dp_size = cluster.num_gpus // config.cp_size
    step = rows.micro_step([costs[row].step() for row in rows.sampled], dp_size=dp_size)
    memory = max((_memory(costs[row]) for row in rows.largest), key=lambda memory: memory.total)
    return Candidate(
        config,
        tuple(dict.fromkeys(engine for row in rows.sampled for engine in costs[row].engines)),
        dp_size,
        memory,
        step,
        rows.mean_tokens * dp_size / step.seconds / cluster.num_gpus,
        1 - memory.total / _usable_bytes(cluster),
        cluster.is_in_node(config.ulysses_degree),
        _longest_row([costs[row] for row in _probes(config, one.training)]),
    )


def _usable_bytes(cluster: Cluster) -> float:
    return MEMORY_SHARE * cluster.device.memory_gib * GIB


def _memory(row: RowCost) -> Memory:
    return run_memory(
        row.model,
        row.training,
        world_size=row.cluster.num_gpus,
        local_tokens=row.layout.local_length,
        attention_transients=_transients(row),
        ulysses_degree=row.config.ulysses_degree,
    )


def _ties(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fitting ones that are as fast as the fastest of them."""
    fitting = [c for c in candidates if c.fits]
    fastest = max(fitting, key=lambda c: c.tokens_per_second, default=None)
    return [c for c in fitting if c.is_as_fast(fastest)]


def _ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Fitting ones first; the tie rule among the fastest, then by estimated speed; then those that do not fit."""
    tied = sorted(_ties(candidates), key=lambda c: c.order)
    rest = sorted((c for c in candidates if c.fits and c not in tied), key=lambda c: -c.tokens_per_second)
    return (*tied, *rest, *sorted((c for c in candidates if not c.fits), key=lambda c: c.memory.total))


def _probes(config: ContextParallelConfig, training: Training) -> list[tuple[int]]:
    """Two documents so long that the memory grows in proportion from one to the other."""
    local = max(LONG_ENOUGH, training.mlp_chunk_tokens or 0, training.loss_chunk_tokens)
    return [(local * config.cp_size,), (2 * local * config.cp_size,)]


def _longest_row(probes: Sequence[RowCost]) -> int:
    """Tokens of the longest document that fits, in steps of 1,024: everything but the states grows with its tokens.

    (A short row's logits are less than a chunk's; that does not matter here.)
    """
    one, two = (_memory(probe).total for probe in probes)
    tokens, room = probes[0].layout.num_tokens, _usable_bytes(probes[0].cluster) - (2 * one - two)  # at no tokens
    return max(0, int(room / (two - one) * tokens) // TOKENS_STEP * TOKENS_STEP)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def _check_nodes(num_gpus: int, gpus_per_node: int) -> None:
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


def _transients(row: RowCost) -> int:
    """Bytes that an attention call needs for a moment, on the first rank, in the pass and layer that need most."""
    config, passes = row.config, []
    for window, _ in row.model.windows:
        plan = AttentionPlan(row.layout, window=window)
        engine = choose_engine(config, plan)
        memory = attention_memory(row.shape, plan, 0, engine, head_chunks=config.head_chunks, bands=True)
        passes += [memory.forward.transient, memory.backward.transient]
    return max(passes)
