"""Unified sequence parallelism (arXiv:2405.07719): Ulysses outside, a ring inside.

An all-to-all gives this rank a whole ring shard of few heads, in order; the ring computes exact attention over all
shards; a second all-to-all brings the local slots back.
"""

from __future__ import annotations

import torch

from hf_cp.attention.kernels import choose_kernel
from hf_cp.attention.ring import RingAttention
from hf_cp.attention.ulysses import heads_to_tokens, tokens_to_heads
from hf_cp.config import check_heads
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import attention_plan


@torch.compiler.disable
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Exact attention of one packed row that is sharded over `mesh`; call it on every rank of the group.

    Args:
        q (`torch.Tensor`): [n, H, D], the slots `layout.indices(mesh.cp_rank)` of the row, position embeddings
        applied. k, v (`torch.Tensor`): [n, G, D]; query head h uses K/V head h // (H / G).
        mesh (`ContextParallelMesh`): the processes.
        layout (`SequenceLayout`): the row; documents do not see each other.
        causal (`bool`): a token sees its document up to itself; else the whole document.
        window (`int`, *optional*): a token sees the last `window` tokens of its document. A window shorter than the
            longest document needs a kernel with bands.
        scale (`float`, *optional*): factor on the scores, 1 / sqrt(D) by default.
        kernel (`str`, *optional*): overrides `mesh.config.kernel`.

    Returns:
        `torch.Tensor` [n, H, D] in q's dtype; padding slots are zero.

    Raises:
        ValueError: shapes, dtypes, heads, layout and mesh do not fit together, or the kernel cannot do what is asked.
            The check needs no communication, so every rank that is called alike raises alike.
    """
    _check(q, k, v, mesh, layout)
    chosen = choose_kernel(kernel or mesh.config.kernel, q, v)
    plan = attention_plan(layout, causal=causal, window=window)
    if plan.window is not None and not chosen.bands:
        raise ValueError(
            f"window={window} is shorter than the longest document ({layout.max_seqlen} tokens), which "
            f"kernel={chosen.name!r} cannot compute.\n  Use kernel='eager' for short rows, or documents of at most "
            f"{window} tokens."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = tokens_to_heads(q, k, v, mesh)
    out = RingAttention.apply(q, k, v, mesh, plan, chosen, scale)
    return heads_to_tokens(out, mesh)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: ContextParallelMesh, layout: SequenceLayout
) -> None:
    degrees = (layout.ring_degree, layout.ulysses_degree)
    if degrees != (mesh.ring_size, mesh.ulysses_size):
        raise ValueError(
            f"The layout was made for ring x ulysses = {degrees[0]} x {degrees[1]}, the mesh is {mesh.ring_size} x "
            f"{mesh.ulysses_size}. Make the layout (or the collator) with the mesh's config."
        )
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(x.ndim != 3 for x in (q, k, v)) or k.shape[:2] != v.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k, v must be [n, H, D], [n, G, D], [n, G, D], got {shapes}. Flatten the batch into n.")
    if any(x.shape[0] != layout.local_length for x in (q, k, v)):
        raise ValueError(
            f"q, k, v have {[s[0] for s in shapes]} slots; the layout has {layout.local_length} on each rank "
            f"({layout.num_tokens} tokens over cp_size={layout.cp_size}). Shard the row with layout.shard()."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they must share one float dtype. Cast them first."
        )
    check_heads(q.shape[1], k.shape[1], mesh.config)
