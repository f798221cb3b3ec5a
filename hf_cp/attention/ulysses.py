"""Ulysses (arXiv:2309.14509): an all-to-all swaps tokens for heads, so a rank gets a whole ring shard of few heads.

q, k and v travel in one all-to-all. With u = ulysses_degree and L = lcm(G, u), each K/V head is first repeated L / G
times in order; every rank then gets H / u query heads and the L / u K/V heads that these use. The backward pass of the
repetition sums the replicas' gradients.

A rank's heads can be handled in head chunks, one after another (Untied Ulysses, arXiv:2602.21196): what is in flight
shrinks to 1 / chunks, and the next head chunk travels while the current one is used, in both directions. Results and
gradients of a head chunk go straight to their place: at no time do all of them exist a second time.

4 query heads, u = 2, 2 head chunks: rank 0 gets heads 0 and 1, rank 1 gets 2 and 3, one after the other.

    before      rank 0: tokens of piece 0, heads 0 1 2 3      rank 1: tokens of piece 1, heads 0 1 2 3
    chunk 0     rank 0: pieces 0 and 1, head 0                rank 1: pieces 0 and 1, head 2
    chunk 1     rank 0: pieces 0 and 1, head 1                rank 1: pieces 0 and 1, head 3

Dimensions: n = local slots, T = n * u = slots of a ring shard, H = query heads, G = K/V heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

import torch

from hf_cp.attention.recompute import Memory
from hf_cp.distributed.collectives import BlockTransfer
from hf_cp.distributed.communicator import Communicator


class InFlight(NamedTuple):
    """Blocks that have been sent for: [u, ...], to be read after `_Finish`."""

    blocks: torch.Tensor
    transfer: BlockTransfer


class HeadChunks:
    """The heads of one attention call, scattered to the Ulysses ranks and gathered again, a head chunk at a time.

    Args:
        q (`torch.Tensor`): [n, H, D].
        k, v (`torch.Tensor`): [n, G, D].
        chunks (`int`): head chunks; must divide the K/V heads of a rank.
        comm (`Communicator`): the processes.
        memory (`Memory`): what arrives in the forward pass is recalled from it or kept in it.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        chunks: int,
        comm: Communicator,
        memory: Memory,
    ):
        self.size, self.chunks, self.comm, self.memory = comm.mesh.ulysses_size, chunks, comm, memory
        num_kv_heads = lcm(k.shape[1], self.size)
        if num_kv_heads > k.shape[1]:
            k, v = (x.repeat_interleave(num_kv_heads // x.shape[1], dim=1) for x in (k, v))
        self.qkv, self.widths = (q, k, v), [x.shape[1] // (self.size * chunks) for x in (q, k, v)]
        self._grads = _Gradients(chunks)

    def scatter(self, chunk: int) -> InFlight | None:
        """Starts to send every rank its heads of `chunk`; `None` behind the last one."""
        if chunk == self.chunks:
            return None
        return self._start(_Take.apply(*self.qkv, self.size, chunk, self._grads), "scatter")

    def arrived(self, flight: InFlight) -> tuple[torch.Tensor, ...]:
        """q [T, h, D], k and v [T, g, D] of this rank's heads, whose pieces of the shard lie in rank order."""
        return _finish(flight).flatten(0, 1).split(self.widths, dim=1)

    def gather(self, out: torch.Tensor) -> InFlight:
        """Starts to send the result [T, h, D] back to the ranks that have the tokens."""
        return self._start(out.unflatten(0, (self.size, -1)), "gather")

    def empty_result(self) -> torch.Tensor:
        """[n, u, chunks, h, D]: for each rank its consecutive heads, and of them for each head chunk."""
        q, v = self.qkv[0], self.qkv[2]
        return q.new_empty(len(q), self.size, self.chunks, self.widths[0], v.shape[-1])

    def place(self, result: torch.Tensor, flight: InFlight, chunk: int) -> torch.Tensor:
        """Puts a gathered head chunk into the result."""
        return _Place.apply(result, _finish(flight).transpose(0, 1), chunk)

    def _start(self, blocks: torch.Tensor, name: str) -> InFlight:
        transfer = BlockTransfer(self.comm, name=name)
        return InFlight(_Start.apply(blocks, transfer, self.memory), transfer)


def _finish(flight: InFlight) -> torch.Tensor:
    return _Finish.apply(flight.blocks, flight.transfer)


class _Start(torch.autograd.Function):
    """Starts an all-to-all of blocks; in the backward pass, waits for the gradients' (see `_Finish`)."""

    @staticmethod
    def forward(ctx, blocks: torch.Tensor, transfer: BlockTransfer, memory: Memory) -> torch.Tensor:
        ctx.transfer = transfer
        if transfer.comm.mesh.ulysses_size == 1:
            return transfer.start(blocks)
        (received,) = memory.recall() or memory.keep((transfer.start(blocks),))
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.transfer.finish()
        return grad, None, None


class _Finish(torch.autograd.Function):
    """Waits for an all-to-all; in the backward pass, starts that of the gradients (it is its own adjoint)."""

    @staticmethod
    def forward(ctx, blocks: torch.Tensor, transfer: BlockTransfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.finish()
        return blocks.view_as(blocks)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.transfer.start(grad), None


@dataclass
class _Gradients:
    """Where the gradients of all head chunks meet: each is put in place when it comes, the last one takes all."""

    chunks: int
    parts: list[torch.Tensor] = field(default_factory=list)  # of q, k, v: [n, u, chunks, heads, D]
    placed: set[int] = field(default_factory=set)

    def place(self, chunk: int, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Takes in a head chunk's [u, n, heads, D]; the whole [n, all heads, D] with the last one, `None` before."""
        if not self.placed or chunk in self.placed:  # the first, or another backward pass after one that failed
            self.placed.clear()
            self.parts = [g.new_empty(g.shape[1], len(g), self.chunks, *g.shape[2:]) for g in grads]
        for part, grad in zip(self.parts, grads, strict=True):
            part[:, :, chunk] = grad.transpose(0, 1)
        self.placed.add(chunk)
        if len(self.placed) < self.chunks:
            return None, None, None
        whole = tuple(part.flatten(1, 3) for part in self.parts)
        self.placed, self.parts = set(), []
        return whole


class _Take(torch.autograd.Function):
    """One head chunk of q, k and v as blocks to send, [u, n, (H + 2L) / (u * chunks), D]."""

    @staticmethod
    def forward(
        ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, chunk: int, grads: _Gradients
    ) -> torch.Tensor:
        parts = [x.unflatten(1, (size, grads.chunks, -1))[:, :, chunk].transpose(0, 1) for x in (q, k, v)]
        ctx.chunk, ctx.grads, ctx.widths = chunk, grads, [part.shape[2] for part in parts]
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.grads.place(ctx.chunk, grad.split(ctx.widths, dim=2)), None, None, None


class _Place(torch.autograd.Function):
    """Puts one head chunk [n, u, heads, D] into the result [n, u, chunks, heads, D], in place."""

    @staticmethod
    def forward(ctx, total: torch.Tensor, part: torch.Tensor, chunk: int) -> torch.Tensor:
        ctx.chunk = chunk
        total[:, :, chunk] = part
        ctx.mark_dirty(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad[:, :, ctx.chunk], None
