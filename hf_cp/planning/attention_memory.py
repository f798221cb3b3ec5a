"""What the attention of one layer holds in memory: one formula per buffer, checked against counters in tests.

A pass is a list of phases. A phase is the time between two changes of the large buffers, with the largest kernel call
in it; the peak of the pass is the largest phase. Counted are tensors; a kernel's own workspace is not.

Dimensions: n = local slots of a rank, T = n u = slots of a ring shard, S = shared rows of a shard, H = query heads,
G = K/V heads, D = head size, u = ulysses_degree, R = ring_degree, L = lcm(G, u), c = groups of heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np

from hf_cp.sequence.costs import AttentionShape
from hf_cp.sequence.plan import AttentionPlan, renumber_keys
from hf_cp.sequence.tiles import Tile, are_side_by_side, cut_for_causal_kernel, join_for_varlen_kernel


@dataclass(frozen=True)
class PassMemory:
    """Bytes that one pass of one attention layer makes on one rank.

    Args:
        peak (`int`): the most that exist at once, results included.
        kept (`int`): results: the output and what is saved for the backward pass, or the gradients of q, k and v.
    """

    peak: int
    kept: int

    @property
    def transient(self) -> int:
        """What is needed for a moment, besides what stays."""
        return self.peak - self.kept


@dataclass(frozen=True)
class AttentionMemory:
    """One attention layer on one rank; the saved tensors are not counted a second time in the backward pass."""

    forward: PassMemory
    backward: PassMemory


def attention_memory(
    shape: AttentionShape,
    plan: AttentionPlan,
    ring_rank: int,
    ring_comm: str,
    *,
    head_chunks: int = 1,
    bands: bool = False,
) -> AttentionMemory:
    """The memory of one attention layer.

    Args:
        shape (`AttentionShape`): the layer.
        plan (`AttentionPlan`): the row.
        ring_rank (`int`): whose memory.
        ring_comm (`str`): `p2p`, `exchange` or `allgather`.
        head_chunks (`int`): groups of heads as in the config: of the all-gather where it is alone, else of Ulysses.
        bands (`bool`): the kernel takes bands, and many tiles a call (those for GPUs); else one tile (`sdpa` on CPU).
    """
    degree = plan.layout.ulysses_degree
    gather_chunks = head_chunks if degree == 1 and ring_comm == "allgather" else 1
    chunks = head_chunks // gather_chunks
    row = RowBytes.of(shape, degree, chunks)
    phases = {"p2p": _RingMemory, "exchange": _ExchangeMemory, "allgather": _GatherMemory}[ring_comm]
    rank = phases(plan, ring_rank, row, bands, gather_chunks)
    memory = AttentionMemory(rank.forward(), rank.backward())
    return memory if degree == chunks == 1 else _with_ulysses(memory, shape, plan, row, chunks)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row of a ring shard, of the heads that are handled together."""

    q: int  # h D elements in the compute dtype, h = H / (u c)
    q_sum: int  # in the accumulator's dtype
    lse: int  # h, in the accumulator's dtype
    kv: int  # 2 g D elements in the compute dtype, g = L / (u c)
    kv_sum: int  # in the accumulator's dtype
    kv_wire: int  # dK/dV as they travel

    @classmethod
    def of(cls, shape: AttentionShape, degree: int, chunks: int) -> RowBytes:
        sums, parts = max(4, shape.itemsize), degree * chunks
        q = shape.num_heads * shape.head_dim // parts
        kv = 2 * lcm(shape.num_kv_heads, degree) * shape.head_dim // parts
        lse = shape.num_heads // parts * sums
        return cls(q * shape.itemsize, q * sums, lse, kv * shape.itemsize, kv * sums, kv * shape.grad_itemsize)

    @property
    def casts(self) -> bool:
        """Whether sums have another dtype than what is computed with."""
        return self.q != self.q_sum


Group = Sequence[Tile]  # what one kernel call computes


