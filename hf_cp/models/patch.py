"""The one line that makes a Hugging Face model context-parallel, and its undo.

`apply_context_parallel` registers one attention function with transformers, points the model's attention at it, and
replaces the model's `forward` by one that computes the loss in chunks on the local shard. All state sits on the model,
so two models in one process do not see each other. The packed sample comes with each batch as the keyword argument
`hf_cp_sample`, so a recomputed forward pass (gradient checkpointing) sees its own batch's sample.

The way of a batch: `forward` (is the patch on?) -> `_forward` (checks, loss) -> the model's own decoder ->
`_attention` (once per layer) -> `hf_cp.attention.usp`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cp import _compat
from hf_cp.attention.recompute import NoMemory
from hf_cp.attention.usp import usp_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh, config_of
from hf_cp.models.batch import agreed_sample, sample_of
from hf_cp.models.checkpointing import KeptAttention, kept_attention
from hf_cp.models.loss import reduce_losses, token_losses
from hf_cp.models.mlp import check_mlps, rebound, tile_mlps, untile_mlps
from hf_cp.models.moe import add_balance_loss, balance_loss, is_mixture, token_loss_only, uses_balance_loss
from hf_cp.models.rope import frequencies_of_the_sample, rotaries_by_length
from hf_cp.models.supported import check_model
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import SAMPLE_KEY, PackedSample

logger = logging.getLogger(__name__)

# transformers takes other code paths for names with "flash", "sdpa", "flex" or "/" in them
ATTENTION_NAME = "hf_cp_usp"
_STATE = "_hf_cp_state"


@dataclass
class ShardedLossOutput(CausalLMOutputWithPast):
    """A patched model's output when labels are given: `logits` is `None`.

    Args:
        token_losses (`torch.Tensor`): [n], cross-entropy of each local slot, 0 where there is no target.
        aux_loss (`torch.Tensor`, *optional*): the sample's load-balancing loss, before its coefficient (`loss` has it
            in), if the model has experts and `output_router_logits` is set.
    """

    token_losses: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


@dataclass(frozen=True)
class ContextParallelState:
    """What a patched model remembers.

    Args:
        config (`ContextParallelConfig`): the settings.
        comm (`Communicator`): the processes, and what has been sent between them.
        attn_implementation (`str`): before the patch.
        forward (`Callable`): before the patch.
        patched (`Callable`): the function in place of `forward`.
        rotaries (`tuple`): those modules whose frequencies depend on the length of a sample.
        active (`bool`): inside of [`context_parallel_disabled`] the model carries a copy that is not.
    """

    config: ContextParallelConfig
    comm: Communicator
    attn_implementation: str
    forward: Callable
    patched: Callable
    rotaries: tuple[nn.Module, ...] = ()
    active: bool = True

    @property
    def mesh(self) -> ContextParallelMesh:
        return self.comm.mesh


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
    if context_parallel_state(model) is not None:
        raise ValueError(
            f"{type(base).__name__} is already context-parallel ({context_parallel_state(model).config}).\n"
            "  Call remove_context_parallel(model) before applying another config."
        )
    check_model(model, base, config)
    layers = base.get_decoder().layers
    if config.mlp_chunk_tokens is not None:
        check_mlps(layers, config.mlp_chunk_tokens)
    if mesh is None:
        mesh = config_or_mesh if isinstance(config_or_mesh, ContextParallelMesh) else ContextParallelMesh(config)
    fault = mesh.degrees_fault(config, "The config")
    if fault is not None:
        raise ValueError(fault)
    _patch(model, base, config, mesh)
    if mesh.rank == 0:
        logger.info(
            "%s: %d processes share a sample (%s), layout %s, ring_comm %s, kernel %s",
            type(base).__name__, mesh.cp_size, mesh, config.resolved_layout, config.ring_comm, config.kernel,
        )  # fmt: skip
    return model


def _patch(model: nn.Module, base: PreTrainedModel, config: ContextParallelConfig, mesh: ContextParallelMesh) -> None:
    state = ContextParallelState(
        config,
        Communicator(mesh),
        attn_implementation=_compat.attention_implementation(base.config),
        forward=base.forward,
        patched=_wrap_forward(base.forward),
        rotaries=rotaries_by_length(base),
    )
    _register_attention()
    _give_own_config(model, base)
    layers = base.get_decoder().layers
    for module in (base, *(layer.self_attn for layer in layers)):
        setattr(module, _STATE, state)
    if config.mlp_chunk_tokens is not None:
        tile_mlps(layers, config.mlp_chunk_tokens)
    base.forward = MethodType(state.patched, base)
    base.set_attn_implementation(ATTENTION_NAME)


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
        delattr(module, _STATE)
    if state.config.mlp_chunk_tokens is not None:
        untile_mlps(layers)
    return model


@contextmanager
def context_parallel_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the patched model is the original one: whole samples, one process, its own attention and loss."""
    state = context_parallel_state(model)
    if state is None or not state.active:
        yield model
        return
    base = base_causal_lm(model)
    try:
        setattr(base, _STATE, replace(state, active=False))
        base.set_attn_implementation(state.attn_implementation)
        yield model
    finally:
        setattr(base, _STATE, state)
        base.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def running_as(model: nn.Module, config: ContextParallelConfig, mesh: ContextParallelMesh) -> Iterator[nn.Module]:
    """Inside, the patched model runs with other settings on other processes; the same state comes back afterwards.

    The state is exchanged, not written into, and the patch stays, so whatever stands around `forward` stays too.
    """
    holders, state = [m for m in model.modules() if _STATE in vars(m)], context_parallel_state(model)
    other = replace(state, config=config, comm=Communicator(mesh))
    try:
        for module in holders:
            setattr(module, _STATE, other)
        yield model
    finally:
        for module in holders:
            setattr(module, _STATE, state)


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


