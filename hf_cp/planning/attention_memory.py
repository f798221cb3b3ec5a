"""What the attention of one layer needs in memory at most: never below what is measured, at most 1.5 times it.

Whatever the engine, a rank holds at any moment

      its sums              out and log-sum-exp so far; backward: dQ, and dK/dV of its own tokens
    + tokens of others      their K/V, here or in flight, and the sums of their dK/dV
    + one kernel call       its result, and copies of slots that do not lie side by side

The bound adds the largest of each that can meet; tests/planning/test_attention_memory.py measures. A kernel's own
workspace is not counted.

Dimensions: T = slots of a ring shard, u = ulysses_degree, R = ring_degree, L = lcm(K/V heads, u).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import lcm
from typing import NamedTuple

from hf_cp.sequence.costs import AttentionShape, ring_tokens
from hf_cp.sequence.plan import AttentionPlan, GatheredKeys
from hf_cp.sequence.tiles import Tile, are_side_by_side, cut_for_causal_kernel, join_for_varlen_kernel


class PassMemory(NamedTuple):
    """Bytes of one pass on one rank: at most at once, and of that what stays (the saved tensors, or the gradients)."""

    peak: int
    kept: int

    @property
    def transient(self) -> int:
        """What is needed for a moment, besides what stays."""
        return self.peak - self.kept


class AttentionMemory(NamedTuple):
    """One attention layer on one rank; the saved tensors are not counted a second time in the backward pass."""

    forward: PassMemory
    backward: PassMemory


class _Token(NamedTuple):
    """Bytes of one slot of a ring shard, of the heads that are handled together."""

    q: int  # in the compute dtype
    q_sum: int  # in the accumulator's dtype, fp32 or wider
    lse: int
    kv: int  # K and V, in the compute dtype
    kv_sum: int  # dK and dV, in the accumulator's dtype
    kv_sent: int  # dK and dV as they travel

    @classmethod
    def of(cls, shape: AttentionShape, parts: int, kv_heads: int) -> _Token:
        """Of H / `parts` query heads; K/V heads are replicated to `kv_heads` before they are divided."""
        q, kv = shape.num_heads * shape.head_dim // parts, 2 * kv_heads * shape.head_dim // parts
        b, total = shape.itemsize, max(4, shape.itemsize)
        return cls(q * b, q * total, shape.num_heads // parts * total, kv * b, kv * total, kv * shape.grad_itemsize)


class _Calls(NamedTuple):
    """Bytes beside the sums of the largest kernel call, in both passes."""

    forward: int
    backward: int

    @classmethod
    def of(cls, tiles: Sequence[Tile], token: _Token, *, bands: bool, queries: int = 0) -> _Calls:
        """A kernel with bands takes many tiles a call, any other one causal square or rectangle.

        The result of a first call on all `queries` of the shard is the sum itself, if it need not be cast.
        """
        if bands:
            groups = join_for_varlen_kernel(tiles)
        else:
            groups = [[part] for tile in tiles for part in cut_for_causal_kernel(tile)]
        calls = [cls._of_call(group, token, reverses=not bands and group[0].left == 0) for group in groups]
        if len(groups) == 1 and sum(tile.q_len for tile in groups[0]) == queries:
            return calls[0]._replace(forward=(token.q != token.q_sum) * queries * token.q)
        return _largest(calls)

    @classmethod
    def _of_call(cls, group: Sequence[Tile], token: _Token, *, reverses: bool) -> _Calls:
        """`reverses`: a mirrored causal square takes its slots in reverse order, and its result is put back."""
        q_num, k_num = sum(tile.q_len for tile in group), sum(tile.k_len for tile in group)
        casts = token.q != token.q_sum
        copies_q, copies_k = (
            reverses or not are_side_by_side([getattr(tile, name) for tile in group])
            for name in ("q_slots", "k_slots")
        )
        result, copies = q_num * (token.q + token.lse), copies_q * q_num * token.q + copies_k * k_num * token.kv
        # added to the sums: in their dtype, with the weights of both (and numbered slots are taken out of the sums)
        merged = q_num * (casts * token.q_sum + 2 * token.lse + copies_q * (token.q_sum + token.lse))
        forward = result + max(copies + reverses * result, merged)
        grads = q_num * token.q + k_num * token.kv
        copies += (
            copies_q * q_num * (2 * token.q + token.lse) + reverses * grads
        )  # out and dO too, and the result back
        added = max((casts or copies_q) * q_num * token.q_sum, copies_k * k_num * token.kv_sum // 2)
        # copies are gone when the sums are added to
        return cls(forward, grads + q_num * token.lse + max(copies, added))


def attention_memory(
    shape: AttentionShape,
    plan: AttentionPlan,
    ring_rank: int,
    ring_comm: str,
    *,
    head_chunks: int = 1,
    bands: bool = True,
) -> AttentionMemory:
    """An upper bound of the memory of one attention layer.

    Args:
        shape (`AttentionShape`): the layer.
        plan (`AttentionPlan`): of the packed sample.
        ring_rank (`int`): whose memory.
        ring_comm (`str`): `p2p`, `exchange` or `allgather`.
        head_chunks (`int`): head groups as in the config: of the all-gather where it is alone, else of Ulysses.
        bands (`bool`): the kernel takes bands, and many tiles a call (those for GPUs); else one tile (`sdpa` on CPU).
    """
    layout = plan.layout
    gather_chunks = head_chunks if layout.ulysses_degree == 1 and ring_comm == "allgather" else 1
    chunks = head_chunks // gather_chunks
    kv_heads = lcm(shape.num_kv_heads, layout.ulysses_degree)
    token = _Token.of(shape, layout.ulysses_degree * chunks, kv_heads)

    during = _during(plan, ring_rank, ring_comm, token, bands=bands, head_groups=gather_chunks)
    length, casts = layout.ring_shard_length, token.q != token.q_sum
    saved, grads = length * (token.q + token.lse), length * (token.q + token.kv)
    # at the end the sums are cast, and both exist; the backward pass has the numbers (int64) of the slots that travel
    numbers = 8 * length if plan.needs_traffic else 0
    forward = length * (token.q_sum + token.lse) + max(during.forward, casts * length * token.q)
    backward = length * (token.q_sum + token.kv_sum) + numbers + max(during.backward, casts * grads)
    memory = AttentionMemory(PassMemory(forward, saved), PassMemory(backward, grads))
    return memory if layout.ulysses_degree == chunks == 1 else _with_ulysses(memory, shape, plan, token, chunks)


def _during(plan: AttentionPlan, rank: int, ring_comm: str, token: _Token, *, bands: bool, head_groups: int) -> _Calls:
    """What is held beside the sums: tokens of others, and a kernel call."""

    def calls(tiles: Iterable[Tile], *, come_first: bool = False) -> _Calls:
        queries = plan.layout.ring_shard_length if come_first else 0
        return _Calls.of(list(tiles), token, bands=bands, queries=queries)

    if not plan.needs_traffic:
        return calls(plan.tiles(rank, rank), come_first=True)
    if ring_comm == "allgather":
        keys = plan.gathered(rank, in_order=bands)
        return _all_gather(keys, plan.layout.ring_degree, token, calls, head_groups)
    return {"p2p": _ring, "exchange": _exchange}[ring_comm](plan, rank, token, calls)


def _ring(plan: AttentionPlan, rank: int, token: _Token, calls: Callable[..., _Calls]) -> _Calls:
    """Two shards of K/V, one here and one that comes; of their sums up to three: made here, leaving and coming.

    With R = 2 there is one hop: nothing else comes while the other shard is here.
    """
    size = plan.layout.ring_degree
    own = calls(plan.tiles(rank, rank), come_first=True)
    far = _largest(calls(plan.tiles(rank, other)) for other in range(size) if other != rank)
    shard, following = max(len(plan.shared_slots(source)) for source in range(size)), size > 2
    kv, kv_sum = shard * token.kv, shard * token.kv_sum
    visit = (1 + following) * kv + (1 + 2 * following) * kv_sum + far.backward
    return _Calls(2 * kv + max(own.forward, far.forward), max(2 * kv + own.backward, visit, 2 * kv_sum))


def _exchange(plan: AttentionPlan, rank: int, token: _Token, calls: Callable[..., _Calls]) -> _Calls:
    """All that is received at once, and its sums; what is sent is a copy, made of one of K and one of V."""
    others = [other for other in range(plan.layout.ring_degree) if other != rank]
    sent, received = ring_tokens(plan, rank, "exchange")
    own = calls(plan.tiles(rank, rank), come_first=True)
    far = calls(tile for other in others for tile in plan.tiles(rank, other))
    fetch, visit = max(2 * sent, sent + received) * token.kv, received * (token.kv + token.kv_sum)
    leaving = received * (token.kv_sum + (token.kv_sent != token.kv_sum) * token.kv_sent)
    home = max(leaving + sent * token.kv_sent, (sent + received) * token.kv_sent + own.backward)
    return _Calls(
        max(fetch + own.forward, received * token.kv + far.forward),
        max(fetch + own.backward, visit + far.backward, home),
    )


def _all_gather(
    keys: GatheredKeys, size: int, token: _Token, calls: Callable[..., _Calls], head_groups: int
) -> _Calls:
    """The shards of all ranks at once, of one head group; with several, the next one's are on their way.

    Kernels with bands get a copy in the order of the documents (`order`).
    """
    kv, kv_sum, kv_sent = (b // head_groups for b in (token.kv, token.kv_sum, token.kv_sent))
    sent, arrived, several = keys.slots_per_rank, keys.slots_per_rank * size, head_groups > 1
    ordered = 0 if keys.order is None else len(keys.order)
    used, fetch, order = ordered or arrived, (sent + arrived) * kv, (ordered > 0) * (arrived + ordered) * kv
    own, far = calls(keys.own_tiles, come_first=True), calls(keys.tiles)
    visit = several * fetch + used * (kv + kv_sum)
    # dK/dV go home: as they are added up, in the order of the ranks, as they travel; those of own tokens come
    leaving = (ordered > 0) * (arrived + 2 * sent) * kv_sum + (kv_sent != kv_sum) * arrived * kv_sent
    home = (2 * arrived - sent) * kv_sent + sent * kv_sum
    return _Calls(
        max(fetch + own.forward, several * fetch + max(order, used * kv + far.forward // head_groups)),
        max(
            max(fetch, home) + own.backward,
            visit + several * home + far.backward // head_groups,
            visit + leaving + (arrived - sent) * kv_sent,
        ),
    )


def _largest(calls: Iterable[_Calls]) -> _Calls:
    """Of each pass; nothing without calls."""
    return _Calls(*(max(sizes) for sizes in zip((0, 0), *calls, strict=True)))


def _with_ulysses(
    inner: AttentionMemory, shape: AttentionShape, plan: AttentionPlan, token: _Token, chunks: int
) -> AttentionMemory:
    """Attention of one head group after the other, between two all-to-alls.

    What arrives (`group`: q, k and v) is saved, and so is the attention's output (`out`). With several groups the next
    one is on its way while one is used, sent and arriving, and the output of the one before leaves.
    """
    layout, several = plan.layout, chunks > 1
    sends = layout.ulysses_degree > 1
    group, out = (layout.ring_shard_length * size for size in (token.q + token.kv, token.q))
    local = layout.local_length * shape.head_dim * shape.itemsize  # of one head
    kv_heads = lcm(shape.num_kv_heads, layout.ulysses_degree)
    replicas = 2 * kv_heads * local if kv_heads > shape.num_kv_heads else 0
    result, grads = shape.num_heads * local, (shape.num_heads + 2 * shape.num_kv_heads) * local
    in_flight = several * (sends + 1) * group
    kept = result + chunks * (group + inner.forward.kept)
    forward = replicas + kept + max(in_flight, sends * max(group, out)) + inner.forward.transient
    gathered = (shape.num_heads + 2 * kv_heads) * local  # the gradients of all head groups
    ahead = in_flight + 2 * several * sends * out
    during = (chunks > 2) * gathered + ahead + max(sends * out + inner.backward.peak, 2 * group)
    backward = max(during, gathered + (1 + several) * group + 2 * several * sends * out)
    return AttentionMemory(PassMemory(forward, kept), PassMemory(backward, grads))
