"""The collectives of attention: a hop around the ring and an all-to-all over the Ulysses axis.

Each counts the bytes that leave the process (`mesh.traffic`). Over an axis of one process nothing is communicated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_cp.parallel.mesh import ContextParallelMesh


class Hop(NamedTuple):
    """A tensor on its way around the ring."""

    received: torch.Tensor
    sent: torch.Tensor  # kept alive until it has left
    works: list[dist.Work]

    def wait(self) -> torch.Tensor:
        """The tensor of the previous ring rank."""
        for work in self.works:
            work.wait()
        return self.received


def start_hop(tensor: torch.Tensor, mesh: ContextParallelMesh, *, tag: int = 0) -> Hop:
    """Starts to send `tensor` to the next ring rank and to receive the previous one's, of the same shape.

    Hops that are in flight together need different tags. On NCCL every rank must start its hops in the same order.
    """
    sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    group, size, rank = mesh.ring_group, mesh.ring_size, mesh.ring_rank
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size, tag=tag),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size, tag=tag),
    ]
    mesh.traffic.ring_bytes += sent.numel() * sent.element_size()
    return Hop(received, sent, dist.batch_isend_irecv(ops))


class _AllToAll(torch.autograd.Function):
    """Block j of dim 0 goes to Ulysses rank j, arriving as block `ulysses_rank`: its own inverse and adjoint."""

    @staticmethod
    def forward(ctx, blocks: torch.Tensor, mesh: ContextParallelMesh) -> torch.Tensor:
        ctx.mesh = mesh
        sent = blocks.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=mesh.ulysses_group)
        size = mesh.ulysses_size
        mesh.traffic.ulysses_bytes += sent.numel() * sent.element_size() * (size - 1) // size
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grad, ctx.mesh), None


def all_to_all(blocks: torch.Tensor, mesh: ContextParallelMesh) -> torch.Tensor:
    """Trades blocks over the Ulysses axis, differentiably.

    Args:
        blocks (`torch.Tensor`): [ulysses_size, ...], block j for Ulysses rank j.

    Returns:
        `torch.Tensor` of the same shape, block j from Ulysses rank j.
    """
    return blocks if mesh.ulysses_size == 1 else _AllToAll.apply(blocks, mesh)


def sum_over_cp(tensor: torch.Tensor, mesh: ContextParallelMesh) -> torch.Tensor:
    """The sum over the context-parallel group, on every rank of it; not differentiable."""
    total = tensor.detach().clone()
    if mesh.cp_size > 1:
        dist.all_reduce(total, group=mesh.cp_group)
    return total


def gather_ints_over_cp(values: list[int], mesh: ContextParallelMesh) -> list[list[int]]:
    """`values` of every rank of the context-parallel group, in cp_rank order; waits for the ranks."""
    if mesh.cp_size == 1:
        return [values]
    local = torch.tensor(values, dtype=torch.int64, device=mesh.device_type)
    gathered = [torch.empty_like(local) for _ in range(mesh.cp_size)]
    dist.all_gather(gathered, local, group=mesh.cp_group)
    return [t.tolist() for t in gathered]
