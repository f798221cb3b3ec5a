"""The peak of what attention allocates, seen from outside (every torch operator is counted), against its bound."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from hf_cp.attention import usp
from hf_cp.attention.kernels import TensorKind, TileGroup
from hf_cp.attention.kernels.base import BackwardInputs
from hf_cp.attention.usp import usp_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.collectives import BlockTransfer, Transfer
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.planning.attention_memory import AttentionMemory, PassMemory, attention_memory
from hf_cp.sequence.costs import AttentionShape
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.sample import PackedSample
from hf_cp.tools.bench.live_bytes import LiveBytes
from tests.attention.cases import Case, Meshes
from tests.attention.reference import random_row

pytestmark = pytest.mark.distributed


class EmptyKernel:
    """Results of the right shapes, and nothing else: stands for the GPU kernels, which take bands and many tiles."""

    name, bands, varlen = "empty", True, True

    @classmethod
    def refusal(cls, kind: TensorKind) -> None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float):
        return torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])

    def backward(self, inputs: BackwardInputs, *, group: TileGroup, scale: float):
        return tuple(torch.empty(x.shape, dtype=x.dtype) for x in (inputs.q, inputs.k, inputs.v))


class Layer(NamedTuple):
    case: Case
    dtype: torch.dtype = torch.float32
    bands: bool = False


def measure(layers: list[Layer]) -> list[AttentionMemory]:
    """What this rank allocates in each layer."""
    meshes, found = Meshes(), []
    for case, dtype, bands in layers:
        with ExitStack() as patches:
            patches.enter_context(patch.object(Transfer, "wait", _settled(Transfer.wait)))
            patches.enter_context(patch.object(BlockTransfer, "finish", _settled(BlockTransfer.finish)))
            if bands:
                patches.enter_context(patch.object(usp, "choose_kernel", lambda *args: EmptyKernel()))
            found.append(_measure(case, dtype, meshes.of(case)))
    return found


def _settled(function):
    """gloo's threads let go of buffers a moment after a wait has returned."""

    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        time.sleep(0.003)
        return result

    return wrapper


def _measure(case: Case, dtype: torch.dtype, mesh: ContextParallelMesh) -> AttentionMemory:
    layout = SequenceLayout(case.doc_lengths, case.config)
    sample, comm = PackedSample(layout), Communicator(mesh)
    row = random_row(layout.num_tokens, case.num_heads, case.num_kv_heads, case.head_dim, dtype)
    q, k, v, grad_out = (layout.shard(x, mesh.cp_rank) for x in row)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend() -> torch.Tensor:
        return usp_attention(*leaves, sample=sample, comm=comm, config=case.config, window=case.window)

    attend()  # the sample's schedules are made
    with LiveBytes([*leaves, grad_out]) as counter:
        out = attend()
        forward = PassMemory(counter.peak, counter.live)
        before = counter.restart()
        out.backward(grad_out, retain_graph=True)  # the saved tensors stay
        backward = PassMemory(counter.peak - before, counter.live - before)
    return AttentionMemory(forward, backward)


def bound(layer: Layer, rank: int) -> AttentionMemory:
    case = layer.case
    size = layer.dtype.itemsize
    shape = AttentionShape(
        case.num_heads, case.num_kv_heads, case.head_dim, size, size if case.grad_comm_dtype == "compute" else 4
    )
    plan = AttentionPlan(SequenceLayout(case.doc_lengths, case.config), window=case.window)
    return attention_memory(
        shape, plan, rank // case.ulysses_degree, case.ring_comm, head_chunks=case.head_chunks, bands=layer.bands
    )