@dataclass
class _Calls:
    """The kernel calls of a pass in their order, one phase after the other: the largest extra of each."""

    row: RowBytes
    bands: bool  # else a mirrored square needs its rows in reverse order
    num_queries: int
    visited: np.ndarray = field(init=False)

    def __post_init__(self):
        self.visited = np.zeros(self.num_queries, dtype=bool)

    def forward(self, groups: Sequence[Group], *, by_heads: bool = False) -> int:
        """Bytes beside the sums; `by_heads`: the sums exist before the first call."""
        return max((self._forward(group, by_heads) for group in groups), default=0)

    def backward(self, groups: Sequence[Group], *, by_heads: bool = False) -> int:
        """Bytes beside the sums of dQ, dK and dV."""
        return max((self._backward(group, by_heads) for group in groups), default=0)

    def _sizes(self, group: Group) -> tuple[int, int, bool, bool, bool]:
        """(queries, keys, whether their rows are copied, whether this is the first call on the queries)."""
        is_first = not any(self.visited[tile.q_slots].any() for tile in group)
        for tile in group:
            self.visited[tile.q_slots] = True
        q_copied, k_copied = (
            not are_side_by_side([getattr(tile, name) for tile in group]) for name in ("q_slots", "k_slots")
        )
        return sum(t.q_len for t in group), sum(t.k_len for t in group), q_copied, k_copied, is_first

    def _forward(self, group: Group, by_heads: bool) -> int:
        row, before = self.row, self.visited.any()
        q_num, k_num, q_copied, k_copied, is_first = self._sizes(group)
        copies = q_copied * q_num * row.q + k_copied * k_num * row.kv
        if not self.bands and group[0].left == 0:  # a mirrored square: rows in reverse order, and the result back
            copies = q_num * (2 * row.q + row.lse) + k_num * row.kv
        if is_first and q_num == self.num_queries and not by_heads:  # the result as it is
            return copies + row.casts * q_num * row.q
        if not before and not by_heads:  # the sums do not exist yet while the copies do
            copies -= self.num_queries * (row.q_sum + row.lse)
        out = q_num * (row.q + row.lse)
        cast = row.casts * q_num * row.q_sum
        merge = 0 if is_first else q_num * row.lse + q_copied * q_num * (row.q_sum + row.lse)
        return out + max(copies, cast + merge)

    def _backward(self, group: Group, by_heads: bool) -> int:
        row, (q_num, k_num, q_copied, k_copied, is_first) = self.row, self._sizes(group)
        copies = q_copied * q_num * (3 * row.q + row.lse) + k_copied * k_num * row.kv
        if not self.bands and group[0].left == 0:
            copies = q_num * (4 * row.q + row.lse) + k_num * 2 * row.kv
        adding_k = k_copied * k_num * row.kv_sum // 2  # numbered rows are taken out, added to, and put back
        if is_first and q_num == self.num_queries and not by_heads:
            return copies + row.casts * q_num * row.q + k_num * row.kv + adding_k
        adding_q = (row.casts if is_first else q_copied) * q_num * row.q_sum
        return copies + q_num * row.q + k_num * row.kv + max(adding_q, adding_k)


@dataclass
class _EngineMemory:
    """What the engines share; lengths in rows, results in bytes."""

    plan: AttentionPlan
    rank: int
    row: RowBytes
    bands: bool
    gather_chunks: int

    @property
    def length(self) -> int:
        return self.plan.layout.ring_shard_length

    def forward(self) -> PassMemory:
        sums = self.length * (self.row.q_sum + self.row.lse)
        out = self.length * self.row.q
        start, phases = self.forward_phases(self._calls())
        return PassMemory(max(start, sums + max(*phases, self.row.casts * out)), out + self.length * self.row.lse)

    def backward(self) -> PassMemory:
        grad_q, grad_kv = self.length * self.row.q_sum, self.length * self.row.kv_sum
        grads = self.length * (self.row.q + self.row.kv)
        start, phases = self.backward_phases(self._calls())
        return PassMemory(max(start + grad_kv, grad_q + grad_kv + max(*phases, self.row.casts * grads)), grads)

    def _calls(self) -> _Calls:
        return _Calls(self.row, self.bands, self.length)

    def forward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        """(bytes before the sums exist, bytes beside the sums in each phase)."""
        raise NotImplementedError

    def backward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        """(bytes before grad_q exists, bytes beside the sums in each phase)."""
        raise NotImplementedError

    def groups(self, tiles: Iterable[Tile]) -> list[Group]:
        """The kernel calls that compute `tiles`."""
        if self.bands:
            return join_for_varlen_kernel(tiles)
        return [[part] for tile in tiles for part in cut_for_causal_kernel(tile)]

    def own_halves(self, tiles: Sequence[Tile], *, is_whole: bool) -> tuple[list[Group], list[Group]]:
        """Calls on own keys before and after the others, halved by work as in the engines; or all before."""
        groups = self.groups(tiles)
        work = np.cumsum([sum(tile.area for tile in group) for group in groups])
        split = len(groups) if is_whole or not groups else int(np.searchsorted(work, work[-1] / 2))
        return groups[:split], groups[split:]


