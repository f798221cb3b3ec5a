"""How `hf-cp bench` measures one setting: rounds in which all methods take turns, each in three variants.

- real: forward and backward pass of one attention call;
- local: the same with [`hf_cp.distributed.wire.local_copies`] in place of the transfers;
- wire: the transfers alone, one after another.

A time is that of the slowest rank. real − local, round by round, is the communication that nothing hides; wire is all
of it. Invariant: all variants of all methods run in every round, so a drift of the machine hits all of them; nothing
is dropped but the warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hf_cp.attention.usp import context_parallel_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.wire import local_copies
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.tools.bench.cases import Case, Setting
from hf_cp.tools.bench.live_bytes import LiveBytes

__all__ = ["NOISE", "Meshes", "Result", "Spread", "Subject", "by_rank", "measure", "timed"]

NOISE = 0.15  # (p90 - p10) / median from which on a time is called noisy
CHECKED_TOKENS = 384  # of the row whose values are compared
# root mean square of the difference over that of the values, of output and gradients; about 30 roundings
ERROR_LIMITS = {"float64": 1e-13, "float32": 4e-6, "bfloat16": 3e-2, "float16": 4e-3}

Run = Callable[[], object]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Spread:
    """Seconds of the slowest rank over the rounds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Of the seconds of each round."""
        p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
        return cls(median, p10, p90)

    @property
    def width(self) -> float:
        """p90 - p10, relative to the median."""
        return (self.p90 - self.p10) / abs(self.median) if self.median else 0.0


@dataclass(frozen=True)
class Result:
    """What was found for one case.

    Attributes:
        seconds (`Spread`): forward and backward pass.
        communication (`Spread`): the transfers alone, one after another.
        exposed (`Spread`): communication that nothing hides; below zero it is noise.
        without (`Spread`): the pass with copies in place of the transfers.
        slowest_rank (`int`): the rank that takes longest without communication.
        imbalance (`float`): its time over the mean of the ranks.
        sent_bytes (`int`): by the rank that sends most.
        peak_bytes (`int`): made by the pass and alive at once, without q, k, v; of the rank that has most.
        error (`float`): against fp64 math in one process, on a short row; see `ERROR_LIMITS`.
        rounds (`list[float]`): seconds of each round.
    """

    case: Case
    seconds: Spread
    communication: Spread
    exposed: Spread
    without: Spread
    slowest_rank: int
    imbalance: float
    sent_bytes: int
    peak_bytes: int
    error: float
    rounds: list[float]

    @property
    def is_noisy(self) -> bool:
        """Whether the seconds vary by more than `NOISE`."""
        return self.seconds.width > NOISE

    @property
    def is_exact(self) -> bool:
        """Whether the error is what roundings of the type explain; NaN is not."""
        return self.error <= ERROR_LIMITS[self.case.setting.dtype]

    @property
    def overlap(self) -> float | None:
        """Share of the communication that is hidden behind arithmetic."""
        total = self.communication.median
        return None if not self.sent_bytes else min(1.0, max(0.0, 1 - self.exposed.median / total))

    @property
    def gigabytes_per_second(self) -> float | None:
        """Bytes of the rank that sends most, over the time of the transfers alone."""
        return self.sent_bytes / self.communication.median / 1e9 if self.sent_bytes else None

    @property
    def tokens_per_second(self) -> float:
        """Of one row, by all of its ranks together."""
        return self.case.setting.num_tokens / self.seconds.median

    def as_json(self) -> dict:
        """The entry of `bench.json`: the case, everything measured and what follows from it."""
        derived = ("is_noisy", "is_exact", "overlap", "gigabytes_per_second", "tokens_per_second")
        values = {name: value for name, value in vars(self).items() if name != "case"}
        return self.case.as_json() | values | {name: getattr(self, name) for name in derived}


class Meshes:
    """A mesh per pair of degrees, since its process groups are made by all ranks together; with a case's config."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self._by_degrees: dict[tuple[int, int], ContextParallelMesh] = {}

    def of(self, config: ContextParallelConfig) -> ContextParallelMesh:
        """The mesh of the config's degrees, with this config; all ranks must ask for the same ones in turn."""
        degrees = config.ring_degree, config.ulysses_degree
        if degrees not in self._by_degrees:
            self._by_degrees[degrees] = ContextParallelMesh(config, self.device_type)
        mesh = self._by_degrees[degrees]
        mesh.config = config
        return mesh


def measure(cases: Sequence[Case], meshes: Meshes, *, rounds: int, warm_up: int) -> list[Result]:
    """Measures the methods of one setting; all ranks must call it.

    Args:
        cases (sequence of `Case`): of one setting.
        meshes (`Meshes`): made so far.
        rounds, warm_up (`int`): rounds that count, and rounds before them.
    """
    subjects = [Subject(case, meshes) for case in cases]
    seconds = np.zeros((rounds, len(cases), 3, meshes.of(cases[0].config).world_size))
    for number in range(-warm_up, rounds):
        for place, subject in enumerate(subjects):
            for variant, run in enumerate(subject.variants()):
                found = timed(run, subject.mesh())
                if number >= 0:
                    seconds[number, place, variant] = found
    return [subject.result(seconds[:, place]) for place, subject in enumerate(subjects)]


