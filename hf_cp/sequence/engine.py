"""Which engine moves the keys of a row: the rule behind `ring_comm="auto"`.

Invariant: the choice follows from config and plan alone, so every rank, the planner and the previews make the same.
"""

from __future__ import annotations

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.plan import AttentionPlan


def choose_engine(config: ContextParallelConfig, plan: AttentionPlan) -> str:
    """The engine that `auto` stands for: the same on every rank, since it follows from config and plan alone.

    `exchange` moves the fewest rows, but holds all that it receives at once. It is taken when that is no more than the
    two shards which a relay holds, when a window keeps it short, or when dK/dV shall travel in the compute dtype (a
    relay would round their sums); `p2p` otherwise.
    """
    if config.ring_comm != "auto":
        return config.ring_comm
    is_small = plan.num_shared_tokens <= 2 * plan.layout.ring_shard_length
    is_exchange = is_small or plan.window is not None or config.grad_comm_dtype == "compute"
    return "exchange" if is_exchange else "p2p"
