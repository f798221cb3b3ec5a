"""`allgather`: every rank gets the K/V of all documents that are on several ranks, at once.

With the keys of a document side by side, a kernel that knows bands needs one call per run of queries and nothing has
to be merged: the result is that of one process to the last bit of its softmax. Heads can be gathered in groups, the
next one while the current one is used. Gradients go home in one all-to-all and are summed where the tokens live.

Dimensions: T = slots of a ring shard, S = shared slots per rank (the most), G = K/V heads, g = G / chunks, H = query
heads, D = head size, R = ring_degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hf_cp.attention.block import BlockBackward, BlockForward, Call, in_two, kv_message
from hf_cp.attention.kernels import TileGroup
from hf_cp.attention.merge import accumulator_dtype
from hf_cp.distributed.collectives import Transfer, start_all_gather, start_return
from hf_cp.distributed.communicator import named_range


class GatherSchedule(NamedTuple):
    early_calls: list[TileGroup]  # on own keys, the first half
    late_calls: list[TileGroup]
    calls: list[TileGroup]  # on the gathered tokens
    own_slots: torch.Tensor  # int64: slots that are gathered
    order: torch.Tensor | None  # int64 [N]: where every key lies in [R * S]
    slots_per_rank: int


class Heads(NamedTuple):
    """A group of K/V heads, and the query heads that use them."""

    kv: slice
    queries: slice


class Gather:
    """All-gather in `head_chunks` groups of heads; the number must divide the K/V heads."""

    name = "allgather"

    def __init__(self, head_chunks: int = 1):
        self.head_chunks = head_chunks

    def forward(self, state: BlockForward, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        schedule = _schedule(call)
        fetched = _prefetch(k, v, self._groups(state.q, k), schedule, call)
        with named_range("hf_cp/allgather/own"):
            state.add(k, v, schedule.early_calls + schedule.late_calls)
        for heads, kv in fetched:
            with named_range("hf_cp/allgather/gathered"):
                state.heads(heads.queries).add(kv[:, 0], kv[:, 1], schedule.calls)
            del kv  # before the next group is put in order

    def backward(
        self, state: BlockBackward, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, call: Call
    ) -> None:
        schedule = _schedule(call)
        fetched = _prefetch(k, v, self._groups(state.q, k), schedule, call)
        with named_range("hf_cp/allgather/grad_own"):
            state.add(k, v, grad_kv, schedule.early_calls)  # while keys and values come
        homeward = None
        for heads, kv in fetched:
            grad = torch.zeros_like(kv, dtype=accumulator_dtype(k.dtype))  # [N, 2, g, D]
            with named_range("hf_cp/allgather/grad_gathered"):
                state.heads(heads.queries).add(kv[:, 0], kv[:, 1], grad, schedule.calls)
            if homeward is not None:
                _take_home(grad_kv, homeward, schedule)
            homeward = _start_home(heads.kv, grad, schedule, call)
            del kv, grad  # before the next group is put in order
        state.visit(schedule.calls)  # all groups of heads have
        with named_range("hf_cp/allgather/grad_own"):
            state.add(k, v, grad_kv, schedule.late_calls)  # while their gradients go
        if homeward is not None:
            _take_home(grad_kv, homeward, schedule)

    def _groups(self, q: torch.Tensor, k: torch.Tensor) -> list[Heads]:
        num_heads, num_kv_heads, chunks = q.shape[1], k.shape[1], self.head_chunks
        return [
            Heads(*(slice(i * n // chunks, (i + 1) * n // chunks) for n in (num_kv_heads, num_heads)))
            for i in range(chunks)
        ]


def _prefetch(
    k: torch.Tensor, v: torch.Tensor, groups: list[Heads], schedule: GatherSchedule, call: Call
) -> Iterator[tuple[Heads, torch.Tensor]]:
    """Gathered K/V [N, 2, g, D] of one group of heads after the other; the next group travels meanwhile.

    The first group starts now, the rest when the one before is taken. Yields nothing if nothing is shared.
    """
    if not call.plan.needs_traffic:
        return iter(())

    def start(heads: Heads) -> Transfer:
        kv = kv_message(k[:, heads.kv], v[:, heads.kv], schedule.own_slots)
        missing = schedule.slots_per_rank - len(kv)
        return start_all_gather(pad(kv, (0, 0) * 3 + (0, missing)) if missing else kv, call.comm)

    first = start(groups[0])

    def take() -> Iterator[tuple[Heads, torch.Tensor]]:
        current = first
        for heads, following in zip(groups, [*groups[1:], None], strict=True):
            gathered = [current.wait()]
            current = start(following) if following is not None else None
            yield heads, _in_order(gathered.pop(), schedule)  # no reference stays here

    return take()


def _in_order(gathered: torch.Tensor, schedule: GatherSchedule) -> torch.Tensor:
    return gathered if schedule.order is None else gathered.index_select(0, schedule.order)


class Homeward(NamedTuple):
    """Gradients of a group of K/V heads on their way to the ranks that have the tokens."""

    heads: slice
    own: torch.Tensor | None  # [S, 2, g, D], accumulator's dtype; None where own keys were used in place
    others: Transfer  # [R - 1, S, 2, g, D]


def _start_home(heads: slice, grad: torch.Tensor, schedule: GatherSchedule, call: Call) -> Homeward:
    """Sends the gradients [N, 2, g, D] of the gathered tokens home."""
    size, slots = call.ring_size, schedule.slots_per_rank
    if schedule.order is not None:
        grad = grad.new_zeros(size * slots, *grad.shape[1:]).index_copy_(0, schedule.order, grad)
    blocks = grad.view(size, slots, *grad.shape[1:])
    own = None if schedule.order is None else blocks[call.ring_rank].clone()  # a view would keep all blocks
    return Homeward(heads, own, start_return(call.as_sent(blocks), call.comm))


def _take_home(grad_kv: torch.Tensor, homeward: Homeward, schedule: GatherSchedule) -> None:
    """Adds what all ranks found for this rank's tokens to `grad_kv` [T, 2, G, D], one rank after the other."""
    slots, total = schedule.own_slots, grad_kv[:, :, homeward.heads]
    if homeward.own is not None:
        total.index_add_(0, slots, homeward.own[: len(slots)])
    for part in homeward.others.wait():
        total.index_add_(0, slots, part[: len(slots)].to(total.dtype))


def _schedule(call: Call) -> GatherSchedule:
    plan, rank = call.plan, call.ring_rank

    def make() -> GatherSchedule:
        keys = plan.gathered(rank, in_order=call.kernel.bands)
        return GatherSchedule(
            *in_two(call.kernel_calls(keys.own_tiles)),
            call.kernel_calls(keys.tiles),
            call.on_device(plan.shared_slots(rank)),
            None if keys.order is None else call.on_device(keys.order),
            keys.slots_per_rank,
        )

    return plan.schedule(call.schedule_key("allgather"), make)
