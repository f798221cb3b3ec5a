"""What the Trainer is given, held against what is exact on packed and shared samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, TrainingArguments

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.training.checks.table import Check, Problem
from hf_cp.training.sft import is_sft, trl_class

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")


@dataclass(frozen=True)
class TrainerClass:
    """The class of a Trainer that is to run on samples of ours."""

    trainer_class: type
    cp_size: int


def _trainer_class(subject: TrainerClass) -> Problem | None:
    """Trainers whose loss is not a sum over the tokens of documents."""
    found = trl_class(subject.trainer_class)
    if found is None or is_sft(subject.trainer_class):
        return None
    return Problem(
        f"{subject.trainer_class.__name__} is TRL's {found.__name__}, which does not run on packed or shared samples "
        f"(cp_size={subject.cp_size}): it compares or scores whole sequences, and a rank holds only parts of them.",
        "Supported are transformers.Trainer and trl.SFTTrainer. For preference pairs, rewards, rollouts and "
        "distillation leave the model unpatched and the trainer its own collator.",
    )


@dataclass(frozen=True)
class Pairing:
    """A model and what makes its batches.

    Args:
        data_collator: of the Trainer.
        model_config (`ContextParallelConfig`, *optional*): that the model is patched for; `None` if it is not.
    """

    data_collator: Any
    model_config: ContextParallelConfig | None


def _pairing(subject: Pairing) -> Problem | None:
    collator, theirs = subject.data_collator, subject.model_config
    if not isinstance(collator, DataCollatorForContextParallel):
        return None if theirs is None else _foreign_collator(collator, theirs)
    ours = collator.config
    if theirs is None:
        if not ours.enabled:
            return None
        return Problem(
            f"The collator shards samples for {_show(ours)}, but the model is not patched: its attention would not "
            "see the other ranks' tokens.",
            "Call apply_context_parallel(model, config) before building the Trainer.",
        )
    pairs = [(f.name, getattr(ours, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(ours)]
    differing = [f"{name}: collator {a!r}, model {b!r}" for name, a, b in pairs if a != b]
    if not differing:
        return None
    return Problem(
        f"The collator and the model have different configs ({'; '.join(differing)}).",
        "Pass the same ContextParallelConfig to apply_context_parallel and DataCollatorForContextParallel.",
    )


def _foreign_collator(collator: Any, config: ContextParallelConfig) -> Problem:
    return Problem(
        f"The model is patched for {_show(config)}, but {type(collator).__name__} makes the batches and does not "
        "shard them.",
        "Pass data_collator=DataCollatorForContextParallel(config), or undo the patch with "
        "remove_context_parallel(model). Trainers with collators of their own (preference pairs, rewards) are not "
        "supported.",
    )


def _show(config: ContextParallelConfig) -> str:
    return f"cp_size={config.cp_size} (ring_degree={config.ring_degree}, ulysses_degree={config.ulysses_degree})"


@dataclass(frozen=True)
class Arguments:
    """Training arguments, and what else the Trainer was given, for samples from our loader.

    Args:
        args (`TrainingArguments`): of the Trainer.
        is_packed (`bool`): the collator packs documents (it has `max_tokens`).
        model (*optional*): of the Trainer.
        is_sft (`bool`, *optional*, defaults to `False`): it is TRL's SFTTrainer.
        others (`Mapping`): the Trainer's other arguments.
    """

    args: TrainingArguments
    is_packed: bool
    model: Any = None
    is_sft: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)


def _breaks_ddp(subject: Arguments) -> bool:
    """Reentrant checkpointing under a DDP that looks for unused parameters; its backward would fail."""
    args = subject.args
    is_reentrant = args.activation_checkpointing and (args.activation_checkpointing_kwargs or {}).get("use_reentrant")
    finds_unused = args.ddp_find_unused_parameters
    if finds_unused is None:  # what the Trainer takes for models that are not PreTrainedModel
        finds_unused = not isinstance(subject.model, PreTrainedModel)
    return bool(is_reentrant and finds_unused and args.world_size > 1 and args.deepspeed_plugin is None)


def _setting(name: str, is_wrong: Callable[[Arguments], Any], reason: str, fix: str) -> Check:
    """A check of a setting: `reason` may show values of the arguments as {args.name}."""

    def find(subject: Arguments) -> Problem | None:
        return Problem(reason.format(args=subject.args), fix) if is_wrong(subject) else None

    return Check(name, Arguments, find)


CHECKS = (
    Check("trainer class", TrainerClass, _trainer_class),
    Check("collator and model", Pairing, _pairing),
    # how samples are made
    _setting(
        "batch size",
        lambda s: s.is_packed and s.args.per_device_train_batch_size != 1,
        "per_device_train_batch_size={args.per_device_train_batch_size}: a micro-step is one packed sample.",
        "Set it to 1; for more tokens a step raise max_tokens or gradient_accumulation_steps.",
    ),
    _setting(
        "searched batch size",
        lambda s: s.args.auto_find_batch_size,
        "auto_find_batch_size=True: memory is set by the tokens of a sample, not by its number of features.",
        "Set it to False and lower max_tokens.",
    ),
    _setting(
        "sampling",
        lambda s: s.args.train_sampling_strategy not in SAMPLING_STRATEGIES,
        "train_sampling_strategy={args.train_sampling_strategy!r}: the packed loader orders samples itself.",
        f"Choose one of {', '.join(SAMPLING_STRATEGIES)}.",
    ),
    _setting(
        "DataParallel",
        lambda s: s.args.n_gpu > 1,
        "n_gpu={args.n_gpu}: DataParallel would split the sample again.",
        "Start one process per GPU.",
    ),
    # the loss and its precision
    _setting(
        "mean over ranks",
        lambda s: not s.args.average_tokens_across_devices,
        "average_tokens_across_devices=False: the ranks of a sample hold unequal parts of its targets, so the mean "
        "must be taken over all ranks.",
        "Leave it at True.",
    ),
    _setting(
        "NEFTune",
        lambda s: s.args.neftune_noise_alpha is not None,
        "neftune_noise_alpha={args.neftune_noise_alpha}: its noise is scaled by the length of the local shard.",
        "Set it to None.",
    ),
    _setting(
        "Liger kernel",
        lambda s: s.args.use_liger_kernel,
        "use_liger_kernel=True: it replaces the model's forward, and with it the sharded loss.",
        "Set it to False: the loss is chunked already (loss_chunk_tokens).",
    ),
    _setting(
        "full evaluation in 16 bits",
        lambda s: s.args.fp16_full_eval or s.args.bf16_full_eval,
        "fp16_full_eval={args.fp16_full_eval}, bf16_full_eval={args.bf16_full_eval}: evaluation before and after "
        "training would cast the weights that training goes on with.",
        "Use bf16=True or fp16=True, or load the model in that type.",
    ),
    _setting(
        "label smoothing of TRL",  # from whole logits, and labels that are not shifted
        lambda s: s.is_sft and s.args.label_smoothing_factor > 0,
        "label_smoothing_factor={args.label_smoothing_factor} in SFTTrainer: it smooths logits of whole samples, and "
        "a rank has only parts.",
        "Set it to 0, or use ContextParallelTrainer, which smooths exactly.",
    ),
    _setting(
        "loss function",
        lambda s: s.others.get("compute_loss_func") is not None,
        "compute_loss_func: it is given labels that are not shifted, and the next label of a shard's token may be on "
        "another rank.",
        "Use the model's own loss; label_smoothing_factor is supported.",
    ),
    # evaluation
    _setting(
        "metrics by batch",
        lambda s: s.args.batch_eval_metrics,
        "batch_eval_metrics=True: a batch of evaluation is a part of a packed sample.",
        "Set it to False, and keep little of each token with preprocess_logits_for_metrics.",
    ),
    _setting(
        "predictions by batch",
        lambda s: not s.args.eval_do_concat_batches,
        "eval_do_concat_batches=False: predictions come in the order of the data set, not in that of batches.",
        "Leave it at True.",
    ),
    # the model
    _setting(
        "model_init",
        lambda s: s.others.get("model_init") is not None,
        "model_init: every call would make a model that is not patched.",
        "Pass model=apply_context_parallel(model, config).",
    ),
    _setting(
        "reentrant checkpointing",
        _breaks_ddp,
        "use_reentrant=True with ddp_find_unused_parameters on: DDP fails in the backward of reentrant checkpointing "
        "when it looks for unused parameters.",
        "Set use_reentrant=False (activation_checkpointing_kwargs) or ddp_find_unused_parameters=False.",
    ),
)
