"""What is really sent and computed, seen from outside (torch.distributed and the kernel entry are wrapped), against
the formulas and the plan."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_cp.attention.kernels import CpuFlashKernel, EagerKernel
from hf_cp.attention.usp import context_parallel_attention, usp_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.collectives import BlockTransfer, Transfer
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.costs import AttentionShape, attention_flops, ring_bytes, ulysses_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.sample import PackedSample
from tests.attention.cases import LAYOUTS, RING_COMMS, Case, Meshes, run_attention
from tests.attention.reference import random_row, visible
from tests.sequence.test_plan import band

pytestmark = pytest.mark.distributed


class Sent(NamedTuple):
    """Bytes that leave a rank in one forward and backward pass."""

    ring: int  # seen in torch.distributed
    ulysses: int
    counted_ring: int  # by the mesh
    counted_ulysses: int


def sent_bytes(cases: list[tuple[Case, torch.dtype]]) -> list[Sent]:
    meshes = Meshes()
    return [_sent_bytes(case, dtype, meshes.of(case)) for case, dtype in cases]


def _sent_bytes(case: Case, dtype: torch.dtype, mesh: ContextParallelMesh) -> Sent:
    layout = SequenceLayout(case.doc_lengths, case.config)
    row = random_row(layout.num_tokens, case.num_heads, case.num_kv_heads, case.head_dim, dtype)
    q, k, v, grad_out = (layout.shard(x, mesh.cp_rank) for x in row)
    seen: Counter[str] = Counter()
    batch_isend_irecv, all_to_all_single = dist.batch_isend_irecv, dist.all_to_all_single

    def count_sends(ops):
        seen["ring"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return batch_isend_irecv(ops)

    def count_all_to_all(output, input, output_split_sizes=None, input_split_sizes=None, *, group, **kwargs):
        own, size = dist.get_rank(group), dist.get_world_size(group)
        splits = input_split_sizes or [len(input) // size] * size
        axis = "ulysses" if input_split_sizes is None else "ring"
        seen[axis] += sum(part.nbytes for rank, part in enumerate(input.split(splits)) if rank != own)
        return all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group, **kwargs)

    with (
        patch.object(dist, "batch_isend_irecv", count_sends),
        patch.object(dist, "all_to_all_single", count_all_to_all),
    ):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        comm = Communicator(mesh)
        out = usp_attention(*leaves, sample=PackedSample(layout), comm=comm, config=case.config, window=case.window)
        out.backward(grad_out)
    return Sent(seen["ring"], seen["ulysses"], comm.ring_bytes, comm.ulysses_bytes)


def traffic_cases() -> list[tuple[Case, torch.dtype]]:
    splits = (
        (4, 1, 1, "zigzag", None),
        (4, 1, 2, "document", None),
        (2, 2, 1, "document", None),
        (2, 2, 1, "contiguous", 5),
        (1, 4, 1, "document", None),
        (2, 2, 1, "document", 64),
    )
    comms = [("p2p", "fp32"), *itertools.product(("allgather", "exchange"), ("fp32", "compute"))]
    return [
        (
            Case(
                (40, 23, 7, 6), 8, 2, 8, ring, ulysses, layout,
                "eager" if dtype == torch.bfloat16 and window == 5 else "sdpa", window=window,
                ring_comm=ring_comm, head_chunks=chunks, grad_comm_dtype=grad_comm_dtype,
            ),
            dtype,
        )
        for ring, ulysses, chunks, layout, window in splits
        for ring_comm, grad_comm_dtype in comms
        for dtype in (torch.float32, torch.bfloat16)
    ]  # fmt: skip


def test_bytes_equal_the_formulas(world4):
    cases = traffic_cases()
    for rank, results in enumerate(world4.run(sent_bytes, cases)):
        for (case, dtype), sent in zip(cases, results, strict=True):
            layout = SequenceLayout(case.doc_lengths, case.config)
            plan = AttentionPlan(layout, window=case.window)
            shape = AttentionShape(8, 2, 8, dtype.itemsize, 4 if case.grad_comm_dtype == "fp32" else dtype.itemsize)
            ulysses = case.ulysses_degree
            expected = (
                sum(ring_bytes(shape, plan, rank // ulysses, case.ring_comm)),
                2 * ulysses_bytes(shape, local_length=layout.local_length, ulysses_degree=ulysses),
            )
            assert (sent.ring, sent.ulysses) == (sent.counted_ring, sent.counted_ulysses) == expected, (case, dtype)


def test_a_ring_over_one_zigzag_document_by_hand():
    """4 ranks of 16 slots, 2 K/V heads of 8, bf16: 3 hops of 16 rows, 2 * 2 * 8 elements each; gradients in fp32."""
    plan = AttentionPlan(SequenceLayout([64], ContextParallelConfig(4, layout="zigzag")))
    shape = AttentionShape(8, 2, 8)
    hop = 16 * 32
    assert ring_bytes(shape, plan, 1, "p2p") == (3 * hop * 2, 3 * hop * 2 + 3 * hop * 4)
    assert ring_bytes(shape, plan, 1, "allgather") == ring_bytes(shape, plan, 1, "p2p")
    exchanged = [sum(ring_bytes(shape, plan, rank, "exchange")) for rank in range(4)]
    assert sum(exchanged) == 0.75 * 4 * sum(ring_bytes(shape, plan, 1, "p2p"))
    assert ulysses_bytes(shape, local_length=16, ulysses_degree=4) == 16 * 8 * (2 * 8 + 2 * 4) * 3 // 4 * 2
    assert attention_flops(shape, plan.area(0)) == (4 * 8 * 8 * 520, 2.5 * 4 * 8 * 8 * 520)


def test_whole_documents_send_nothing(world2):
    case = Case((20, 20), ring_degree=2, layout="document")
    cases = [(case._replace(ring_comm=ring_comm), torch.float32) for ring_comm in RING_COMMS]
    assert all(sent.ring == 0 for results in world2.run(sent_bytes, cases) for sent in results)


def collectives_of_one_process() -> int:
    calls = []
    names = ("isend", "irecv", "batch_isend_irecv", "all_to_all_single", "all_reduce", "all_gather", "broadcast")
    case = Case((9, 4))
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    patches = [patch.object(dist, name, lambda *args, name=name, **kwargs: calls.append(name)) for name in names]
    for p in patches:
        p.start()
    run_attention(random_row(13, 4, 2, 8), layout, mesh, case)
    for p in patches:
        p.stop()
    return len(calls)


def test_rings_and_groups_of_one_send_nothing(world2):
    assert world2.run(collectives_of_one_process) == [0, 0]


def computed_areas(cases: list[Case]) -> list[tuple[int, int, int]]:
    """(forward, backward) visible scores that reach the kernel, and the plan's area, of each case."""
    meshes = Meshes()
    return [_computed_area(case, meshes.of(case)) for case in cases]


