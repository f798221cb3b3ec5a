"""What the engines over the ring axis share: the autograd function, and the running sums over blocks of keys.

An engine says how keys and values reach the ranks whose queries see them, and how their gradients come home. The
rest is here: a kernel runs over groups of tiles ([`BlockForward.add`], [`BlockBackward.add`]), and the results of the
blocks are added up. Saved are this rank's q, k, v and the *final* out and lse, so a backward kernel recomputes the
exact probabilities of its tile, exp(scores - lse), and its parts of dq, dk, dv only have to be summed.

Dimensions: T = slots of a ring shard, M = keys of a block, H = query heads, G = K/V heads, D = head size.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hf_cp.attention.kernels import BackwardInputs, Kernel, TileGroup, kernel_calls
from hf_cp.attention.merge import accumulator_dtype, empty_result, merge_
from hf_cp.attention.recompute import Memory
from hf_cp.distributed.communicator import Communicator
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.tiles import Tile


class Call(NamedTuple):
    """One attention call on one rank: everything but the tensors."""

    comm: Communicator
    plan: AttentionPlan  # which tiles, which tokens travel
    kernel: Kernel
    scale: float
    device: torch.device
    grad_dtype: torch.dtype | None  # of dK/dV as they travel; None is the accumulator's

    @property
    def ring_rank(self) -> int:
        return self.comm.mesh.ring_rank

    @property
    def ring_size(self) -> int:
        return self.comm.mesh.ring_size

    def kernel_calls(self, tiles: Sequence[Tile]) -> list[TileGroup]:
        """The kernel calls that compute `tiles`."""
        return kernel_calls(tiles, self.kernel, self.device)

    def on_device(self, slots: np.ndarray) -> torch.Tensor:
        """Slot numbers where the tensors are; made once per schedule, since the copy waits for the device."""
        return torch.from_numpy(slots).to(self.device)

    def schedule_key(self, engine: str) -> Hashable:
        """What an engine's schedule for a plan depends on."""
        return engine, self.ring_rank, self.kernel.name, self.device

    def as_sent(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of K/V in the dtype in which they travel."""
        return grad if self.grad_dtype is None else grad.to(self.grad_dtype)


class BlockForward:
    """Queries of a ring shard and their result so far; `add` takes in more keys."""

    def __init__(self, q: torch.Tensor, kernel: Kernel, scale: float):
        self.q, self.kernel, self.scale = q, kernel, scale
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        self._visited = np.zeros(len(q), dtype=bool)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, H, D] and lse [T, H] so far, fp32 (fp64 for fp64); 0 and -inf where no key was seen."""
        if self._result is None:
            self._result = empty_result(self.q)
        return self._result

    def heads(self, heads: slice) -> BlockForward:
        """Some of the query heads; adds to the same result."""
        part = copy.copy(self)
        part._visited = self._visited.copy()
        part.q, part._result = self.q[:, heads], tuple(x[:, heads] for x in self.result())
        return part

    def add(self, k: torch.Tensor, v: torch.Tensor, groups: list[TileGroup]) -> None:
        """Takes in keys and values [M, G, D]; the tiles count their slots in k."""
        for group in groups:
            # no names for what a call takes and gives: it must be gone before the next call needs its memory
            self._take(group, *self.kernel.forward(*self._inputs(k, v, group), group=group, scale=self.scale))

    def _inputs(self, k: torch.Tensor, v: torch.Tensor, group: TileGroup) -> tuple[torch.Tensor, ...]:
        return self.q[group.q_index], k[group.k_index], v[group.k_index]

    def _take(self, group: TileGroup, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the result over the keys of `group` to that of its queries."""
        q_slots = group.q_index
        is_first = _is_first_visit(self._visited, group)
        if self._result is None and len(out) == len(self.q):  # all queries: the result as it is
            dtype = accumulator_dtype(self.q.dtype)
            self._result = out.to(dtype), lse.to(dtype)
            return
        total_out, total_lse = self.result()
        if is_first:
            total_out[q_slots], total_lse[q_slots] = out.to(total_out.dtype), lse.to(total_lse.dtype)
        elif isinstance(q_slots, slice):
            merge_(total_out[q_slots], total_lse[q_slots], out, lse)
        else:  # numbered slots give a copy
            own_out, own_lse = total_out[q_slots], total_lse[q_slots]
            merge_(own_out, own_lse, out, lse)
            total_out[q_slots], total_lse[q_slots] = own_out, own_lse


class BlockBackward:
    """The backward pass of [`BlockForward`], with the final `out` and `lse` of every query."""

    def __init__(
        self,
        q: torch.Tensor,  # [T, H, D]
        out: torch.Tensor,  # [T, H, D]
        lse: torch.Tensor,  # [T, H]
        grad_out: torch.Tensor,  # [T, H, D]
        kernel: Kernel,
        scale: float,
    ):
        self.q, self.out, self.lse, self.grad_out = q, out, lse, grad_out
        self.kernel, self.scale = kernel, scale
        self._grad_q: torch.Tensor | None = None
        self._visited = np.zeros(len(q), dtype=bool)

    def grad_q(self) -> torch.Tensor:
        """[T, H, D], the sum so far, fp32 (fp64 for fp64)."""
        if self._grad_q is None:
            self._grad_q = torch.zeros_like(self.q, dtype=accumulator_dtype(self.q.dtype))
        return self._grad_q

    def heads(self, heads: slice) -> BlockBackward:
        """Some of the query heads; adds to the same gradient."""
        part = copy.copy(self)
        part._visited = self._visited.copy()
        for name in ("q", "out", "lse", "grad_out"):
            setattr(part, name, getattr(self, name)[:, heads])
        part._grad_q = self.grad_q()[:, heads]
        return part

    def visit(self, groups: list[TileGroup]) -> None:
        """Marks the queries of `groups` as having a part of their gradient, as `add` of these groups does."""
        for group in groups:
            _is_first_visit(self._visited, group)

    def add(self, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, groups: list[TileGroup]) -> None:
        """Adds the tiles' part of the gradients of k and v [M, G, D] to `grad_kv` [M, 2, G, D], in its dtype."""
        for group in groups:
            # no names, as in the forward pass
            self._take(group, grad_kv, *self.kernel.backward(self._inputs(k, v, group), group=group, scale=self.scale))

    def _inputs(self, k: torch.Tensor, v: torch.Tensor, group: TileGroup) -> BackwardInputs:
        i, j = group.q_index, group.k_index
        return BackwardInputs(self.grad_out[i], self.q[i], k[j], v[j], self.out[i], self.lse[i])

    def _take(
        self,
        group: TileGroup,
        grad_kv: torch.Tensor,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        q_slots, k_slots = group.q_index, group.k_index
        is_first = _is_first_visit(self._visited, group)
        if self._grad_q is None and len(grad_q) == len(self.q):  # all queries: the gradient as it is
            self._grad_q = grad_q.to(accumulator_dtype(self.q.dtype))
        elif is_first:
            self.grad_q()[q_slots] = grad_q.to(self.grad_q().dtype)
        else:
            self.grad_q()[q_slots] += grad_q
        grad_kv[k_slots, 0] += grad_k
        grad_kv[k_slots, 1] += grad_v


class Engine(Protocol):
    """How K/V move over the ring axis."""

    name: str

    def forward(self, state: BlockForward, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Takes all keys that this rank's queries see into `state`; k, v [T, G, D] are this rank's own."""

    def backward(
        self, state: BlockBackward, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, call: Call
    ) -> None:
        """Adds to `state`'s gradient of q, and to `grad_kv` [T, 2, G, D] what any rank's queries give own keys."""


class BlockAttention(torch.autograd.Function):
    """Exact attention of a ring shard's queries over the whole sample, by an engine."""

    @staticmethod
    def forward(
        ctx,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, G, D]
        v: torch.Tensor,  # [T, G, D]
        engine: Engine,
        call: Call,
        memory: Memory,
    ) -> torch.Tensor:  # [T, H, D]
        result = memory.recall()
        if result is None:  # not a recomputed layer whose result was kept
            state = BlockForward(q, call.kernel, call.scale)
            engine.forward(state, k, v, call)
            out, lse = state.result()
            result = memory.keep((out.to(q.dtype), lse))
        out, lse = result
        ctx.engine, ctx.call = engine, call
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):  # may run under it; the forward pass has it off in usp
            state = BlockBackward(q, out, lse, grad_out, ctx.call.kernel, ctx.call.scale)
            grad_kv = torch.zeros((len(k), 2, *k.shape[1:]), dtype=accumulator_dtype(k.dtype), device=k.device)
            ctx.engine.backward(state, k, v, grad_kv, ctx.call)
            grad_k, grad_v = grad_kv.to(k.dtype).unbind(1)
            grad_q = state.grad_q().to(q.dtype)
        ctx.call.comm.note_attention()
        return grad_q, grad_k, grad_v, None, None, None


def kv_message(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys and values of `slots` (int64, rising or repeated) as one message, [slots, 2, G, D]."""
    return torch.stack((k.index_select(0, slots), v.index_select(0, slots)), dim=1)


def in_two(calls: list[TileGroup]) -> tuple[list[TileGroup], list[TileGroup]]:
    """The calls on own keys, halved by work: in the backward pass one half hides what comes, the other what goes."""
    work = np.cumsum([group.area for group in calls])
    split = int(np.searchsorted(work, work[-1] / 2)) if calls else 0
    return calls[:split], calls[split:]


def _is_first_visit(visited: np.ndarray, group: TileGroup) -> bool:
    """Whether no query of the group was in one before: then its result is the sum so far, and need not be added."""
    is_first = not visited[group.q_slots].any()
    visited[group.q_slots] = True
    return is_first
