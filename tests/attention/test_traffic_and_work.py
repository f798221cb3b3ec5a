"""What is really sent and computed, seen from outside (torch.distributed and the kernel entry are wrapped), against
the formulas and the plan."""

from __future__ import annotations

from collections import Counter
from math import lcm
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_cp.attention import ring as ring_engine
from hf_cp.attention.kernels import EagerKernel, SdpaKernel
from hf_cp.attention.usp import context_parallel_attention
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan
from tests.attention.cases import Case, run_attention
from tests.attention.reference import random_row

pytestmark = pytest.mark.distributed


def sent_bytes(case: Case, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that leave this rank in one forward and backward pass, counted in torch.distributed and by the mesh."""
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    row = random_row(layout.num_tokens, case.num_heads, case.num_kv_heads, case.head_dim, dtype)
    q, k, v, grad_out = (layout.shard(x, mesh.cp_rank) for x in row)
    seen: Counter[str] = Counter()
    batch_isend_irecv, all_to_all_single = dist.batch_isend_irecv, dist.all_to_all_single

    def count_sends(ops):
        seen["ring"] += sum(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.isend)
        return batch_isend_irecv(ops)

    def count_all_to_all(output, input, *args, **kwargs):
        blocks = dist.get_world_size(kwargs["group"])
        seen["ulysses"] += input.numel() * input.element_size() * (blocks - 1) // blocks
        return all_to_all_single(output, input, *args, **kwargs)

    with (
        patch.object(dist, "batch_isend_irecv", count_sends),
        patch.object(dist, "all_to_all_single", count_all_to_all),
    ):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        context_parallel_attention(*leaves, mesh=mesh, layout=layout).backward(grad_out)
    return {
        "ring": seen["ring"],
        "ulysses": seen["ulysses"],
        "counted_ring": mesh.traffic.ring_bytes,
        "counted_ulysses": mesh.traffic.ulysses_bytes,
        "slots": layout.ring_shard_length,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_bytes_equal_the_formulas(world4, ring, ulysses, dtype):
    case = Case((40, 23), 8, 2, 8, ring_degree=ring, ulysses_degree=ulysses)
    kv_heads, size = lcm(2, ulysses), dtype.itemsize
    for sent in world4.run(sent_bytes, case, dtype):
        slots = sent["slots"]
        kv = 2 * slots * kv_heads // ulysses * 8  # elements of one hop
        # forward R - 1 hops of K/V; backward R - 1 hops of K/V and R - 1 hops of fp32 dK/dV
        assert sent["ring"] == (ring - 1) * kv * (size + size + 4)
        # q, k, v there and out back; the gradients the other way: all in the compute dtype
        heads = 2 * 8 + 2 * kv_heads
        assert sent["ulysses"] == 2 * (slots // ulysses) * heads * 8 * size * (ulysses - 1) // ulysses
        assert (sent["counted_ring"], sent["counted_ulysses"]) == (sent["ring"], sent["ulysses"])


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


def computed_area(case: Case) -> tuple[int, int, int]:
    """(forward, backward) visible scores that reach the kernel, and the plan's area."""
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    kernel = {"sdpa": SdpaKernel, "eager": EagerKernel}[case.kernel]
    area = Counter()
    forward, backward = kernel.forward, kernel.backward

    def visible_scores(q, k, tile):
        rows, columns = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
        offset = columns - rows - (k.shape[0] - q.shape[0])
        assert tile.left is None
        return offset.numel() if tile.right is None else int((offset <= tile.right).sum())

    def count_forward(self, q, k, v, *, tile, scale):
        area["forward"] += visible_scores(q, k, tile)
        return forward(self, q, k, v, tile=tile, scale=scale)

    def count_backward(self, grad_out, q, k, v, out, lse, *, tile, scale):
        area["backward"] += visible_scores(q, k, tile)
        return backward(self, grad_out, q, k, v, out, lse, tile=tile, scale=scale)

    with patch.object(kernel, "forward", count_forward), patch.object(kernel, "backward", count_backward):
        run_attention(random_row(layout.num_tokens, 4, 2, 8), layout, mesh, case)
    return area["forward"], area["backward"], AttentionPlan(layout).area(mesh.ring_rank)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [(64,), (5, 1, 7, 30, 2)])
def test_the_kernel_computes_what_the_plan_says(world4, layout, kernel, rows):
    case = Case(rows, ring_degree=4, layout=layout, kernel=kernel)
    results = world4.run(computed_area, case)
    assert all(forward == backward == planned for forward, backward, planned in results)
    assert sum(planned for *_, planned in results) == sum(n * (n + 1) // 2 for n in rows)


def test_one_zigzag_document_is_balanced(world4):
    areas = [planned for *_, planned in world4.run(computed_area, Case((1000,), ring_degree=4))]
    assert max(areas) / min(areas) < 1.01


def event_order() -> list[str]:
    """Names of communication and kernel events in the order in which they start."""
    case = Case((64,), ring_degree=4)
    mesh, layout = ContextParallelMesh(case.config), SequenceLayout(case.doc_lengths, case.config)
    events: list[str] = []
    start_hop, forward = ring_engine.start_hop, SdpaKernel.forward

    def note_hop(tensor, mesh, *, tag):
        events.append("hop")
        return start_hop(tensor, mesh, tag=tag)

    def note_kernel(self, *args, **kwargs):
        events.append("kernel")
        return forward(self, *args, **kwargs)

    q, k, v, _ = (layout.shard(x, mesh.cp_rank) for x in random_row(64, 4, 2, 8))
    with patch.object(ring_engine, "start_hop", note_hop), patch.object(SdpaKernel, "forward", note_kernel):
        context_parallel_attention(q, k, v, mesh=mesh, layout=layout)
    return events


def test_the_next_keys_travel_while_the_current_ones_are_used(world4):
    assert world4.run(event_order) == [["hop", "kernel"] * 3 + ["kernel"]] * 4