def _computed_area(case: Case, mesh: ContextParallelMesh) -> tuple[int, int, int]:
    layout = SequenceLayout(case.doc_lengths, case.config)
    kernel = {"sdpa": CpuFlashKernel, "eager": EagerKernel}[case.kernel]
    area = Counter()
    forward, backward = kernel.forward, kernel.backward

    def count_forward(self, q, k, v, *, group, scale):
        assert (len(q), len(k)) == (group.tile.q_len, group.tile.k_len)
        area["forward"] += int(band(group.tile).sum())
        return forward(self, q, k, v, group=group, scale=scale)

    def count_backward(self, inputs, *, group, scale):
        area["backward"] += int(band(group.tile).sum())
        return backward(self, inputs, group=group, scale=scale)

    with patch.object(kernel, "forward", count_forward), patch.object(kernel, "backward", count_backward):
        run_attention(random_row(layout.num_tokens, 4, 2, 8), layout, mesh, case)
    return area["forward"], area["backward"], AttentionPlan(layout, window=case.window).area(mesh.ring_rank)


def test_the_kernel_computes_what_the_plan_says(world4):
    cases = [
        Case(rows, ring_degree=4, layout=layout, kernel=kernel, ring_comm=ring_comm, window=window)
        for layout in LAYOUTS
        for ring_comm in RING_COMMS
        for kernel in ("sdpa", "eager")
        for rows, window in (((64,), None), ((5, 1, 7, 30, 2), None), ((5, 1, 7, 30, 2), 6))
    ]
    per_rank = world4.run(computed_areas, cases)
    for case, ranks in zip(cases, zip(*per_rank, strict=True), strict=True):
        assert all(forward == backward == planned for forward, backward, planned in ranks), case
        total = int(visible(case.doc_lengths, window=case.window).sum())
        assert sum(planned for *_, planned in ranks) == total, case


