"""Ulysses (arXiv:2309.14509): an all-to-all trades tokens for heads: a rank gets a whole ring shard of few heads.

q, k and v travel in one all-to-all. With u = ulysses_degree and L = lcm(G, u), each K/V head is first repeated L / G
times in order; every rank then gets H / u query heads and the L / u K/V heads that these use. The backward pass of the
repetition sums the replicas' gradients.

Dimensions: n = local slots, T = n * u = slots of a ring shard, H = query heads, G = K/V heads, D = head size.
"""

from __future__ import annotations

from math import lcm

import torch

from hf_cp.parallel.collectives import all_to_all
from hf_cp.parallel.mesh import ContextParallelMesh


def tokens_to_heads(
    q: torch.Tensor,  # [n, H, D]
    k: torch.Tensor,  # [n, G, D]
    v: torch.Tensor,  # [n, G, D]
    mesh: ContextParallelMesh,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [T, H/u, D], k [T, L/u, D], v [T, L/u, D]): all slots of the ring shard, this rank's heads.

    The way back for the attention output is [`heads_to_tokens`].
    """
    size = mesh.ulysses_size
    if size == 1:
        return q, k, v
    num_kv_heads = lcm(k.shape[1], size)
    k, v = (x.repeat_interleave(num_kv_heads // x.shape[1], dim=1) for x in (k, v))
    blocks = torch.cat([_split_heads(x, size) for x in (q, k, v)], dim=2)  # [u, n, (H + 2L) / u, D]
    heads = all_to_all(blocks, mesh).flatten(0, 1)  # [T, (H + 2L) / u, D]: pieces of the shard in rank order
    return heads.split([q.shape[1] // size, num_kv_heads // size, num_kv_heads // size], dim=1)


def heads_to_tokens(out: torch.Tensor, mesh: ContextParallelMesh) -> torch.Tensor:
    """[T, H/u, D] -> [n, H, D]: the local slots, all heads; the inverse of [`tokens_to_heads`]."""
    size = mesh.ulysses_size
    if size == 1:
        return out
    blocks = all_to_all(out.unflatten(0, (size, -1)), mesh)  # [u, n, H / u, D]
    return blocks.transpose(0, 1).flatten(1, 2)


def _split_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[n, h, D] -> [size, n, h / size, D]: consecutive heads for each rank."""
    return x.unflatten(1, (size, -1)).transpose(0, 1)
