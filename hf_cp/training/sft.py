"""TRL's trainers: SFTTrainer runs on shared samples, the others are refused.

SFTTrainer needs no loss of ours. Its head takes the decoder's hidden states and the batch's `shift_labels`, which were
shifted before the sample was split, and returns the log-probability of every local target; it adds them up, divides by
the targets of the whole step and multiplies by W, as the Trainer does. Attention inside the decoder is ours, since the
layout travels with the batch. So each of its loss types that is a sum over tokens stays exact, and so do its token
accuracy and entropy, which it adds up over all processes.

TRL is never imported here: a trainer's class knows where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import Trainer

from hf_cp import _compat
from hf_cp.config import IGNORE_INDEX
from hf_cp.models.loss import token_losses
from hf_cp.models.patch import (
    apply_context_parallel,
    base_causal_lm,
    context_parallel_state,
    remove_context_parallel,
)
from hf_cp.models.supported import check_model
from hf_cp.sequence.sample import SAMPLE_KEY
from hf_cp.training.prediction import evaluate_sample

logger = get_logger(__name__)


def trl_class(trainer_class: type) -> type | None:
    """The TRL class that `trainer_class` is, or stands on most directly; `None` if there is none."""
    return next((c for c in trainer_class.__mro__ if c.__module__.split(".")[0] == "trl"), None)


def is_sft(trainer_class: type) -> bool:
    """Whether it trains as TRL's SFTTrainer does (its subclasses for distillation do not)."""
    found = trl_class(trainer_class)
    return found is not None and found.__name__ == "SFTTrainer"


def packs_itself(trainer_class: type, args: Any) -> bool:
    """Whether SFTTrainer takes no collator but its own, because it joins documents without padding.

    The samples that it has packed say in `seq_lengths` which documents they hold, so our collator reads them as well.
    """
    if not is_sft(trainer_class):
        return False
    packs = getattr(args, "packing", False) and getattr(args, "packing_strategy", None) != "wrapped"
    return bool(getattr(args, "padding_free", False) or packs)


def complete_sft(trainer: Trainer, *, max_tokens: int | None) -> None:
    """Run when SFTTrainer has been built: by then adapters and its head stand around the patched model.

    Args:
        trainer (`SFTTrainer`): on samples of ours.
        max_tokens (`int`, *optional*): longest sample of the collator.

    Raises:
        ValueError: the adapters cannot be split along the sequence, or a load-balancing loss is on.
    """
    state, args = context_parallel_state(trainer.model), trainer.args
    if state is not None:  # before anything is undone: a model that is refused stays patched
        check_model(trainer.model, base_causal_lm(trainer.model), state.config)
    if trainer.aux_loss_enabled:
        raise ValueError(
            f"SFTTrainer adds a load-balancing loss (coefficient {trainer.router_aux_loss_coef}), which it takes from "
            "the local tokens alone.\n"
            "  Set router_aux_loss_coef=0.0 in SFTConfig, or use ContextParallelTrainer: it takes the whole sample's."
        )
    if state is not None:  # anew, so that the patch is outermost and sees every call
        apply_context_parallel(remove_context_parallel(trainer.model), state.config, mesh=state.mesh)
    is_cut = args.max_length is not None and not (args.dataset_kwargs or {}).get("skip_prepare_dataset")
    if is_cut and max_tokens is not None and args.max_length < max_tokens:
        logger.warning(
            f"SFTConfig(max_length={args.max_length}) cuts documents to {args.max_length} tokens before they are "
            f"packed into samples of {max_tokens}. Set max_length=None to keep them whole."
        )


@contextmanager
def exact_token_count(trainer: Trainer, num_tokens: int) -> Iterator[None]:
    """Inside, SFTTrainer trains a micro-step and counts every slot of every shard; it is left with `num_tokens`."""
    before = _compat.trained_tokens(trainer)
    yield
    _compat.note_trained_tokens(trainer, before + num_tokens)


def evaluate_sft(
    trainer: Trainer, model: nn.Module, batch: dict[str, Any], *, on_logits: Callable[[torch.Tensor], None] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As [`evaluate_sample`], with the loss (of its loss type) and the metrics of SFTTrainer.

    Its head keeps no logits. Where they are asked for, they are made from the same forward pass of the decoder; only a
    model that is not patched, which may scale its logits in its own way, is run once more.
    """
    state, scored = context_parallel_state(model), []
    base, shift_labels = base_causal_lm(model), batch["shift_labels"]
    if on_logits is not None and state is None:
        scored.append(evaluate_sample(model, batch, label_smoothing=0.0, on_logits=on_logits)[1])

    def score(decoder: nn.Module, args: Any, output: Any) -> None:
        num_chunks = batch[SAMPLE_KEY].num_chunks(state.config.loss_chunk_tokens)
        hidden, head = output.last_hidden_state[0], base.get_output_embeddings()
        scored.append(token_losses(hidden, head, shift_labels[0], num_chunks=num_chunks, on_logits=on_logits))

    is_scored_beside = on_logits is not None and state is not None
    hook = base.get_decoder().register_forward_hook(score) if is_scored_beside else None
    try:
        mean = trainer.compute_loss(model, batch)  # over the local targets
    finally:
        if hook is not None:
            hook.remove()
    return mean * (shift_labels != IGNORE_INDEX).sum(), scored[0] if scored else None