class _RingMemory(_EngineMemory):
    """Two shards of K/V at a time; in the backward pass up to three of sums: made, leaving and coming."""

    def _steps(self) -> tuple[list[int], list[list[Group]]]:
        """(S of the shard that is here, the calls on it) in each step."""
        size = self.plan.layout.ring_degree if self.plan.needs_traffic else 1
        sources = [(self.rank - step) % size for step in range(size)]
        rows = [self.plan.shared_slots(source) for source in sources]
        far = [renumber_keys(self.plan.tiles(self.rank, s), r) for s, r in zip(sources[1:], rows[1:], strict=True)]
        calls = [self.groups(tiles) for tiles in (self.plan.tiles(self.rank, self.rank), *far)]
        return [len(r) for r in rows] if size > 1 else [0], calls

    def forward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        rows, calls_of = self._steps()
        return 2 * rows[0] * self.row.kv, [
            sum(rows[step : step + 2]) * self.row.kv + calls.forward(calls_of[step]) for step in range(len(rows))
        ]

    def backward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        rows, calls_of = self._steps()
        phases = []
        for step in range(len(rows)):
            kv = sum(rows[step : step + 2]) * self.row.kv
            visiting = rows[step] if step else 0
            in_flight = rows[step - 1] + rows[step] if step > 1 else 0
            phases.append(kv + (visiting + in_flight) * self.row.kv_sum + calls.backward(calls_of[step]))
            if step:  # the sum leaves, and the next one comes
                ahead = [*rows[1:], 0, rows[0]]
                phases.append(ahead[step] * self.row.kv + (rows[step] + (rows[1:] + rows[:1])[step]) * self.row.kv_sum)
        return 2 * rows[0] * self.row.kv, phases


class _ExchangeMemory(_EngineMemory):
    """All received rows at once, and in the backward pass their sums."""

    def _schedule(self) -> tuple[int, int, list[Group]]:
        """(sent rows, received rows, calls on these)."""
        if not self.plan.needs_traffic:
            return 0, 0, []
        others = [rank for rank in range(self.plan.layout.ring_degree) if rank != self.rank]
        sent = sum(len(self.plan.kv_slots(self.rank, other)) for other in others)
        begin, tiles = 0, []
        for other in others:
            rows = self.plan.kv_slots(other, self.rank)
            part = renumber_keys(self.plan.tiles(self.rank, other), rows)
            tiles += [tile._replace(k_start=tile.k_start + begin) for tile in part]
            begin += len(rows)
        return sent, begin, self.groups(tiles)

    def forward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        sent, received, far = self._schedule()
        own = self.groups(self.plan.tiles(self.rank, self.rank))
        return 2 * sent * self.row.kv, [
            (sent + received) * self.row.kv + calls.forward(own),
            received * self.row.kv + calls.forward(far),
        ]

    def backward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        (sent, received, far), row = self._schedule(), self.row
        own = self.plan.tiles(self.rank, self.rank)
        early, late = self.own_halves(own, is_whole=not self.plan.needs_traffic)
        wire_copy = received * row.kv_wire if row.kv_wire != row.kv_sum else 0
        home = (sent + received) * row.kv_wire
        return max(2 * sent, sent + received) * row.kv, [
            (sent + received) * row.kv + calls.backward(early) if early else 0,
            received * (row.kv + row.kv_sum) + calls.backward(far),
            received * row.kv_sum + wire_copy + sent * row.kv_wire,
            home + calls.backward(late),
        ]


