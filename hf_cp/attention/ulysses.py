"""Ulysses (arXiv:2309.14509): an all-to-all trades tokens for heads: a rank gets a whole ring shard of few heads.

q, k and v travel in one all-to-all. With u = ulysses_degree and L = lcm(G, u), each K/V head is first repeated L / G
times in order; every rank then gets H / u query heads and the L / u K/V heads that these use. The backward pass of the
repetition sums the replicas' gradients.

A rank's heads can be handled in `chunks` groups, one after another (Untied Ulysses, arXiv:2602.21196): what is in
flight shrinks to 1 / chunks, and the next group travels while the current one is used, in both directions. Results
and gradients of a group go straight to their place: at no time do all groups exist a second time.

Dimensions: n = local slots, T = n * u = slots of a ring shard, H = query heads, G = K/V heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm

import torch

from hf_cp.attention.recompute import Once, make_now
from hf_cp.distributed.collectives import BlockTransfer, finish_all_to_all, start_all_to_all
from hf_cp.distributed.mesh import ContextParallelMesh

HeadsAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_by_heads(
    q: torch.Tensor,  # [n, H, D]
    k: torch.Tensor,  # [n, G, D]
    v: torch.Tensor,  # [n, G, D]
    attend: HeadsAttention,  # (q [T, h, D], k [T, g, D], v [T, g, D]) -> [T, h, D]
    mesh: ContextParallelMesh,
    chunks: int = 1,
    once: Once = make_now,
) -> torch.Tensor:  # [n, H, D]
    """Runs `attend` on whole ring shards, this rank's heads, `chunks` groups of them one after another.

    What arrives in the forward pass is made through `once`.
    """
    size = mesh.ulysses_size
    if size == 1 and chunks == 1:
        return attend(q, k, v)
    num_kv_heads = lcm(k.shape[1], size)
    if num_kv_heads > k.shape[1]:
        k, v = (x.repeat_interleave(num_kv_heads // x.shape[1], dim=1) for x in (k, v))
    grads = _Gradients(chunks)
    widths = [x.shape[1] // (size * chunks) for x in (q, k, v)]
    # consecutive heads for each rank, and for each group of them
    total = q.new_empty(len(q), size, chunks, widths[0], v.shape[-1])

    def start(chunk: int) -> BlockTransfer:
        return start_all_to_all(_Take.apply(q, k, v, size, chunk, grads), mesh, once=once, name="scatter")

    out, transfer = None, start(0)
    for chunk in range(chunks):
        heads = finish_all_to_all(transfer).flatten(0, 1)  # [T, ...]: pieces of the shard in rank order
        following = start(chunk + 1) if chunk + 1 < chunks else None  # travels while these heads are used
        attended = attend(*heads.split(widths, dim=1))  # [T, H / (u * chunks), D]
        del heads
        leaving = start_all_to_all(attended.unflatten(0, (size, -1)), mesh, once=once, name="gather")
        if chunk:
            total = _place(total, out, chunk - 1)
        out, transfer = leaving, following
    return _place(total, out, chunks - 1).flatten(1, 3)


def _place(total: torch.Tensor, out: BlockTransfer, chunk: int) -> torch.Tensor:
    return _Place.apply(total, finish_all_to_all(out).transpose(0, 1), chunk)


@dataclass
class _Gradients:
    """Where the gradients of all groups of heads meet: each is put in place when it comes, the last one takes all."""

    chunks: int
    parts: list[torch.Tensor] = field(default_factory=list)  # of q, k, v: [n, u, chunks, heads, D]
    placed: set[int] = field(default_factory=set)

    def place(self, chunk: int, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Takes in a group's [u, n, heads, D]; the whole [n, all heads, D] with the last group, `None` before."""
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
    """One group of heads of q, k and v as blocks to trade, [u, n, (H + 2L) / (u * chunks), D]."""

    @staticmethod
    def forward(
        ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, chunk: int, grads: _Gradients
    ) -> torch.Tensor:
        groups = [x.unflatten(1, (size, grads.chunks, -1))[:, :, chunk].transpose(0, 1) for x in (q, k, v)]
        ctx.chunk, ctx.grads, ctx.widths = chunk, grads, [group.shape[2] for group in groups]
        return torch.cat(groups, dim=2)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.grads.place(ctx.chunk, grad.split(ctx.widths, dim=2)), None, None, None


class _Place(torch.autograd.Function):
    """Puts one group of heads [n, u, heads, D] into the result [n, u, chunks, heads, D], in place."""

    @staticmethod
    def forward(ctx, total: torch.Tensor, group: torch.Tensor, chunk: int) -> torch.Tensor:
        ctx.chunk = chunk
        total[:, :, chunk] = group
        ctx.mark_dirty(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad[:, :, ctx.chunk], None
