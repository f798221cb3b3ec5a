"""The `forward` of a patched model: checks, the model's own decoder on this rank's shard, the loss in chunks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from hf_cp.models.batch import agreed_sample, sample_of
from hf_cp.models.checkpointing import kept_attention
from hf_cp.models.loss import reduce_losses, token_losses
from hf_cp.models.mlp import rebound
from hf_cp.models.moe import add_balance_loss, balance_loss, is_mixture, uses_balance_loss
from hf_cp.models.rope import frequencies_of_the_sample
from hf_cp.models.state import STATE_NAME, ContextParallelState, context_parallel_disabled
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import SAMPLE_KEY, PackedSample

LOSS_SETTINGS = ("num_items_in_batch", "hf_cp_label_smoothing", "hf_cp_on_logits")  # of a call, for `_with_loss`


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


def wrap_forward(original: Callable) -> Callable:
    """The function in place of a causal LM's `original` forward: ours while the patch is on, else `original`."""

    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.wraps(getattr(original, "__func__", original))  # the function: its signature begins with self
    def forward(
        self,
        *args: Any,
        hf_cp_sample: PackedSample | None = None,
        hf_cp_layout: SequenceLayout | None = None,
        **kwargs: Any,
    ):
        state: ContextParallelState | None = getattr(self, STATE_NAME, None)
        if state is None or not state.active or state.patched is not forward:  # the last: of an earlier patch
            return rebound(original, self)(*args, **kwargs)
        sample = sample_of(hf_cp_sample, hf_cp_layout)
        if sample is None and any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            with context_parallel_disabled(self):  # generate(): every rank holds the whole text
                return rebound(original, self)(*args, **kwargs)
        return sharded_forward(self, state, sample, *args, **kwargs)

    # accelerate's unwrap_model(keep_fp32_wrapper=False) follows __wrapped__ to its end: that must be this function
    forward.__signature__ = inspect.signature(forward)
    del forward.__wrapped__
    return forward


@functools.partial(torch.compiler.disable, recursive=False)  # the decoder that it calls is compiled
def sharded_forward(
    model: PreTrainedModel,
    state: ContextParallelState,
    sample: PackedSample | None,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    *,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
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
    loss_settings = {name: kwargs.pop(name) for name in LOSS_SETTINGS if name in kwargs}
    kwargs |= {"position_ids": position_ids, SAMPLE_KEY: sample, "use_cache": False}
    if state.config.keep_attention:
        kwargs["hf_cp_kept"] = kept_attention(model.get_decoder().layers)
    has_own_head = bool(kwargs.get("fused_lm_head"))  # TRL's, around the decoder
    asked = kwargs.pop("output_router_logits", None)
    is_balanced = uses_balance_loss(model, requested=asked, with_labels=labels is not None, own_head=has_own_head)
    if is_mixture(model):
        kwargs["output_router_logits"] = is_balanced
    with frequencies_of_the_sample(state.rotaries, sample, position_ids, comm=comm):
        if labels is None:
            return state.forward(input_ids, **kwargs)
        if has_own_head:  # it scores the hidden states of the shard
            return state.forward(input_ids, labels=labels, shift_labels=shift_labels, **kwargs)
        kwargs.pop("logits_to_keep", None)
        outputs = model.get_decoder()(input_ids, **kwargs)
    return _with_loss(model, state, sample, outputs, shift_labels, is_balanced=is_balanced, **loss_settings)


@functools.partial(torch.compiler.disable, recursive=False)
def _with_loss(
    model: PreTrainedModel,
    state: ContextParallelState,
    sample: PackedSample,
    outputs: ModelOutput,
    shift_labels: torch.Tensor,
    *,
    is_balanced: bool,
    num_items_in_batch: torch.Tensor | int | None = None,
    hf_cp_label_smoothing: float = 0.0,
    hf_cp_on_logits: Callable[[torch.Tensor], None] | None = None,
) -> ShardedLossOutput:
    """From the decoder's output to the loss; the scale of its parts is derived in `hf_cp.models.loss` and `moe`."""
    losses = token_losses(
        outputs.last_hidden_state[0],
        model.get_output_embeddings(),
        shift_labels[0],
        num_chunks=sample.num_chunks(state.config.loss_chunk_tokens),
        label_smoothing=hf_cp_label_smoothing,
        on_logits=hf_cp_on_logits,
    )
    comm = state.comm
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
