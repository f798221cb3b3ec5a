"""What the Trainer is given, held against what is exact on packed and shared samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, TrainingArguments

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.training.checks.table import Check
from hf_cp.training.sft import is_sft, trl_class

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")


@dataclass(frozen=True)
class TrainerClass:
    """The class of a Trainer that is to run on samples of ours."""

    trainer_class: type
    cp_size: int

    def unsupported(self) -> type | None:
        """The TRL class whose loss is not a sum over the tokens of documents."""
        return None if is_sft(self.trainer_class) else trl_class(self.trainer_class)


@dataclass(frozen=True)
class Pairing:
    """A model and what makes its batches.

    Args:
        data_collator: of the Trainer.
        model_config (`ContextParallelConfig`, *optional*): that the model is patched for; `None` if it is not.
    """

    data_collator: Any
    model_config: ContextParallelConfig | None

    @property
    def collator_config(self) -> ContextParallelConfig | None:
        is_ours = isinstance(self.data_collator, DataCollatorForContextParallel)
        return self.data_collator.config if is_ours else None

    def differences(self) -> str:
        ours, theirs = self.collator_config, self.model_config
        if ours is None or theirs is None:
            return ""
        pairs = [(f.name, getattr(ours, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(ours)]
        different = [pair for pair in pairs if pair[1] != pair[2] and pair[0] != "timeout_seconds"]  # of groups only
        return "; ".join(f"{name}: collator {a!r}, model {b!r}" for name, a, b in different)


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


def _argument(name: str, is_wrong: Callable[[Any], Any], reason: str, fix: str) -> Check:
    """Of the training argument `name`; `is_wrong` takes its value."""
    what = f"{name}={{s.args.{name}!r}}: {reason}"
    return Check(name, Arguments, lambda s: is_wrong(getattr(s.args, name)), what, fix)


CHECKS = (
    Check(
        "trainer class",
        TrainerClass,
        TrainerClass.unsupported,
        "{s.trainer_class.__name__} is TRL's {found.__name__}, which does not run on packed or shared samples "
        "(cp_size={s.cp_size}): it compares or scores whole sequences, and a rank holds only parts of them.",
        "Supported are transformers.Trainer and trl.SFTTrainer. For preference pairs, rewards, rollouts and "
        "distillation leave the model unpatched and the trainer its own collator.",
    ),
    Check(
        "collator of the model",
        Pairing,
        lambda s: s.model_config and s.collator_config is None and type(s.data_collator).__name__,
        "The model is patched for cp_size={s.model_config.cp_size} (ring_degree={s.model_config.ring_degree}, "
        "ulysses_degree={s.model_config.ulysses_degree}), but {found} makes the batches and does not shard them.",
        "Pass data_collator=DataCollatorForContextParallel(config), or undo the patch with "
        "remove_context_parallel(model). Trainers with collators of their own (preference pairs, rewards) are not "
        "supported.",
    ),
    Check(
        "model of the collator",
        Pairing,
        lambda s: s.model_config is None and s.collator_config and s.collator_config.enabled,
        "The collator shards samples for cp_size={s.collator_config.cp_size} (ring_degree="
        "{s.collator_config.ring_degree}, ulysses_degree={s.collator_config.ulysses_degree}), but the model is not "
        "patched: its attention would not see the other ranks' tokens.",
        "Call apply_context_parallel(model, config) before building the Trainer.",
    ),
    Check(
        "configs",
        Pairing,
        Pairing.differences,
        "The collator and the model have different configs ({found}).",
        "Pass the same ContextParallelConfig to apply_context_parallel and DataCollatorForContextParallel.",
    ),
    # how samples are made
    Check(
        "per_device_train_batch_size",
        Arguments,
        lambda s: s.is_packed and s.args.per_device_train_batch_size != 1,
        "per_device_train_batch_size={s.args.per_device_train_batch_size}: a micro-step is one packed sample.",
        "Set it to 1; for more tokens a step raise max_tokens or gradient_accumulation_steps.",
    ),
    _argument(
        "auto_find_batch_size",
        lambda value: value,
        "memory is set by the tokens of a sample, not by its number of features.",
        "Set it to False and lower max_tokens.",
    ),
    _argument(
        "train_sampling_strategy",
        lambda value: value not in SAMPLING_STRATEGIES,
        "the packed loader orders samples itself.",
        f"Choose one of {', '.join(SAMPLING_STRATEGIES)}.",
    ),
    _argument(
        "n_gpu", lambda value: value > 1, "DataParallel would split the sample again.", "Start one process per GPU."
    ),
    # the loss and its precision
    _argument(
        "average_tokens_across_devices",
        lambda value: not value,
        "the ranks of a sample hold unequal parts of its targets, so the mean must be taken over all ranks.",
        "Leave it at True.",
    ),
    _argument(
        "neftune_noise_alpha",
        lambda value: value is not None,
        "its noise is scaled by the length of the local shard.",
        "Set it to None.",
    ),
    _argument(
        "use_liger_kernel",
        lambda value: value,
        "it replaces the model's forward, and with it the sharded loss.",
        "Set it to False: the loss is chunked already (loss_chunk_tokens).",
    ),
    *(
        _argument(
            name,
            lambda value: value,
            "evaluation before and after training would cast the weights that training goes on with.",
            "Use bf16=True or fp16=True, or load the model in that type.",
        )
        for name in ("fp16_full_eval", "bf16_full_eval")
    ),
    Check(
        "label_smoothing_factor of TRL",  # from whole logits, and labels that are not shifted
        Arguments,
        lambda s: s.is_sft and s.args.label_smoothing_factor > 0,
        "label_smoothing_factor={s.args.label_smoothing_factor} in SFTTrainer: it smooths logits of whole samples, "
        "and a rank has only parts.",
        "Set it to 0, or use ContextParallelTrainer, which smooths exactly.",
    ),
    Check(
        "compute_loss_func",
        Arguments,
        lambda s: s.others.get("compute_loss_func") is not None,
        "compute_loss_func: it is given labels that are not shifted, and the next label of a shard's token may be on "
        "another rank.",
        "Use the model's own loss; label_smoothing_factor is supported.",
    ),
    # evaluation
    _argument(
        "batch_eval_metrics",
        lambda value: value,
        "a batch of evaluation is a part of a packed sample.",
        "Set it to False, and keep little of each token with preprocess_logits_for_metrics.",
    ),
    _argument(
        "eval_do_concat_batches",
        lambda value: not value,
        "predictions come in the order of the data set, not in that of batches.",
        "Leave it at True.",
    ),
    # the model
    Check(
        "model_init",
        Arguments,
        lambda s: s.others.get("model_init") is not None,
        "model_init: every call would make a model that is not patched.",
        "Pass model=apply_context_parallel(model, config).",
    ),
    Check(
        "reentrant checkpointing",
        Arguments,
        _breaks_ddp,
        "use_reentrant=True with ddp_find_unused_parameters on: DDP fails in the backward of reentrant checkpointing "
        "when it looks for unused parameters.",
        "Set use_reentrant=False (activation_checkpointing_kwargs) or ddp_find_unused_parameters=False.",
    ),
)