def one_document() -> list[Layer]:
    """On 4 processes: every engine, Ulysses with and without replicated heads, and both; in groups of heads."""
    ring = Case((256,), 8, 4, 32, ring_degree=4)
    ulysses = Case((256,), 16, 16, 16, ulysses_degree=4)
    return [
        Layer(case, dtype, bands)
        for dtype in (torch.float32, torch.bfloat16)
        for case, bands in (
            (ring, True),
            (ring._replace(ring_comm="exchange"), False),
            (ring._replace(ring_comm="exchange", grad_comm_dtype="compute"), True),
            (ring._replace(ring_comm="allgather"), False),
            (ring._replace(ring_comm="allgather", head_chunks=2), True),
            (ring._replace(ring_comm="allgather", head_chunks=4, grad_comm_dtype="compute"), False),
            *((ulysses._replace(head_chunks=chunks), False) for chunks in (1, 2, 4)),
            (ulysses._replace(num_kv_heads=2), False),
            (Case((256,), 8, 4, 32, ring_degree=2, ulysses_degree=2, head_chunks=2), False),
        )
    ]


def packed_rows() -> list[Layer]:
    """On 2 processes: many tiles a call, rows that are copied, mirrored squares."""
    window = itertools.cycle((None, 20, None, 20, 20))
    return [
        Layer(Case((30, 9, 100, 5, 60, 52), 8, 4, 32, 2, 1, layout, ring_comm=comm, window=next(window)), dtype, bands)
        for dtype in (torch.float32, torch.bfloat16)
        for bands in (False, True)
        for layout in ("document", "contiguous")
        for comm in ("p2p", "exchange", "allgather")
    ] + [Layer(Case((256,), 32, 32, 16, ulysses_degree=2, head_chunks=chunks)) for chunks in (4, 8)]


@pytest.mark.parametrize(("size", "make_layers"), [(4, one_document), (2, packed_rows)])
def test_peaks_are_below_the_bound_and_near_it(request, size, make_layers):
    layers = make_layers()
    for rank, memories in enumerate(request.getfixturevalue(f"world{size}").run(measure, layers, timeout=400)):
        for layer, found in zip(layers, memories, strict=True):
            for name, actual, most in zip(found._fields, found, bound(layer, rank), strict=True):
                told = f"rank {rank}, {name} of {layer}: {actual}, bound {most}"
                assert actual.peak <= most.peak <= 1.5 * actual.peak, told
                assert most.kept == pytest.approx(actual.kept, rel=0.05), told


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_what_ulysses_needs_for_a_moment_falls_with_the_groups_of_heads(name):
    """Two groups of heads are under way at a time, so from 4 groups on it is 1 / chunks; what is kept stays."""
    memory = {
        chunks: getattr(bound(Layer(Case((256,), 32, 32, 16, ulysses_degree=2, head_chunks=chunks)), 0), name)
        for chunks in (4, 8, 16)
    }
    assert memory[4].transient == 2 * memory[8].transient == 4 * memory[16].transient > 0
    assert memory[4].kept == memory[8].kept == memory[16].kept


def test_a_ring_by_hand():
    """Rank 0 of 4, one document of 64 tokens, 4 heads and 4 K/V heads of 8, fp32: 16 slots, 128 bytes of q in each."""
    plan = AttentionPlan(SequenceLayout((64,), ContextParallelConfig(4, layout="zigzag")))
    memory = attention_memory(AttentionShape(4, 4, 8, itemsize=4), plan, 0, "p2p")
    tensor, lse, slots = 16 * 128, 16 * 4 * 4, 16 * 8
    assert memory.forward.kept == tensor + lse
    # out and lse; K/V that are here and that come; out, lse and weights of the last 8 queries' call on later keys
    assert memory.forward.peak == (tensor + lse) + 4 * tensor + (tensor + lse) // 2 + 2 * lse // 2
    # dQ, dK, dV; K/V here and coming; their sums made, leaving and coming; dQ (half), lse, dK and dV of the call
    assert memory.backward.peak == 3 * tensor + slots + 4 * tensor + 6 * tensor + (tensor + lse) // 2 + 2 * tensor
    assert memory.backward.kept == 3 * tensor