def context_parallel_state(model: nn.Module) -> ContextParallelState | None:
    """The state of a patched model, through PEFT, DDP and DeepSpeed wrappers; `None` if it is not patched."""
    return next((vars(m)[_STATE] for m in model.modules() if _STATE in vars(m)), None)


def base_causal_lm(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face causal LM inside of PEFT or other wrappers.

    Raises:
        ValueError: there is none.
    """
    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} holds no Hugging Face PreTrainedModel. Pass a causal LM, such as Llama or Qwen3."
        )
    return found


def _give_own_config(model: nn.Module, base: PreTrainedModel) -> None:
    """Models made from one config object share it, attention name included: give this one a copy."""
    shared, own = base.config, copy.copy(base.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _wrap_forward(original: Callable) -> Callable:
    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.wraps(getattr(original, "__func__", original))  # the function: its signature begins with self
    def forward(
        self,
        *args: Any,
        hf_cp_sample: PackedSample | None = None,
        hf_cp_layout: SequenceLayout | None = None,
        **kwargs: Any,
    ):
        state: ContextParallelState | None = getattr(self, _STATE, None)
        if state is None or not state.active or state.patched is not forward:  # the last: of an earlier patch
            return rebound(original, self)(*args, **kwargs)
        sample = sample_of(hf_cp_sample, hf_cp_layout)
        if sample is None and any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            with context_parallel_disabled(self):  # generate(): every rank holds the whole text
                return rebound(original, self)(*args, **kwargs)
        return _forward(self, state, sample, *args, **kwargs)

    # accelerate's unwrap_model(keep_fp32_wrapper=False) follows __wrapped__ to its end: that must be this function
    forward.__signature__ = inspect.signature(forward)
    del forward.__wrapped__
    return forward


@functools.partial(torch.compiler.disable, recursive=False)  # the decoder that it calls is compiled
def _forward(
    model: PreTrainedModel,
    state: ContextParallelState,
    sample: PackedSample | None,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    *,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    hf_cp_label_smoothing: float = 0.0,
    hf_cp_on_logits: Callable[[torch.Tensor], None] | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """The model on this rank's shard, loss in chunks; logits of the shard if there are no labels."""
    if labels is not None:
        _refuse_tuples(model, kwargs.get("return_dict"))
    comm = state.comm
    comm.note_forward()
    tokens = kwargs.get("inputs_embeds") if input_ids is None else input_ids
    is_partitioned = hasattr(next(model.parameters()), "ds_id")  # ZeRO-3: every module call gathers from the world
    sample = agreed_sample(tokens, attention_mask, labels, shift_labels, sample, comm, in_step=is_partitioned)
    if position_ids is None:
        position_ids = sample.layout.position_ids(comm.mesh.cp_rank).to(tokens.device).unsqueeze(0)
    kwargs |= {"position_ids": position_ids, SAMPLE_KEY: sample, "use_cache": False}
    if state.config.keep_attention:
        kwargs["hf_cp_kept"] = kept_attention(model.get_decoder().layers)
    is_balanced = uses_balance_loss(
        model,
        requested=kwargs.pop("output_router_logits", None),
        with_labels=labels is not None,
        own_head=bool(kwargs.get("fused_lm_head")),
    )
    if is_mixture(model):
        kwargs["output_router_logits"] = is_balanced
    with frequencies_of_the_sample(state.rotaries, sample, position_ids, comm=comm):
        if labels is None:
            return state.forward(input_ids, **kwargs)
        if kwargs.get("fused_lm_head"):  # TRL's own head around the decoder; it scores the hidden states of the shard
            return state.forward(input_ids, labels=labels, shift_labels=shift_labels, **kwargs)
        kwargs.pop("logits_to_keep", None)
        outputs = model.get_decoder()(input_ids, **kwargs)
    losses = token_losses(
        outputs.last_hidden_state[0],
        model.get_output_embeddings(),
        shift_labels[0],
        num_chunks=sample.num_chunks(state.config.loss_chunk_tokens),
        label_smoothing=hf_cp_label_smoothing,
        on_logits=hf_cp_on_logits,
    )
    loss, aux_loss = reduce_losses(losses, shift_labels, comm, num_items_in_batch=num_items_in_batch), None
    if is_balanced:
        balance = balance_loss(model, outputs.router_logits, shift_labels, sample.layout, comm)
        aux_loss, summed = balance.value, num_items_in_batch is not None
        coefficient, cp_size = model.router_aux_loss_coef, comm.mesh.cp_size
        loss = add_balance_loss(loss, balance, coefficient=coefficient, cp_size=cp_size, summed=summed)
    return ShardedLossOutput(loss=loss, hidden_states=outputs.hidden_states, token_losses=losses, aux_loss=aux_loss)


def _refuse_tuples(model: PreTrainedModel, return_dict: bool | None) -> None:
    """With labels there are no logits, so the places in transformers' tuple would hold something else."""
    if return_dict is None:
        return_dict = model.config.return_dict
    if not return_dict:
        raise ValueError(
            f"{type(model).__name__} was called with labels and return_dict=False (as an argument or in its config), "
            "but a context-parallel model has no tuple of loss and logits: it makes no logits.\n"
            "  Leave return_dict out, set model.config.return_dict = True, and read outputs.loss."
        )


@torch.compiler.disable
def _attention(
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
    if dropout or any(value is not None for value in refused.values()):
        given = [name for name, value in refused.items() if value is not None] + ["dropout"] * bool(dropout)
        raise ValueError(
            f"Context-parallel attention got {', '.join(given)}, which it cannot compute. Leave them unset."
        )
    if hf_cp_sample is None:
        raise ValueError(
            f"Attention of layer {module.layer_idx} was called without hf_cp_sample while context parallelism is on.\n"
            "  Pass the batches of DataCollatorForContextParallel as model(**batch), or use "
            "context_parallel_disabled(model) for whole samples."
        )
    if sliding_window is None:  # some families put the window into their mask only
        sliding_window = getattr(module, "sliding_window", None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    state: ContextParallelState = getattr(module, _STATE)
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


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Documents and causality come from the layout: no mask tensor is made."""


def _register_attention() -> None:
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
