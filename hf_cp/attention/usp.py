"""Unified sequence parallelism (arXiv:2405.07719): Ulysses outside, a ring inside.

An all-to-all gives this rank a whole ring shard of few heads, in order; an engine computes exact attention over all
shards; a second all-to-all brings the local slots back. The loop over the head chunks is [`_attend`].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_cp.attention.allgather import Gather
from hf_cp.attention.block import BlockAttention, Call, Engine
from hf_cp.attention.exchange import Exchange
from hf_cp.attention.kernels import Kernel, choose_kernel
from hf_cp.attention.recompute import Memory, NoMemory
from hf_cp.attention.ring import Ring
from hf_cp.attention.ulysses import HeadChunks
from hf_cp.config import ContextParallelConfig, check_heads
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh, config_of
from hf_cp.sequence.costs import choose_engine
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.sample import PackedSample


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    config: ContextParallelConfig | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Exact attention of one packed sample that is sharded over `mesh`; call it on every rank of the group.

    Args:
        q (`torch.Tensor`): [n, H, D], the slots `layout.indices(mesh.cp_rank)` of the sample, with position
            embeddings.
        k, v (`torch.Tensor`): [n, G, D]; query head h uses K/V head h // (H / G).
        mesh (`ContextParallelMesh`): the processes.
        layout (`SequenceLayout`): the sample; documents do not see each other.
        config (`ContextParallelConfig`, *optional*): engine, kernel and head chunks; by default those of a config
            with the mesh's degrees.
        settings: `causal`, `window`, `scale` and `kernel`, see [`usp_attention`].

    Returns:
        `torch.Tensor` [n, H, D] in q's dtype; padding slots are zero.

    Raises:
        ValueError: shapes, dtypes, heads, layout, config and mesh do not fit together, or the kernel cannot do what is
        asked.
            The check needs no communication, so every rank that is called alike raises alike.
    """
    if config is None:
        config = config_of(mesh, used=("ring_comm", "kernel", "grad_comm_dtype", "head_chunks"))
    return usp_attention(q, k, v, sample=PackedSample(layout), comm=Communicator(mesh), config=config, **settings)


@torch.compiler.disable
def usp_attention(
    q: torch.Tensor,  # [n, H, D]
    k: torch.Tensor,  # [n, G, D]
    v: torch.Tensor,  # [n, G, D]
    *,
    sample: PackedSample,
    comm: Communicator,
    config: ContextParallelConfig,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernel: str | None = None,
    memory: Memory | None = None,
) -> torch.Tensor:  # [n, H, D]
    """[`context_parallel_attention`] for callers that attend to a sample more than once.

    Args:
        sample (`PackedSample`): keeps the attention plans from call to call.
        comm (`Communicator`): counts and times what is sent.
        causal (`bool`): a token sees its document up to itself; else the whole document.
        window (`int`, *optional*): a token sees the last `window` tokens of its document, itself included.
        scale (`float`, *optional*): factor on the scores, 1 / sqrt(D) by default.
        kernel (`str`, *optional*): overrides `config.kernel`.
        memory (`Memory`, *optional*): what gradient checkpointing keeps of the forward pass.
    """
    q, k, v = (_as_autocast(x) for x in (q, k, v))
    _check(q, k, v, comm.mesh, sample.layout, config)
    plan = sample.attention_plan(causal=causal, window=window)
    engine, head_chunks = choose_ring(config, plan)
    chosen = _kernel_of_sample(kernel or config.kernel, q, v, plan)
    comm.progress.kernel, comm.progress.engine = chosen.name, engine.name
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(comm, plan, chosen, scale, q.device, q.dtype if config.grad_comm_dtype == "compute" else None)
    with torch.autocast(q.device.type, enabled=False):  # sums stay in the accumulator's dtype
        return _attend(q, k, v, engine, call, memory or NoMemory(), head_chunks)


def _attend(
    q: torch.Tensor,  # [n, H, D]
    k: torch.Tensor,  # [n, G, D]
    v: torch.Tensor,  # [n, G, D]
    engine: Engine,
    call: Call,
    memory: Memory,
    head_chunks: int,
) -> torch.Tensor:  # [n, H, D]
    """Tokens for heads, the ring, heads for tokens: one head chunk after another."""
    if call.comm.mesh.ulysses_size == 1 and head_chunks == 1:
        return BlockAttention.apply(q, k, v, engine, call, memory)
    heads = HeadChunks(q, k, v, chunks=head_chunks, comm=call.comm, memory=memory)
    result, leaving, coming = heads.empty_result(), None, heads.scatter(0)
    for chunk in range(head_chunks):
        arrived = heads.arrived(coming)
        coming = heads.scatter(chunk + 1)  # travels while these heads are used
        out = BlockAttention.apply(*arrived, engine, call, memory)  # [T, H / (u * chunks), D]
        del arrived
        going, leaving = leaving, heads.gather(out)
        if going is not None:
            result = heads.place(result, going, chunk - 1)  # it has travelled while these heads were used
    return heads.place(result, leaving, head_chunks - 1).flatten(1, 3)


def choose_ring(config: ContextParallelConfig, plan: AttentionPlan) -> tuple[Engine, int]:
    """The engine over the ring axis, and into how many head chunks the Ulysses axis cuts a rank's heads.

    Without a Ulysses axis an all-gather handles the head chunks itself: only what it gathers is large.
    """
    name = choose_engine(config, plan)
    if name == "allgather" and config.ulysses_degree == 1:
        return Gather(config.head_chunks), 1
    return {"p2p": Ring, "exchange": Exchange, "allgather": partial(Gather, 1)}[name](), config.head_chunks


def _kernel_of_sample(name: str, q: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> Kernel:
    """[`choose_kernel`], once per sample instead of in every layer: it looks for installed packages."""
    key = ("kernel", name, q.device, q.dtype, q.shape[-1], v.shape[-1])
    return plan.schedule(key, lambda: choose_kernel(name, q, v))


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """As `scaled_dot_product_attention` does: RoPE leaves q and k in fp32 where v is in the autocast dtype already."""
    device = x.device.type
    is_eligible = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if is_eligible else x


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh: ContextParallelMesh,
    layout: SequenceLayout,
    config: ContextParallelConfig,
) -> None:
    faults = mesh.degrees_fault(layout, "The layout"), mesh.degrees_fault(config, "The config")
    for fault in filter(None, faults):
        raise ValueError(fault)
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(x.ndim != 3 for x in (q, k, v)) or k.shape[:2] != v.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k, v must be [n, H, D], [n, G, D], [n, G, D], got {shapes}. Flatten the batch into n.")
    if any(x.shape[0] != layout.local_length for x in (q, k, v)):
        raise ValueError(
            f"q, k, v have {[s[0] for s in shapes]} slots; the layout has {layout.local_length} on each rank "
            f"({layout.num_tokens} tokens over cp_size={layout.cp_size}). Shard the sample with layout.shard()."
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they must share one float dtype. Cast them first."
        )
    check_heads(q.shape[1], k.shape[1], config)
