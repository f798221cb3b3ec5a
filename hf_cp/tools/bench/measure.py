"""How `hf-cp bench` measures one setting: rounds in which all methods take turns, each in three variants.

- real: forward and backward pass of one attention call;
- local: the same with copies in place of the transfers ([`local_copies`]);
- transfers: the transfers alone, one after another.

A time is that of the slowest rank. real − local, round by round, is the communication that nothing hides; the
transfers are all of it. Invariant: all variants of all methods run in every round, so a drift of the machine hits all
of them; nothing is dropped but the warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hf_cp.attention.usp import usp_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import gather_objects, sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample
from hf_cp.tools.bench.cases import Case, Setting
from hf_cp.tools.bench.live_bytes import LiveBytes
from hf_cp.tools.bench.local_copies import local_copies
from hf_cp.tools.bench.results import Result, Spread

__all__ = ["Communicators", "Subject", "measure", "timed"]

CHECKED_TOKENS = 384  # of the sample whose values are compared

Run = Callable[[], object]
Tensors = tuple[torch.Tensor, ...]


class Communicators:
    """One per pair of degrees, since its process groups are made by all ranks together."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self._by_degrees: dict[tuple[int, int], Communicator] = {}

    def of(self, config: ContextParallelConfig) -> Communicator:
        """Of the config's degrees; all ranks must ask for the same ones in turn."""
        degrees = config.ring_degree, config.ulysses_degree
        if degrees not in self._by_degrees:
            self._by_degrees[degrees] = Communicator(ContextParallelMesh(config, self.device_type))
        return self._by_degrees[degrees]


def measure(cases: Sequence[Case], comms: Communicators, *, rounds: int, warm_up: int) -> list[Result]:
    """Measures the methods of one setting; all ranks must call it.

    Args:
        cases (sequence of `Case`): of one setting.
        comms (`Communicators`): made so far.
        rounds, warm_up (`int`): rounds that count, and rounds before them.
    """
    subjects = [Subject(case, comms.of(case.config)) for case in cases]
    seconds = np.zeros((rounds, len(cases), 3, subjects[0].comm.mesh.world_size))
    for number in range(-warm_up, rounds):
        for i, subject in enumerate(subjects):
            for variant, run in enumerate(subject.variants()):
                found = timed(run, subject.comm)
                if number >= 0:
                    seconds[number, i, variant] = found
    return [subject.result(seconds[:, i]) for i, subject in enumerate(subjects)]


class Subject:
    """One case with tensors of random numbers, others on every rank."""

    def __init__(self, case: Case, comm: Communicator):
        self.case, self.comm = case, comm
        self.sample = PackedSample(SequenceLayout(case.setting.doc_lengths, case.config))
        device = comm.mesh.device_type
        generator = torch.Generator(device).manual_seed(comm.mesh.rank)
        self.tensors = _random(case.setting, self.sample.layout.local_length, generator)
        self.error = _error(case, comm)
        self.peak_bytes = max(gather_objects(_peak_bytes(self.attend, self.tensors), comm=comm))
        with local_copies() as self._copies:
            self.attend()
        self._buffers = self._copies.buffers(device)
        self.sent_bytes = max(gather_objects(self._copies.sent_bytes, comm=comm))

    def variants(self) -> list[Run]:
        """real, local, transfers; where nothing is sent only the first."""
        if not self.sent_bytes:
            return [self.attend]
        return [self.attend, self._attend_locally, partial(self._copies.replay, self.comm, self._buffers)]

    def attend(self) -> None:
        """One forward and backward pass; what it computes is dropped."""
        _attend(self.tensors, self.case, self.sample, self.comm)

    def _attend_locally(self) -> None:
        with local_copies():
            self.attend()

    def result(self, seconds: np.ndarray) -> Result:
        """From the seconds [rounds, variants, ranks]."""
        real, local, transfers = seconds.max(axis=2).T
        if not self.sent_bytes:
            seconds, local = seconds[:, [0, 0, 2]], real
        without = np.median(seconds[:, 1], axis=0)  # of each rank
        return Result(
            self.case,
            seconds=Spread.of(real),
            communication=Spread.of(transfers),
            exposed=Spread.of(real - local),
            without=Spread.of(local),
            slowest_rank=int(without.argmax()),
            imbalance=float(without.max() / without.mean()),
            sent_bytes=self.sent_bytes,
            peak_bytes=self.peak_bytes,
            error=self.error,
            rounds=real.tolist(),
        )


def timed(run: Run, comm: Communicator) -> list[float]:
    """Seconds of `run` by rank; all ranks start together. On CUDA by events, so that the host may run ahead."""
    if comm.mesh.device_type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # what came before does not count
        sum_over_world([0], comm=comm)
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
    else:
        sum_over_world([0], comm=comm)
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
    return gather_objects(seconds, comm=comm)


def _attend(tensors: Tensors, case: Case, sample: PackedSample, comm: Communicator) -> Tensors:
    """(out, grad_q, grad_k, grad_v) of one pass; `tensors` are q, k, v and the gradient of the output."""
    *leaves, grad_out = (x.detach().requires_grad_() for x in tensors)
    attention = partial(usp_attention, sample=sample, comm=comm, config=case.config)
    is_recomputed = case.setting.recompute
    out = checkpoint(attention, *leaves, use_reentrant=False) if is_recomputed else attention(*leaves)
    out.backward(grad_out.detach())
    return out.detach(), *(leaf.grad for leaf in leaves)


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


def _error(case: Case, comm: Communicator) -> float:
    """The worst relative error of output and gradients, over all ranks, on a short sample of the same kind."""
    setting, rank = case.setting.shortened(CHECKED_TOKENS), comm.mesh.cp_rank
    layout = SequenceLayout(setting.doc_lengths, case.config)
    generator = torch.Generator().manual_seed(0)  # the same numbers on every rank
    whole = tuple(x.to(comm.mesh.device_type) for x in _random(setting, setting.num_tokens, generator))
    expected = [layout.shard(x, rank) for x in _reference(whole, setting.doc_lengths)]
    found = _attend(tuple(layout.shard(x, rank) for x in whole), case, PackedSample(layout), comm)
    squares = [
        float(x.double().square().sum())
        for actual, wanted in zip(found, expected, strict=True)
        for x in (actual.double() - wanted, wanted)
    ]
    totals = sum_over_world(squares, comm=comm)
    differences, values = np.array(totals[::2]), np.array(totals[1::2])
    return float(np.sqrt(differences / values).max())  # NaN if any is


def _random(setting: Setting, length: int, generator: torch.Generator) -> Tensors:
    """q, k, v and the gradient of the output, [length, heads, head_dim]."""
    heads, kwargs = setting.heads, {"generator": generator, "device": generator.device, "dtype": setting.torch_dtype}
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads)
    return tuple(torch.randn(length, number, heads.head_dim, **kwargs) for number in counts)


def _reference(tensors: Tensors, doc_lengths: Sequence[int]) -> Tensors:
    """(out, grad_q, grad_k, grad_v) in fp64: PyTorch's plain attention, one document after the other."""
    *qkv, grad_out = (x.detach().double() for x in tensors)
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