class _GatherMemory(_EngineMemory):
    """The shared rows of all shards, of one group of heads, and those of the next group that are on their way."""

    def _sizes(self) -> tuple[int, int, int, list[Tile], list[Tile]]:
        """(rows that this rank sends, that arrive, that are put in order; own tiles, far tiles)."""
        if not self.plan.needs_traffic:
            return 0, 0, 0, self.plan.tiles(self.rank, self.rank), []
        keys = self.plan.gathered(self.rank, in_order=self.bands)
        arrived = keys.slots_per_rank * self.plan.layout.ring_degree
        return keys.slots_per_rank, arrived, 0 if keys.order is None else len(keys.order), keys.own_tiles, keys.tiles

    def forward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        (sent, arrived, ordered, own, far), groups = self._sizes(), self.gather_chunks
        own, far = self.groups(own), self.groups(far)
        kv = self.row.kv // groups
        in_flight, order = (sent + arrived) * kv, (arrived + ordered) * kv if ordered else 0
        following = in_flight if groups > 1 else 0
        start = max(2 * sent * kv, in_flight, following + order)  # without own calls, before the sums exist
        phases = [in_flight + calls.forward(own)] if own else []
        if own or groups > 1:
            phases.append((groups > 2 or bool(own)) * following + order)
        return start, [*phases, following + (ordered or arrived) * kv + calls.forward(far, by_heads=True) // groups]

    def backward_phases(self, calls: _Calls) -> tuple[int, list[int]]:
        (sent, arrived, ordered, own, far), groups, row = self._sizes(), self.gather_chunks, self.row
        kv, kv_sum, kv_wire = (x // groups for x in (row.kv, row.kv_sum, row.kv_wire))
        early, late = self.own_halves(own, is_whole=not self.plan.needs_traffic)
        far = self.groups(far)
        used, in_flight = ordered or arrived, (sent + arrived) * kv
        own_sums = sent * kv_sum if ordered else 0
        home = (2 * arrived - sent) * kv_wire + own_sums  # what goes and what comes; own rows do not travel
        copies = arrived * kv_sum * (ordered > 0) + (arrived * kv_wire if row.kv_wire != row.kv_sum else 0)
        leaving = used * kv_sum + copies + own_sums + (arrived - sent) * kv_wire
        phases = [in_flight + calls.backward(early)] if early else []
        far_calls = calls.backward(far, by_heads=True) // groups
        for group in range(groups):
            following = in_flight if group + 1 < groups else 0
            before = home if group else 0
            phases += [
                following + before + used * (kv + kv_sum) + far_calls,
                following + used * kv + leaving + own_sums * (group > 0),
            ]
            if ordered and (group or early):  # else the sums do not exist yet
                phases.append(following + before + (arrived + ordered) * kv)
        order = in_flight * (groups > 1) + (arrived + ordered) * kv if ordered else 0
        return max(2 * sent * kv, in_flight, order), [*phases, home + calls.backward(late)]


def _with_ulysses(
    inner: AttentionMemory, shape: AttentionShape, plan: AttentionPlan, row: RowBytes, chunks: int
) -> AttentionMemory:
    """Attention of one group of heads after the other, between two all-to-alls.

    With b = T (q + k + v) and o = T q bytes of a group: the next group (b) is on its way while one is used, and the
    output of the one before (o) leaves. What arrives is saved, and so is the attention's output.
    """
    layout = plan.layout
    trades = layout.ulysses_degree > 1
    length = layout.ring_shard_length
    trade, out = length * (row.q + row.kv), length * row.q
    local = layout.local_length * shape.head_dim * shape.itemsize
    heads = lcm(shape.num_kv_heads, layout.ulysses_degree)
    replicas = 2 * heads * local if heads > shape.num_kv_heads else 0
    result, grads = shape.num_heads * local, (shape.num_heads + 2 * shape.num_kv_heads) * local
    saved = trade + inner.forward.kept
    sent, left = trade * trades, out * trades  # what arrives is saved; the output is sent from where it is saved
    during = [
        group * saved + trade + (sent + trade) * (group + 1 < chunks) + left * (group > 0) + attention
        for group in range(chunks)
        for attention in (inner.forward.peak, inner.forward.kept + left)
    ]
    forward = PassMemory(
        replicas + result + max(sent + trade, chunks * saved + left, *during), result + chunks * saved
    )
    gathered = (shape.num_heads + 2 * heads) * local
    phases = [gathered + trade, gathered + (2 * shape.num_kv_heads * local if replicas else 0)]
    for group in range(chunks):  # the last group is the first
        buffers = gathered if group + 2 < chunks else 0
        behind = (sent + trade) * (group + 1 < chunks)  # gradients of the group before are on their way home
        ahead = 2 * left * (group > 0)  # those of the next group's output come
        phases.append(buffers + behind + ahead + left + inner.backward.peak)
        phases.append(buffers + behind + ahead + 2 * trade)  # gradients of q, k and v are put side by side
        phases.append(gathered * (group + 1 < chunks) + ahead + trade + max(trade, sent))
    return AttentionMemory(forward, PassMemory(max(phases), grads))
