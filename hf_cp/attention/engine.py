"""What the three engines over the ring axis share: the autograd function and the shape of an engine.

An engine says how keys and values reach the ranks whose queries see them, and how their gradients come home.
Everything else (the kernel, adding up, what is saved) is the same. Saved are this rank's own q, k, v, the final out
and lse.

Dimensions: T = slots of a ring shard, H = query heads, G = K/V heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hf_cp.attention.kernels import Kernel, TileGroup, plan_calls
from hf_cp.attention.merge import accumulator_dtype
from hf_cp.attention.recompute import Once, Tensors
from hf_cp.attention.tiles import TileBackward, TileForward
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.tiles import Tile


class Call(NamedTuple):
    """One attention call on one rank: everything but the tensors."""

    mesh: ContextParallelMesh
    plan: AttentionPlan
    kernel: Kernel
    scale: float
    device: torch.device
    grad_dtype: torch.dtype | None  # of dK/dV on the wire; None is the accumulator's

    def plan_calls(self, tiles: Sequence[Tile]) -> list[TileGroup]:
        """The kernel calls that compute `tiles`."""
        return plan_calls(tiles, self.kernel, self.device)

    def on_device(self, rows: np.ndarray) -> torch.Tensor:
        """Slot numbers where the tensors are; made once per schedule, since the copy waits for the device."""
        return torch.from_numpy(rows).to(self.device)

    def schedule_key(self, engine: str) -> Hashable:
        """What an engine's schedule for a plan depends on."""
        return engine, self.mesh.ring_rank, self.kernel.name, self.device

    def wire(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients as they travel."""
        return grad if self.grad_dtype is None else grad.to(self.grad_dtype)


class Engine(Protocol):
    """How K/V move over the ring axis."""

    def forward(self, state: TileForward, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Takes all keys that this rank's queries see into `state`; k, v [T, G, D] are this rank's own."""

    def backward(
        self, state: TileBackward, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, call: Call
    ) -> None:
        """Adds to `state`'s gradient of q, and to `grad_kv` [T, 2, G, D] what any rank's queries give own keys."""


class ShardAttention(torch.autograd.Function):
    """Exact attention of a ring shard's queries over the whole row, by an engine."""

    @staticmethod
    def forward(
        ctx,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, G, D]
        v: torch.Tensor,  # [T, G, D]
        engine: Engine,
        call: Call,
        once: Once,
    ) -> torch.Tensor:  # [T, H, D]
        def make() -> Tensors:
            state = TileForward(q, call.kernel, call.scale)
            engine.forward(state, k, v, call)
            out, lse = state.result()
            return out.to(q.dtype), lse

        out, lse = once(make)
        ctx.engine, ctx.call = engine, call
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):  # loss.backward() may be called under it; see the forward
            state = TileBackward(q, out, lse, grad_out, ctx.call.kernel, ctx.call.scale)
            grad_kv = torch.zeros((len(k), 2, *k.shape[1:]), dtype=accumulator_dtype(k.dtype), device=k.device)
            ctx.engine.backward(state, k, v, grad_kv, ctx.call)
            grad_k, grad_v = grad_kv.to(k.dtype).unbind(1)
            grad_q = state.grad_q().to(q.dtype)
        ctx.call.mesh.traffic.note_attention()
        return grad_q, grad_k, grad_v, None, None, None


def rows_to_send(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Keys and values of the slots `rows` (int64, rising or repeated) as one message, [rows, 2, G, D]."""
    return torch.stack((k.index_select(0, rows), v.index_select(0, rows)), dim=1)


def in_two(calls: list[TileGroup]) -> tuple[list[TileGroup], list[TileGroup]]:
    """The calls on own keys, halved by work: in the backward pass one half hides what comes, the other what goes."""
    work = np.cumsum([group.area for group in calls])
    split = int(np.searchsorted(work, work[-1] / 2)) if calls else 0
    return calls[:split], calls[split:]
