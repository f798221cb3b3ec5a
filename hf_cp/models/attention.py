"""The attention function of a patched model: from transformers' tensors and keyword arguments to ours.

One function for all models: what differs (mesh, settings) is in the state on the attention layer, and what belongs to
a batch (its packed sample, what checkpointing keeps) comes with the call.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from hf_cp.attention.recompute import NoMemory
from hf_cp.attention.usp import usp_attention
from hf_cp.models.checkpointing import KeptAttention
from hf_cp.models.state import ATTENTION_NAME, STATE_NAME, ContextParallelState
from hf_cp.sequence.sample import PackedSample

logger = logging.getLogger(__name__)


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, H, n, D]
    key: torch.Tensor,  # [1, G, n, D]
    value: torch.Tensor,  # [1, G, n, D]
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    hf_cp_sample: PackedSample | None = None,
    hf_cp_kept: KeptAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [1, n, H, D]
    """What transformers calls in every attention layer of a patched model."""
    refused = {"attention_mask": attention_mask, "softcap": kwargs.get("softcap"), "s_aux": kwargs.get("s_aux")}
    _check(module, hf_cp_sample, {**refused, "dropout": dropout or None})
    if sliding_window is None:  # some families put the window into their mask only
        sliding_window = getattr(module, "sliding_window", None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    state: ContextParallelState = getattr(module, STATE_NAME)
    progress = state.comm.progress  # a lost peer is reported with it
    is_first = progress.kernel is None
    progress.enter(module.layer_idx, hf_cp_sample.micro_step)
    kept = nullcontext(NoMemory()) if hf_cp_kept is None else hf_cp_kept.layer(module.layer_idx, q.device)
    with kept as memory:
        out = usp_attention(
            q, k, v, sample=hf_cp_sample, comm=state.comm, config=state.config, window=sliding_window, scale=scaling,
            memory=memory,
        )  # fmt: skip
    progress.follow(out)
    if is_first and state.mesh.rank == 0:  # known once a call has shown the dtype; said once
        logger.info("Attention runs the %s kernel in %s on %s", progress.kernel, out.dtype, out.device.type)
    return out.unsqueeze(0), None


def _check(module: nn.Module, sample: PackedSample | None, refused: dict[str, Any]) -> None:
    given = [name for name, value in refused.items() if value is not None]
    if given:
        raise ValueError(
            f"Context-parallel attention got {', '.join(given)}, which it cannot compute. Leave them unset."
        )
    if sample is None:
        raise ValueError(
            f"Attention of layer {module.layer_idx} was called without hf_cp_sample while context parallelism is on.\n"
            "  Pass the batches of DataCollatorForContextParallel as model(**batch), or use "
            "context_parallel_disabled(model) for whole samples."
        )


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Documents and causality come from the layout: no mask tensor is made."""


def register_attention() -> None:
    """Makes the name known to transformers, with a mask function that makes no mask; again is as good as once."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
