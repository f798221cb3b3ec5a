"""Ulysses (arXiv:2309.14509): an all-to-all trades tokens for heads: a rank gets a whole ring shard of few heads.

q, k and v travel in one all-to-all. With u = ulysses_degree and L = lcm(G, u), each K/V head is first repeated L / G
times in order; every rank then gets H / u query heads and the L / u K/V heads that these use. The backward pass of the
repetition sums the replicas' gradients.

A rank's heads can be handled in `chunks` groups, one after another (Untied Ulysses, arXiv:2602.21196): what is in
flight shrinks to 1 / chunks, and the next group travels while the current one is used, in both directions.

Dimensions: n = local slots, T = n * u = slots of a ring shard, H = query heads, G = K/V heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch

from hf_cp.parallel.collectives import finish_all_to_all, start_all_to_all
from hf_cp.parallel.mesh import ContextParallelMesh

HeadsAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_by_heads(
    q: torch.Tensor,  # [n, H, D]
    k: torch.Tensor,  # [n, G, D]
    v: torch.Tensor,  # [n, G, D]
    attend: HeadsAttention,  # (q [T, h, D], k [T, g, D], v [T, g, D]) -> [T, h, D]
    mesh: ContextParallelMesh,
    chunks: int = 1,
) -> torch.Tensor:  # [n, H, D]
    """Runs `attend` on whole ring shards, this rank's heads, `chunks` groups of them one after another."""
    size = mesh.ulysses_size
    if size == 1 and chunks == 1:
        return attend(q, k, v)
    num_kv_heads = lcm(k.shape[1], size)
    if num_kv_heads > k.shape[1]:
        k, v = (x.repeat_interleave(num_kv_heads // x.shape[1], dim=1) for x in (k, v))
    # [n, H, D] -> [u, chunks, n, H / (u * chunks), D]: consecutive heads for each rank, and for each group of them
    by_rank = [x.unflatten(1, (size, chunks, -1)).movedim(0, 2) for x in (q, k, v)]
    widths = [x.shape[3] for x in by_rank]

    def start(chunk: int):
        blocks = torch.cat([x[:, chunk] for x in by_rank], dim=2)  # [u, n, (H + 2L) / (u * chunks), D]
        return start_all_to_all(blocks, mesh)

    outs, transfer = [], start(0)
    for chunk in range(chunks):
        following = start(chunk + 1) if chunk + 1 < chunks else None
        heads = finish_all_to_all(transfer).flatten(0, 1)  # [T, ...]: pieces of the shard in rank order
        out = attend(*heads.split(widths, dim=1))  # [T, H / (u * chunks), D]
        outs.append(start_all_to_all(out.unflatten(0, (size, -1)), mesh))
        transfer = following
    pieces = [finish_all_to_all(out).transpose(0, 1) for out in outs]  # [n, u, H / (u * chunks), D] each
    return (torch.stack(pieces, dim=2) if chunks > 1 else pieces[0].unsqueeze(2)).flatten(1, 3)
