"""The one line that makes a Hugging Face model context-parallel, and its undo.

`apply_context_parallel` registers one attention function with transformers, points the model's attention at it, and
replaces the model's `forward` by one that computes the loss in chunks on the local shard. All state sits on the model,
so two models in one process do not see each other. The packed sample comes with each batch as the keyword argument
`hf_cp_sample`, so a recomputed forward pass (gradient checkpointing) sees its own batch's sample.

The way of a batch: `forward` (is the patch on?) and `sharded_forward` (checks, loss) in `hf_cp.models.forward`, the
model's own decoder, `hf_cp.models.attention` (once per layer), `hf_cp.attention.usp`.
"""

from __future__ import annotations

import copy
import logging
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_cp import _compat
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh, config_of
from hf_cp.models.attention import register_attention
from hf_cp.models.forward import ShardedLossOutput, wrap_forward
from hf_cp.models.loss import token_losses
from hf_cp.models.mlp import check_mlps, tile_mlps, untile_mlps
from hf_cp.models.moe import token_loss_only
from hf_cp.models.rope import rotaries_by_length
from hf_cp.models.state import (
    ATTENTION_NAME,
    STATE_NAME,
    ContextParallelState,
    base_causal_lm,
    context_parallel_disabled,
    context_parallel_state,
    running_as,
)
from hf_cp.models.supported import check_model

__all__ = [
    "ATTENTION_NAME",
    "ShardedLossOutput",
    "apply_context_parallel",
    "base_causal_lm",
    "context_parallel_disabled",
    "context_parallel_state",
    "local_token_losses",
    "remove_context_parallel",
    "running_as",
]

logger = logging.getLogger(__name__)


def apply_context_parallel(
    model: nn.Module,
    config_or_mesh: ContextParallelConfig | ContextParallelMesh,
    *,
    mesh: ContextParallelMesh | None = None,
) -> nn.Module:
    """Makes a causal LM of one of the families in `hf_cp.models.supported` context-parallel, in place.

    Works before or after `peft.get_peft_model`. The patched model takes batches of
    [`DataCollatorForContextParallel`]; `model(**batch).loss` is exact (see [`reduce_losses`]), `logits` is `None` when
    labels are given. `generate()` runs the original attention, replicated. With `cp_size == 1` the model is left as it
    is, unless the config has `force=True`.

    Args:
        model (`nn.Module`): a `PreTrainedModel` or a PEFT model around one.
        config_or_mesh: the config; or a mesh, for the default settings with its degrees.
        mesh (`ContextParallelMesh`, *optional*): a mesh to share between models; by default one is made.

    Returns:
        The same model.

    Raises:
        ValueError: the model (or a setting of it) is not supported, its heads or the world do not fit the degrees, or
            the mesh was made for other degrees or from a config whose settings would be lost.
        RuntimeError: more than one process is launched, but `torch.distributed` is not initialised.
    """
    config = config_of(config_or_mesh)
    if not config.enabled:
        return model
    base = base_causal_lm(model)
    _check(model, base, config)
    if mesh is None:
        mesh = config_or_mesh if isinstance(config_or_mesh, ContextParallelMesh) else ContextParallelMesh(config)
    fault = mesh.degrees_fault(config, "The config")
    if fault is not None:
        raise ValueError(fault)
    _patch(model, base, config, mesh)
    return model


def _check(model: nn.Module, base: PreTrainedModel, config: ContextParallelConfig) -> None:
    if context_parallel_state(model) is not None:
        raise ValueError(
            f"{type(base).__name__} is already context-parallel ({context_parallel_state(model).config}).\n"
            "  Call remove_context_parallel(model) before applying another config."
        )
    check_model(model, base, config)
    if config.mlp_chunk_tokens is not None:
        check_mlps(base.get_decoder().layers, config.mlp_chunk_tokens)


def _patch(model: nn.Module, base: PreTrainedModel, config: ContextParallelConfig, mesh: ContextParallelMesh) -> None:
    state = ContextParallelState(
        config,
        Communicator(mesh),
        attn_implementation=_compat.attention_implementation(base.config),
        forward=base.forward,
        patched=wrap_forward(base.forward),
        rotaries=rotaries_by_length(base),
    )
    register_attention()
    _give_own_config(model, base)
    layers = base.get_decoder().layers
    for module in (base, *(layer.self_attn for layer in layers)):
        setattr(module, STATE_NAME, state)
    if config.mlp_chunk_tokens is not None:
        tile_mlps(layers, config.mlp_chunk_tokens)
    base.forward = MethodType(state.patched, base)
    base.set_attn_implementation(ATTENTION_NAME)
    if mesh.rank == 0:
        logger.info(
            "%s: %d processes share a sample (%s), layout %s, ring_comm %s, kernel %s",
            type(base).__name__, mesh.cp_size, mesh, config.resolved_layout, config.ring_comm, config.kernel,
        )  # fmt: skip


def remove_context_parallel(model: nn.Module) -> nn.Module:
    """Undoes [`apply_context_parallel`]; a model that is not patched is left as it is."""
    state = context_parallel_state(model)
    if state is None:
        return model
    base = base_causal_lm(model)
    layers = base.get_decoder().layers
    base.set_attn_implementation(state.attn_implementation)
    if getattr(vars(base)["forward"], "__func__", None) is not state.patched:
        pass  # something stands around the patch; it stays, and without a state the patch in it only passes calls on
    elif getattr(state.forward, "__func__", None) is type(base).forward:
        del base.forward
    else:
        base.forward = state.forward
    for module in (base, *(layer.self_attn for layer in layers)):
        delattr(module, STATE_NAME)
    if state.config.mlp_chunk_tokens is not None:
        untile_mlps(layers)
    return model


def local_token_losses(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Cross-entropy of each local slot of a collator's batch, [n]; of the whole sample if the model is not patched.

    Call it on every rank of the group.
    """
    state = context_parallel_state(model)
    if state is not None and state.active:
        return model(**batch, num_items_in_batch=1, **token_loss_only(model)).token_losses
    base = base_causal_lm(model)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    hidden = base.get_decoder()(**inputs, use_cache=False).last_hidden_state[0]
    num_chunks = -(-len(hidden) // ContextParallelConfig().loss_chunk_tokens)
    return token_losses(hidden, base.get_output_embeddings(), batch["shift_labels"][0], num_chunks=num_chunks)


def _give_own_config(model: nn.Module, base: PreTrainedModel) -> None:
    """Models made from one config object share it, attention name included: give this one a copy."""
    shared, own = base.config, copy.copy(base.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
