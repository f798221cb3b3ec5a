"""`p2p`: ring attention (arXiv:2310.01889). K/V travel around the ring while each rank works on what it holds.

At step s, ring rank r holds the K/V of rank r - s; the next ones are on their way meanwhile. Only tokens of documents
that are on several ranks travel. Forward: R - 1 hops of K/V. Backward: R - 1 hops of K/V again, and R - 1 hops of the
sums of dK/dV: the sum for shard c starts on rank c + 1, passes every other rank and comes home, where that rank's own
part (which never travels) is waiting. With R = 3, the shard that each rank works on, and the sum that it passes on:

    step                0         1         2         home
    rank 0 / 1 / 2      0 1 2     2 0 1     1 2 0
    dK/dV sent on                 2 0 1     1 2 0     0 1 2

Dimensions: T = slots of a ring shard, S = shared slots of a shard (their documents are on other ranks too), G = K/V
heads, D = head size, R = ring_degree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_cp.attention.block import BlockBackward, BlockForward, Call, kv_message
from hf_cp.attention.kernels import TileGroup
from hf_cp.attention.merge import accumulator_dtype
from hf_cp.distributed.collectives import Transfer, start_hop
from hf_cp.distributed.communicator import named_range
from hf_cp.sequence.plan import renumber_keys

KV_TAG, GRAD_TAG = 0, 1


class RingStep(NamedTuple):
    """The shared slots of the shard that is here in one step, and the kernel calls on them."""

    num_slots: int
    calls: list[TileGroup]


class RingSchedule(NamedTuple):
    own_calls: list[TileGroup]
    own_slots: torch.Tensor  # int64: slots that travel
    steps: list[RingStep]  # step s has the shard of rank r - s; the first is its own, without calls


class Ring:
    """Ring attention: point-to-point hops."""

    name = "p2p"

    def forward(self, state: BlockForward, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        schedule = _schedule(call)
        kv = kv_message(k, v, schedule.own_slots) if len(schedule.steps) > 1 else None  # [S, 2, G, D]
        for step, (_, calls) in enumerate(schedule.steps):
            next_kv = _next(kv, step, schedule, call)
            with named_range(f"hf_cp/ring/step{step}"):
                if step == 0:
                    state.add(k, v, schedule.own_calls)
                else:
                    state.add(kv[:, 0], kv[:, 1], calls)
            kv = next_kv.wait() if next_kv is not None else None

    def backward(
        self, state: BlockBackward, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, call: Call
    ) -> None:
        schedule = _schedule(call)
        kv = kv_message(k, v, schedule.own_slots) if len(schedule.steps) > 1 else None
        grad_hop = None
        for step, (num_slots, calls) in enumerate(schedule.steps):
            next_kv = _next(kv, step, schedule, call)
            if step == 0:
                with named_range("hf_cp/ring/grad_step0"):
                    state.add(k, v, grad_kv, schedule.own_calls)
            else:
                visiting = torch.zeros((num_slots, *kv.shape[1:]), dtype=accumulator_dtype(k.dtype), device=k.device)
                with named_range(f"hf_cp/ring/grad_step{step}"):
                    state.add(kv[:, 0], kv[:, 1], visiting, calls)
                kv = None  # used up: let go of it before the hop below needs a buffer
                if grad_hop is not None:
                    visiting += grad_hop.wait()  # what the ranks before this one found for the same shard
                next_length = schedule.steps[(step + 1) % len(schedule.steps)].num_slots
                grad_hop = start_hop(visiting, call.comm, received_length=next_length, tag=GRAD_TAG)
            kv = next_kv.wait() if next_kv is not None else None
        if grad_hop is not None:
            grad_kv.index_add_(0, schedule.own_slots, grad_hop.wait())


def _next(kv: torch.Tensor | None, step: int, schedule: RingSchedule, call: Call) -> Transfer | None:
    """Starts to move the K/V on, unless this is the last step."""
    if step + 1 == len(schedule.steps):
        return None
    return start_hop(kv, call.comm, received_length=schedule.steps[step + 1].num_slots, tag=KV_TAG)


def _schedule(call: Call) -> RingSchedule:
    plan, rank, size = call.plan, call.ring_rank, call.ring_size

    def make() -> RingSchedule:
        sources = [(rank - step) % size for step in range(size)] if plan.needs_traffic else [rank]
        shared = [plan.shared_slots(source) for source in sources]
        tiles = [[], *(renumber_keys(plan.tiles(rank, s), r) for s, r in zip(sources[1:], shared[1:], strict=True))]
        steps = [RingStep(len(r), call.kernel_calls(t)) for r, t in zip(shared, tiles, strict=True)]
        return RingSchedule(call.kernel_calls(plan.tiles(rank, rank)), call.on_device(shared[0]), steps)

    return plan.schedule(call.schedule_key("p2p"), make)
