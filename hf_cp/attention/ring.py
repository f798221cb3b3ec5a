"""`p2p`: ring attention (arXiv:2310.01889). K/V travel around the ring while each rank works on what it holds.

At step s, ring rank r holds the K/V of rank r - s; the next ones are on their way meanwhile. Only rows of documents
that are on several ranks travel. Forward: R - 1 hops of K/V. Backward: R - 1 hops of K/V again, and R - 1 hops of the
sums of dK/dV: the sum for shard c starts on rank c + 1, passes every other rank and comes home, where the own part
(which never travels) is waiting.

Dimensions: T = slots of a ring shard, S = shared rows of a shard, G = K/V heads, D = head size, R = ring_degree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_cp.attention.engine import Call, rows_to_send
from hf_cp.attention.kernels import TileGroup
from hf_cp.attention.merge import accumulator_dtype
from hf_cp.attention.tiles import TileBackward, TileForward
from hf_cp.distributed.collectives import Transfer, start_hop
from hf_cp.distributed.ranges import named_range
from hf_cp.sequence.plan import renumber_keys

KV_TAG, GRAD_TAG = 0, 1


class RingStep(NamedTuple):
    """The shared rows of the shard that is here in one step, and the kernel calls on them."""

    num_rows: int
    calls: list[TileGroup]


class RingSchedule(NamedTuple):
    own_calls: list[TileGroup]
    own_rows: torch.Tensor  # int64: slots that travel
    steps: list[RingStep]  # step s has the shard of rank r - s; the first is the own one, without calls


class Ring:
    """The relay."""

    def forward(self, state: TileForward, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        schedule = _schedule(call)
        kv = rows_to_send(k, v, schedule.own_rows) if len(schedule.steps) > 1 else None  # [S, 2, G, D]
        for step, (_, calls) in enumerate(schedule.steps):
            next_kv = _next(kv, step, schedule, call)
            with named_range(f"hf_cp/ring/step{step}"):
                if step == 0:
                    state.add(k, v, schedule.own_calls)
                else:
                    state.add(kv[:, 0], kv[:, 1], calls)
            kv = next_kv.wait() if next_kv is not None else None

    def backward(
        self, state: TileBackward, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, call: Call
    ) -> None:
        schedule = _schedule(call)
        kv = rows_to_send(k, v, schedule.own_rows) if len(schedule.steps) > 1 else None
        grad_hop = None
        for step, (num_rows, calls) in enumerate(schedule.steps):
            next_kv = _next(kv, step, schedule, call)
            if step == 0:
                with named_range("hf_cp/ring/grad_step0"):
                    state.add(k, v, grad_kv, schedule.own_calls)
            else:
                visiting = torch.zeros((num_rows, *kv.shape[1:]), dtype=accumulator_dtype(k.dtype), device=k.device)
                with named_range(f"hf_cp/ring/grad_step{step}"):
                    state.add(kv[:, 0], kv[:, 1], visiting, calls)
                kv = None  # used up: let go of it before the hop below needs a buffer
                if grad_hop is not None:
                    visiting += grad_hop.wait()  # what the ranks before this one found for the same shard
                next_rows = schedule.steps[(step + 1) % len(schedule.steps)].num_rows
                grad_hop = start_hop(visiting, call.mesh, received_rows=next_rows, tag=GRAD_TAG)
            kv = next_kv.wait() if next_kv is not None else None
        if grad_hop is not None:
            grad_kv.index_add_(0, schedule.own_rows, grad_hop.wait())


def _next(kv: torch.Tensor | None, step: int, schedule: RingSchedule, call: Call) -> Transfer | None:
    """Starts to move the K/V on, unless this is the last step."""
    if step + 1 == len(schedule.steps):
        return None
    return start_hop(kv, call.mesh, received_rows=schedule.steps[step + 1].num_rows, tag=KV_TAG)


def _schedule(call: Call) -> RingSchedule:
    plan, rank, size = call.plan, call.mesh.ring_rank, call.mesh.ring_size

    def make() -> RingSchedule:
        sources = [(rank - step) % size for step in range(size)] if plan.needs_traffic else [rank]
        rows = [plan.shared_rows(source) for source in sources]
        tiles = [[], *(renumber_keys(plan.tiles(rank, s), r) for s, r in zip(sources[1:], rows[1:], strict=True))]
        steps = [RingStep(len(r), call.plan_calls(t)) for r, t in zip(rows, tiles, strict=True)]
        return RingSchedule(call.plan_calls(plan.tiles(rank, rank)), call.on_device(rows[0]), steps)

    return plan.schedule(call.schedule_key("p2p"), make)