class Subject:
    """One case with tensors of random numbers: the same on all ranks but for the seed."""

    def __init__(self, case: Case, meshes: Meshes):
        self.case, self._meshes = case, meshes
        self.layout = SequenceLayout(case.setting.doc_lengths, case.config)
        mesh, heads = self.mesh(), case.setting.heads
        generator = torch.Generator(mesh.device_type).manual_seed(mesh.rank)
        self.row = tuple(
            torch.randn(
                self.layout.local_length,
                number,
                heads.head_dim,
                generator=generator,
                dtype=case.setting.torch_dtype,
                device=mesh.device_type,
            )
            for number in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads)
        )
        self.error = _error(case, mesh)
        self.peak_bytes = int(max(by_rank(_peak_bytes(self.attend, self.row), mesh)))
        with local_copies(mesh) as self._copies:
            self.attend()
        self._buffers = self._copies.buffers(mesh.device_type)
        self.sent_bytes = int(max(by_rank(self._copies.sent_bytes, mesh)))

    def mesh(self) -> ContextParallelMesh:
        """Of its degrees, with the case's config, which another case of these degrees may have replaced meanwhile."""
        return self._meshes.of(self.case.config)

    def variants(self) -> list[Run]:
        """real, local, wire; where nothing is sent only the first."""
        if not self.sent_bytes:
            return [self.attend]
        return [self.attend, self._attend_locally, partial(self._copies.replay, self.mesh(), self._buffers)]

    def attend(self) -> None:
        """One forward and backward pass; what it computes is dropped."""
        *qkv, grad_out = self.row
        _attend(qkv, grad_out, self.case.setting, self.mesh(), self.layout)

    def _attend_locally(self) -> None:
        with local_copies(self.mesh()):
            self.attend()

    def result(self, seconds: np.ndarray) -> Result:
        """From the seconds [rounds, variants, ranks]."""
        real, local, wire = seconds.max(axis=2).T
        if not self.sent_bytes:
            seconds, local = seconds[:, [0, 0, 2]], real
        without = np.median(seconds[:, 1], axis=0)
        return Result(
            self.case,
            Spread.of(real),
            Spread.of(wire),
            Spread.of(real - local),
            Spread.of(local),
            int(without.argmax()),
            float(without.max() / without.mean()),
            self.sent_bytes,
            self.peak_bytes,
            self.error,
            real.tolist(),
        )


def _attend(
    qkv: Sequence[torch.Tensor],
    grad_out: torch.Tensor,
    setting: Setting,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
) -> Tensors:
    """(out, grad_q, grad_k, grad_v) of one pass."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    attention = partial(context_parallel_attention, mesh=mesh, layout=layout)
    out = checkpoint(attention, *leaves, use_reentrant=False) if setting.recompute else attention(*leaves)
    out.backward(grad_out)
    return out.detach(), *(leaf.grad for leaf in leaves)


def timed(run: Run, mesh: ContextParallelMesh) -> list[float]:
    """Seconds of `run` by rank; all ranks start together. On CUDA by events, so that the host may run ahead."""
    if mesh.device_type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # what came before is no part of it
        sum_over_world([0], comm=Communicator(mesh))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return by_rank(begin.elapsed_time(end) / 1e3, mesh)
    sum_over_world([0], comm=Communicator(mesh))
    began = time.perf_counter()
    run()
    return by_rank(time.perf_counter() - began, mesh)


def by_rank(value: float, mesh: ContextParallelMesh) -> list[float]:
    """`value` of every rank, in rank order, on all ranks."""
    own = [float(value) if rank == mesh.rank else 0.0 for rank in range(mesh.world_size)]
    return sum_over_world(own, comm=Communicator(mesh))  # one number and zeros: the sum is exact


def _peak_bytes(run: Run, known: Sequence[torch.Tensor]) -> int:
    """What a run makes and holds at once: of the allocator on CUDA, of torch's tensors on CPU."""
    if known[0].is_cuda:
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes(known) as counter:
        run()
    return counter.peak


def _error(case: Case, mesh: ContextParallelMesh) -> float:
    """The worst relative error of output and gradients, over all ranks, on a short row of the same kind."""
    setting = case.setting.shortened(CHECKED_TOKENS)
    layout = SequenceLayout(setting.doc_lengths, case.config)
    row = _whole_row(setting, mesh.device_type)
    expected = [layout.shard(x, mesh.cp_rank) for x in _reference(row, setting.doc_lengths)]
    *qkv, grad_out = (layout.shard(x, mesh.cp_rank) for x in row)
    found = _attend(qkv, grad_out, setting, mesh, layout)
    squares = [
        float(x.double().square().sum())
        for actual, wanted in zip(found, expected, strict=True)
        for x in (actual.double() - wanted, wanted)
    ]
    totals = sum_over_world(squares, comm=Communicator(mesh))
    differences, values = np.array(totals[::2]), np.array(totals[1::2])
    return float(np.sqrt(differences / values).max())  # NaN if any is


def _whole_row(setting: Setting, device_type: str) -> Tensors:
    """q, k, v and grad_out, the same on every rank."""
    generator, heads = torch.Generator().manual_seed(0), setting.heads
    return tuple(
        torch.randn(setting.num_tokens, number, heads.head_dim, generator=generator, dtype=torch.float64).to(
            device_type, setting.torch_dtype
        )
        for number in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads)
    )


def _reference(row: Tensors, doc_lengths: Sequence[int]) -> Tensors:
    """(out, grad_q, grad_k, grad_v) in fp64: PyTorch's plain attention, one document after the other."""
    *qkv, grad_out = (x.detach().double() for x in row)
    leaves = [x.requires_grad_() for x in qkv]
    outs = []
    with sdpa_kernel(SDPBackend.MATH):
        for parts in zip(*(x.split(list(doc_lengths)) for x in leaves), strict=True):
            heads = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs)
    out.backward(grad_out)
    return out.detach(), *(leaf.grad for leaf in leaves)
