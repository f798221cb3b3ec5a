"""Unified sequence parallelism (arXiv:2405.07719): Ulysses outside, a ring inside.

An all-to-all gives this rank a whole ring shard of few heads, in order; an engine computes exact attention over all
shards; a second all-to-all brings the local slots back.
"""

from __future__ import annotations

from functools import partial

import torch

from hf_cp.attention.allgather import Gather
from hf_cp.attention.engine import Call, ShardAttention
from hf_cp.attention.exchange import Exchange
from hf_cp.attention.kernels import Kernel, choose_kernel
from hf_cp.attention.recompute import Once, make_now
from hf_cp.attention.ring import Ring
from hf_cp.attention.ulysses import attend_by_heads
from hf_cp.config import check_heads
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.engine import choose_engine
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan, attention_plan


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
    once: Once = make_now,
) -> torch.Tensor:
    """Exact attention of one packed row that is sharded over `mesh`; call it on every rank of the group.

    Args:
        q (`torch.Tensor`): [n, H, D], the slots `layout.indices(mesh.cp_rank)` of the row, with position embeddings.
        k, v (`torch.Tensor`): [n, G, D]; query head h uses K/V head h // (H / G).
        mesh (`ContextParallelMesh`): the processes.
        layout (`SequenceLayout`): the row; documents do not see each other.
        causal (`bool`): a token sees its document up to itself; else the whole document.
        window (`int`, *optional*): a token sees the last `window` tokens of its document, itself included.
        scale (`float`, *optional*): factor on the scores, 1 / sqrt(D) by default.
        kernel (`str`, *optional*): overrides `mesh.config.kernel`.
        once: what the forward pass computes and receives is made through it; gradient checkpointing keeps it so.

    Returns:
        `torch.Tensor` [n, H, D] in q's dtype; padding slots are zero.

    Raises:
        ValueError: shapes, dtypes, heads, layout and mesh do not fit together, or the kernel cannot do what is asked.
            The check needs no communication, so every rank that is called alike raises alike.
    """
    q, k, v = (_as_autocast(x) for x in (q, k, v))
    _check(q, k, v, mesh, layout)
    plan = attention_plan(layout, causal=causal, window=window)
    chosen = _kernel_of_row(kernel or mesh.config.kernel, q, v, plan)
    config, scale = mesh.config, q.shape[-1] ** -0.5 if scale is None else scale
    name = choose_engine(config, plan)
    gather_chunks = config.head_chunks if mesh.ulysses_size == 1 and name == "allgather" else 1
    engine = {"p2p": Ring, "exchange": Exchange, "allgather": partial(Gather, gather_chunks)}[name]()
    call = Call(mesh, plan, chosen, scale, q.device, q.dtype if config.grad_comm_dtype == "compute" else None)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ShardAttention.apply(q, k, v, engine, call, once)

    with torch.autocast(q.device.type, enabled=False):  # sums stay in the accumulator's dtype
        return attend_by_heads(q, k, v, attend, mesh, config.head_chunks // gather_chunks, once)


def _kernel_of_row(name: str, q: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> Kernel:
    """[`choose_kernel`], once per row instead of in every layer: it looks for installed packages."""
    key = ("kernel", name, q.device, q.dtype, q.shape[-1], v.shape[-1])
    return plan.schedule(key, lambda: choose_kernel(name, q, v))


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """As `scaled_dot_product_attention` does: RoPE leaves q and k in fp32 where v is in the autocast dtype already."""
    device = x.device.type
    is_eligible = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if is_eligible else x


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