def test_one_zigzag_document_is_balanced():
    plan = AttentionPlan(SequenceLayout((1000,), Case((1000,), ring_degree=4).config))
    areas = [plan.area(rank) for rank in range(4)]
    assert max(areas) / min(areas) < 1.01


def event_order(case: Case, backward: bool = False) -> list[str]:
    """Starts of communication, waits for it and kernel calls, in the order of the forward or of the backward pass."""
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    events: list[str] = []

    def noted(name: str, function):
        def wrapper(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return wrapper

    q, k, v, grad_out = (layout.shard(x, mesh.cp_rank) for x in random_row(layout.num_tokens, 8, 4, 8))
    with (
        patch.object(dist, "batch_isend_irecv", noted("send", dist.batch_isend_irecv)),
        patch.object(dist, "all_to_all_single", noted("send", dist.all_to_all_single)),
        patch.object(Transfer, "wait", noted("wait", Transfer.wait)),
        patch.object(BlockTransfer, "finish", noted("wait", BlockTransfer.finish)),
        patch.object(CpuFlashKernel, "forward", noted("kernel", CpuFlashKernel.forward)),
        patch.object(CpuFlashKernel, "backward", noted("kernel", CpuFlashKernel.backward)),
    ):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*leaves, mesh=mesh, layout=layout, config=case.config)
        if backward:
            events.clear()
            out.backward(grad_out)
    return events


@pytest.mark.parametrize(
    ("ring", "ulysses", "chunks", "ring_comm", "expected"),
    [
        (4, 1, 1, "p2p", "send kernel wait send kernel wait send kernel wait kernel"),
        (4, 1, 1, "exchange", "send kernel wait kernel kernel kernel"),
        (4, 1, 2, "allgather", "send kernel wait send kernel kernel kernel wait kernel kernel kernel"),
        (1, 4, 1, "p2p", "send wait kernel send wait"),
    ],
)
def test_what_comes_next_travels_while_the_kernel_runs(world4, ring, ulysses, chunks, ring_comm, expected):
    case = Case((64,), 8, 4, 8, ring, ulysses, ring_comm=ring_comm, head_chunks=chunks)
    assert " ".join(world4.run(event_order, case)[0]) == expected


@pytest.mark.parametrize(
    ("chunks", "ring_comm", "expected"),
    [
        (1, "p2p", "send kernel wait kernel send wait"),
        (1, "exchange", "send wait kernel send kernel wait"),
        (1, "allgather", "send wait kernel send kernel wait"),
        (2, "allgather", "send wait send kernel send wait kernel wait send kernel wait"),
    ],
)
def test_gradients_travel_while_the_kernel_runs(world2, chunks, ring_comm, expected):
    case = Case((64,), 8, 4, 8, 2, 1, ring_comm=ring_comm, head_chunks=chunks)
    assert " ".join(world2.run(event_order, case, backward=True)[0]) == expected


def test_the_next_heads_travel_while_the_current_ones_are_used(world2):
    case = Case((64,), 8, 4, 8, 1, 2, head_chunks=2)
    expected = (
        "send wait send kernel send wait kernel send wait wait"  # a group's output leaves under the next one's kernel
    )
    assert " ".join(world2.run(event_order, case)[0]) == expected


def largest_trade(case: Case) -> int:
    """Bytes of the largest message of the Ulysses all-to-alls of a forward and backward pass."""
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    sizes: list[int] = []
    all_to_all_single = dist.all_to_all_single

    def note(output, input, *args, **kwargs):
        sizes.append(input.nbytes)
        return all_to_all_single(output, input, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", note):
        run_attention(random_row(layout.num_tokens, 8, 8, 8), layout, mesh, case)
    return max(sizes)


def test_what_travels_at_once_shrinks_with_the_chunks(world2):
    sizes = [world2.run(largest_trade, Case((64,), 8, 8, 8, 1, 2, head_chunks=chunks))[0] for chunks in (1, 2, 4)]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]
