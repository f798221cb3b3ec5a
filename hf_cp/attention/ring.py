"""Ring attention (arXiv:2310.01889): K/V shards travel around the ring while each rank works on the shard it holds.

At step s, ring rank r holds the K/V of rank r - s. Forward: R - 1 hops of K/V. Backward: R - 1 hops of K/V again, and
R - 1 hops of the fp32 sums of dK/dV: the sum for shard c starts on rank c + 1, passes every other rank, and comes
home, where the own part (which never travels) is added.

Dimensions: T = slots of a ring shard, H = query heads, G = K/V heads, D = head size, R = ring_degree.
"""

from __future__ import annotations

import torch

from hf_cp.attention.kernels import Kernel
from hf_cp.attention.merge import accumulator_dtype, empty_result, merge_
from hf_cp.parallel.collectives import start_hop
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.sequence.plan import AttentionPlan

KV_TAG, GRAD_TAG = 0, 1


class RingAttention(torch.autograd.Function):
    """Exact attention of a ring shard; saves only its own (q, k, v, out, lse)."""

    @staticmethod
    def forward(
        ctx,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, G, D]
        v: torch.Tensor,  # [T, G, D]
        mesh: ContextParallelMesh,
        plan: AttentionPlan,
        kernel: Kernel,
        scale: float,
    ) -> torch.Tensor:  # [T, H, D]
        ctx.mesh, ctx.plan, ctx.kernel, ctx.scale = mesh, plan, kernel, scale
        out, lse = _ring_forward(q, k, v, ctx)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_kv = _ring_backward(grad_out, q, k, v, out, lse, ctx)
        grad_k, grad_v = grad_kv.to(k.dtype).unbind(0)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _ring_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx) -> tuple[torch.Tensor, torch.Tensor]:
    mesh, rank, size = ctx.mesh, ctx.mesh.ring_rank, ctx.mesh.ring_size
    kv = _one_message(k, v, size)
    out, lse = empty_result(q)
    for step in range(size):
        next_kv = start_hop(kv, mesh, tag=KV_TAG) if step + 1 < size else None
        k, v = kv
        for tile in ctx.plan.lower(rank, (rank - step) % size, bands=ctx.kernel.bands):
            block_out, block_lse = ctx.kernel.forward(
                q[tile.q_slots], k[tile.k_slots], v[tile.k_slots], tile=tile, scale=ctx.scale
            )
            merge_(out[tile.q_slots], lse[tile.q_slots], block_out, block_lse)
        if next_kv is not None:
            kv = next_kv.wait()
    return out, lse


def _ring_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ctx,
) -> tuple[torch.Tensor, torch.Tensor]:
    mesh, rank, size = ctx.mesh, ctx.mesh.ring_rank, ctx.mesh.ring_size
    kv = _one_message(k, v, size)
    dtype = accumulator_dtype(q.dtype)
    grad_q = torch.zeros_like(q, dtype=dtype)
    own_grad_kv = torch.zeros((2, *k.shape), dtype=dtype, device=k.device)
    grad_kv, grad_hop = own_grad_kv, None
    for step in range(size):
        next_kv = start_hop(kv, mesh, tag=KV_TAG) if step + 1 < size else None
        if step == 1:
            grad_kv = torch.zeros_like(own_grad_kv)
        elif step > 1:
            grad_kv = grad_hop.wait()  # what the ranks before this one found for the same shard
        k, v = kv
        for tile in ctx.plan.lower(rank, (rank - step) % size, bands=ctx.kernel.bands):
            rows, keys = tile.q_slots, tile.k_slots
            block_q, block_k, block_v = ctx.kernel.backward(
                grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], tile=tile, scale=ctx.scale
            )
            grad_q[rows] += block_q
            grad_kv[0, keys] += block_k
            grad_kv[1, keys] += block_v
        if step > 0:
            grad_hop = start_hop(grad_kv, mesh, tag=GRAD_TAG)
        if next_kv is not None:
            kv = next_kv.wait()
    if grad_hop is not None:
        own_grad_kv += grad_hop.wait()
    return grad_q, own_grad_kv


def _one_message(k: torch.Tensor, v: torch.Tensor, ring_size: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """K and V as [2, T, G, D] to send; the pair itself, uncopied, if nothing will be sent."""
    return torch.stack((k, v)) if ring_size > 1 else (k, v)
