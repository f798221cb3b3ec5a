"""What attention costs in bytes and floating-point operations: one formula each, checked against counters in tests.

Dimensions: n = local slots of a rank, H = query heads, G = K/V heads, D = head size, u = ulysses_degree, R =
ring_degree, L = lcm(G, u) K/V heads after replication. Bytes are those that leave one rank in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.plan import AttentionPlan

BACKWARD_FLOPS = 2.5  # five matrix products instead of two


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer.

    Args:
        num_heads, num_kv_heads, head_dim (`int`): H, G and D.
        itemsize (`int`): bytes of an element of q, k and v.
        grad_itemsize (`int`): bytes of an element of dK/dV on the ring axis.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2
    grad_itemsize: int = 4


def ulysses_bytes(shape: AttentionShape, *, local_length: int, ulysses_degree: int) -> int:
    """One pass, forward or backward: q, k, v there and out back (or their gradients), (u - 1) / u of each leaves.

    n D (2H + 2L) (u - 1) / u elements.
    """
    heads = 2 * shape.num_heads + 2 * lcm(shape.num_kv_heads, ulysses_degree)
    return local_length * shape.head_dim * heads * (ulysses_degree - 1) // ulysses_degree * shape.itemsize


def ring_tokens(plan: AttentionPlan, ring_rank: int, ring_comm: str) -> tuple[int, int]:
    """(tokens of K/V in one pass, tokens of dK/dV in the backward pass) that `ring_rank` sends.

    A ring passes on every shard but the next rank's, and every sum but its own; an all-gather sends the rank's own
    (padded) tokens to all others; an exchange sends what others see, and the gradients of what it saw itself.
    """
    size = plan.layout.ring_degree
    if not plan.needs_traffic:
        return 0, 0
    if ring_comm == "exchange":
        others = [rank for rank in range(size) if rank != ring_rank]
        sent, seen = (sum(len(plan.kv_slots(*pair)) for pair in pairs) for pairs in (
            [(ring_rank, other) for other in others], [(other, ring_rank) for other in others]
        ))  # fmt: skip
        return sent, seen
    shared = [len(plan.shared_slots(rank)) for rank in range(size)]
    if ring_comm == "allgather":
        return max(shared) * (size - 1), max(shared) * (size - 1)
    if ring_comm == "p2p":
        return sum(shared) - shared[(ring_rank + 1) % size], sum(shared) - shared[ring_rank]
    raise ValueError(f"ring_comm={ring_comm!r} has no formula here. Resolve `auto` with choose_engine first.")


def ring_bytes(shape: AttentionShape, plan: AttentionPlan, ring_rank: int, ring_comm: str) -> tuple[int, int]:
    """(forward, backward): tokens of 2 D L / u elements; K/V travel in both passes, dK/dV in the backward pass."""
    token = token_elements(shape, plan.layout.ulysses_degree)
    kv_tokens, grad_tokens = ring_tokens(plan, ring_rank, ring_comm)
    forward = token * kv_tokens * shape.itemsize
    return forward, forward + token * grad_tokens * shape.grad_itemsize


def token_elements(shape: AttentionShape, ulysses_degree: int) -> int:
    """Of a token's K and V, or dK and dV, on the ring axis: 2 D L / u."""
    return 2 * shape.head_dim * lcm(shape.num_kv_heads, ulysses_degree) // ulysses_degree


def attention_flops(shape: AttentionShape, area: int) -> tuple[float, float]:
    """(forward, backward) of `area` visible (query, key) pairs: two products of 2 D operations per head and pair."""
    forward = 4.0 * shape.head_dim * shape.num_heads * area
    return forward, BACKWARD_FLOPS * forward


def choose_engine(config: ContextParallelConfig, plan: AttentionPlan) -> str:
    """The engine that `ring_comm="auto"` stands for; it follows from config and attention plan, so all ranks agree.

    `exchange` moves the fewest K/V tokens, but holds all that it receives at once. It is taken when that is no more
    than the two shards which a ring (`p2p`) holds, when a window keeps it short, or when dK/dV are to travel in the
    compute dtype (a ring would round their sums at every hop); `p2p` otherwise.
    """
    if config.ring_comm != "auto":
        return config.ring_comm
    is_small = plan.num_shared_tokens <= 2 * plan.layout.ring_shard_length
    is_exchange = is_small or plan.window is not None or config.grad_comm_dtype == "compute"
    return "exchange" if is_exchange else "p2p"
