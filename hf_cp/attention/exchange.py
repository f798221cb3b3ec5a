"""`exchange`: every rank gets exactly the K/V tokens that its queries see, in one all-to-all with uneven splits.

Their gradients come back the same way and are summed where the tokens live. For one causal zigzag document
this is 75 % of what a ring moves; on packed documents that fit on a rank it is nothing.

Dimensions: T = slots of a ring shard, M = received tokens, G = K/V heads, D = head size, R = ring_degree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hf_cp.attention.block import BlockBackward, BlockForward, Call, in_two, kv_message
from hf_cp.attention.kernels import TileGroup
from hf_cp.attention.merge import accumulator_dtype
from hf_cp.distributed.collectives import Transfer, start_exchange
from hf_cp.distributed.communicator import named_range
from hf_cp.sequence.plan import renumber_keys


class ExchangeSchedule(NamedTuple):
    early_calls: list[TileGroup]  # on own keys, the first half
    late_calls: list[TileGroup]
    calls: list[TileGroup]  # on the received tokens
    sent_slots: torch.Tensor  # int64: own slots for each ring rank, one rank after the other
    sent: list[int]  # tokens to each ring rank, [R]
    received: list[int]  # tokens from each ring rank, [R]


class Exchange:
    """One uneven all-to-all of exactly the tokens that are seen."""

    name = "exchange"

    def forward(self, state: BlockForward, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        schedule = _schedule(call)
        transfer = _start_fetch(k, v, schedule, call)
        with named_range("hf_cp/exchange/own"):
            state.add(k, v, schedule.early_calls + schedule.late_calls)
        if transfer is not None:
            kv = transfer.wait()  # [M, 2, G, D]
            with named_range("hf_cp/exchange/received"):
                state.add(kv[:, 0], kv[:, 1], schedule.calls)

    def backward(
        self, state: BlockBackward, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, call: Call
    ) -> None:
        schedule = _schedule(call)
        transfer = _start_fetch(k, v, schedule, call)
        if transfer is None:
            with named_range("hf_cp/exchange/grad_own"):
                state.add(k, v, grad_kv, schedule.early_calls + schedule.late_calls)
            return
        with named_range("hf_cp/exchange/grad_own"):
            state.add(k, v, grad_kv, schedule.early_calls)  # while keys and values come
        home = _send_home(_visit(state, transfer.wait(), schedule), schedule, call)
        with named_range("hf_cp/exchange/grad_own"):
            state.add(k, v, grad_kv, schedule.late_calls)  # while they travel
        slots, parts = (x.split(schedule.sent) for x in (schedule.sent_slots, home.wait()))
        for rank_slots, part in zip(slots, parts, strict=True):
            # one rank at a time: a slot may be in several parts, and the order of the sum must not change
            grad_kv.index_add_(0, rank_slots, part.to(grad_kv.dtype))


def _start_fetch(k: torch.Tensor, v: torch.Tensor, schedule: ExchangeSchedule, call: Call) -> Transfer | None:
    """Starts to send and receive K/V; None where no document is on several ranks."""
    if not call.plan.needs_traffic:
        return None
    message = kv_message(k, v, schedule.sent_slots)
    return start_exchange(message, call.comm, sent=schedule.sent, received=schedule.received)


def _visit(state: BlockBackward, kv: torch.Tensor, schedule: ExchangeSchedule) -> torch.Tensor:
    """The gradient of the received tokens `kv`, [M, 2, G, D] both; nothing else refers to them afterwards."""
    grad = torch.zeros_like(kv, dtype=accumulator_dtype(kv.dtype))
    with named_range("hf_cp/exchange/grad_received"):
        state.add(kv[:, 0], kv[:, 1], grad, schedule.calls)
    return grad


def _send_home(grad: torch.Tensor, schedule: ExchangeSchedule, call: Call) -> Transfer:
    return start_exchange(call.as_sent(grad), call.comm, sent=schedule.received, received=schedule.sent)


def _schedule(call: Call) -> ExchangeSchedule:
    plan, rank, size = call.plan, call.ring_rank, call.ring_size

    def make() -> ExchangeSchedule:
        nothing = np.empty(0, dtype=np.int64)
        sent = [plan.kv_slots(rank, other) if other != rank else nothing for other in range(size)]
        received = [plan.kv_slots(other, rank) if other != rank else nothing for other in range(size)]
        begins = np.cumsum([0, *map(len, received)]).tolist()
        tiles = [
            tile._replace(k_start=tile.k_start + begins[other])
            for other in range(size)
            if other != rank
            for tile in renumber_keys(plan.tiles(rank, other), received[other])
        ]
        return ExchangeSchedule(
            *in_two(call.kernel_calls(plan.tiles(rank, rank))),
            call.kernel_calls(tiles),
            call.on_device(np.concatenate(sent)),
            [len(slots) for slots in sent],
            [len(slots) for slots in received],
        )

    return plan.schedule(call.schedule_key("exchange"), make)
