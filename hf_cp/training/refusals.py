"""What the Trainer is asked for, held against what is exact on shared rows.

Every check runs in the constructor, on every rank, before anything is communicated or written. A setting that would
change the numbers with cp_size is refused with the reason, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.documents import check_columns
from hf_cp.data.streaming import is_stream
from hf_cp.models.patch import context_parallel_state
from hf_cp.training.checks import check_parallelism_config, is_fsdp_launched
from hf_cp.training.precision import sixteen_bit_weights
from hf_cp.training.sft import check_trainer_class, is_sft

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")


class Refusal(NamedTuple):
    """A setting that is refused: whether it is set, its value as the user wrote it, why it cannot work, what to do."""

    applies: bool
    setting: str
    reason: str
    change: str


def check_request(
    *,
    trainer_class: type,
    model: Any,
    args: TrainingArguments | None,
    data_collator: Any,
    others: dict[str, Any],
) -> bool:
    """Raises unless model, collator and arguments fit each other.

    Args:
        trainer_class (`type`): of the Trainer.
        model: of the Trainer.
        args (`TrainingArguments`, *optional*): of the Trainer.
        data_collator: of the Trainer.
        others (`dict`): the Trainer's other arguments.

    Returns:
        `bool`: whether the rows come from our loader (context parallelism or packing); otherwise the stock Trainer
            runs.

    Raises:
        ValueError: in three parts.
    """
    state = context_parallel_state(model) if isinstance(model, nn.Module) else None
    is_ours = isinstance(data_collator, DataCollatorForContextParallel)
    if state is not None or is_ours:
        check_trainer_class(trainer_class, cp_size=(data_collator if is_ours else state).config.cp_size)
    if state is not None and not is_ours:
        raise ValueError(
            f"The model is patched for {_show(state.config)}, but {type(data_collator).__name__} makes the batches "
            "and does not shard them.\n"
            "  Pass data_collator=DataCollatorForContextParallel(config), or undo the patch with "
            "remove_context_parallel(model). Trainers with collators of their own (preference pairs, rewards) are not "
            "supported."
        )
    if not is_ours:
        return False
    if model is not None:  # model_init is refused below
        _check_same_config(state, data_collator.config)
    own_rows = data_collator.config.enabled or data_collator.max_tokens is not None
    if own_rows:
        args = args or TrainingArguments()
        check_parallelism_config(args.parallelism_config)
        is_packed = data_collator.max_tokens is not None
        checks = _row_refusals(args, packed=is_packed) + _loss_refusals(args) + _other_refusals(model, args, others)
        if is_sft(trainer_class):
            checks += _sft_refusals(args)
        if others.get("peft_config") is None:  # else SFTTrainer freezes the model's weights; checked after that
            checks.append(_gradient_refusal(model, args, data_collator.config))
        _raise_if_any(checks)
        check_datasets(others.get("train_dataset"), args=args)
        check_datasets(others.get("eval_dataset"))
    return own_rows


def check_gradient_sums(model: Any, args: TrainingArguments, config: ContextParallelConfig) -> None:
    """Raises ValueError if gradients of the ranks of a row would be added up in 16 bits."""
    _raise_if_any([_gradient_refusal(model, args, config)])


def _raise_if_any(checks: list[Refusal]) -> None:
    refusals = [check for check in checks if check.applies]
    if refusals:
        lines = [f"{r.setting}: {r.reason}\n    {r.change}" for r in refusals]
        raise ValueError("These settings do not work on packed or shared rows:\n  " + "\n  ".join(lines))


def check_datasets(*datasets: Any, args: TrainingArguments | None = None) -> None:
    """Refuses preference data, and streams where all documents must be known: for evaluation, or with these `args`."""
    for dataset in datasets:
        for member in dataset.values() if isinstance(dataset, dict) else [dataset]:
            check_columns(_first_columns(member), name=f"The {type(member).__name__}")
            if is_stream(member) or (member is not None and not hasattr(member, "__getitem__")):
                _check_stream(member, args)


def _check_stream(stream: Any, args: TrainingArguments | None) -> None:
    name = type(stream).__name__
    if not is_stream(stream) or hasattr(stream, "__next__"):
        raise ValueError(
            f"{name} is a stream that can be read only once: a run could not be resumed, nor go on after its end.\n"
            "  Pass an IterableDataset (each iteration begins anew), or a list of documents."
        )
    if args is None:
        raise ValueError(
            f"{name} is a stream: it has no length, so an evaluation over it would never end.\n"
            "  Evaluate on a map-style dataset, e.g. list(dataset.take(1000))."
        )
    unfit = {
        "dataloader_num_workers": (args.dataloader_num_workers, 0),
        "train_sampling_strategy": (args.train_sampling_strategy, ("random", "sequential")),
    }
    for setting, (value, allowed) in unfit.items():
        if value != allowed and (isinstance(allowed, int) or value not in allowed):
            raise ValueError(
                f"{setting}={value!r} does not work with {name}, a stream: it is read once, forwards, in the training "
                f"process.\n  Set it to {allowed!r}, or pass a map-style dataset."
            )


def _first_columns(dataset: Any) -> Mapping[str, Any]:
    """The first feature, where that costs nothing."""
    is_held = isinstance(dataset, list | tuple) or hasattr(dataset, "column_names")
    is_filled = is_held and hasattr(dataset, "__len__") and len(dataset)
    return dataset[0] if is_filled and isinstance(dataset[0], Mapping) else {}


def _check_same_config(state: Any, collator_config: ContextParallelConfig) -> None:
    if state is None:
        if collator_config.enabled:
            raise ValueError(
                f"The collator shards rows for {_show(collator_config)}, but the model is not patched: its attention "
                "would not see the other ranks' tokens.\n"
                "  Call apply_context_parallel(model, config) before building the Trainer."
            )
        return
    theirs = dataclasses.asdict(state.config)
    differing = [
        f"{name}: collator {ours!r}, model {theirs[name]!r}"
        for name, ours in dataclasses.asdict(collator_config).items()
        if ours != theirs[name]
    ]
    if differing:
        raise ValueError(
            f"The collator and the model have different configs ({'; '.join(differing)}).\n"
            "  Pass the same ContextParallelConfig to apply_context_parallel and DataCollatorForContextParallel."
        )


def _row_refusals(args: TrainingArguments, *, packed: bool) -> list[Refusal]:
    """Training arguments about rows that are refused, with whether they are set."""
    micro, loading = args.per_device_train_batch_size, args.accelerator_config
    return [
        Refusal(
            packed and micro != 1,
            f"per_device_train_batch_size={micro}",
            "a micro-step is one packed row.",
            "Set it to 1; for more tokens a step raise max_tokens or gradient_accumulation_steps.",
        ),
        Refusal(
            args.auto_find_batch_size,
            "auto_find_batch_size=True",
            "memory is set by the tokens of a row, not by its number of features.",
            "Set it to False and lower max_tokens.",
        ),
        Refusal(
            args.train_sampling_strategy not in SAMPLING_STRATEGIES,
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "the packed loader orders rows itself.",
            f"Choose one of {', '.join(SAMPLING_STRATEGIES)}.",
        ),
        Refusal(
            bool(loading.dispatch_batches) or bool(loading.split_batches),
            f"accelerator_config dispatch_batches={loading.dispatch_batches}, split_batches={loading.split_batches}",
            "every rank makes its own shard of a row.",
            "Leave both unset.",
        ),
        Refusal(
            args.n_gpu > 1,
            f"n_gpu={args.n_gpu}",
            "DataParallel would split the row again.",
            "Start one process per GPU.",
        ),
    ]


def _loss_refusals(args: TrainingArguments) -> list[Refusal]:
    """Training arguments about the loss and its precision that are refused, with whether they are set."""
    return [
        Refusal(
            not args.average_tokens_across_devices,
            "average_tokens_across_devices=False",
            "the ranks of a row hold unequal parts of its targets, so the mean must be taken over all ranks.",
            "Leave it at True.",
        ),
        Refusal(
            args.neftune_noise_alpha is not None,
            f"neftune_noise_alpha={args.neftune_noise_alpha}",
            "its noise is scaled by the length of the local shard.",
            "Set it to None.",
        ),
        Refusal(
            args.use_liger_kernel,
            "use_liger_kernel=True",
            "it replaces the model's forward, and with it the sharded loss.",
            "Set it to False: the loss is chunked already (loss_chunk_tokens).",
        ),
        Refusal(
            args.fp16_full_eval or args.bf16_full_eval,
            f"fp16_full_eval={args.fp16_full_eval}, bf16_full_eval={args.bf16_full_eval}",
            "evaluation before and after training would cast the weights that training goes on with.",
            "Use bf16=True or fp16=True, or load the model in that type.",
        ),
    ]


def _other_refusals(model: Any, args: TrainingArguments, others: dict[str, Any]) -> list[Refusal]:
    """What else the Trainer may have been given."""
    given = others.get
    is_reentrant = args.activation_checkpointing and (args.activation_checkpointing_kwargs or {}).get("use_reentrant")
    # for models that are not PreTrainedModel the Trainer makes DDP look for unused parameters
    finds_unused = args.ddp_find_unused_parameters or (
        args.ddp_find_unused_parameters is None and not isinstance(model, PreTrainedModel)
    )
    return [
        Refusal(
            bool(is_reentrant and finds_unused and args.world_size > 1 and args.deepspeed_plugin is None),
            "use_reentrant=True with ddp_find_unused_parameters on",
            "DDP fails in the backward of reentrant checkpointing when it looks for unused parameters.",
            "Set use_reentrant=False (activation_checkpointing_kwargs) or ddp_find_unused_parameters=False.",
        ),
        Refusal(
            given("compute_loss_func") is not None,
            "compute_loss_func",
            "it is given labels that are not shifted, and the next label of a shard's token may be on another rank.",
            "Use the model's own loss; label_smoothing_factor is supported.",
        ),
        Refusal(
            args.batch_eval_metrics,
            "batch_eval_metrics=True",
            "a batch of evaluation is a part of a packed row.",
            "Set it to False, and keep little of each token with preprocess_logits_for_metrics.",
        ),
        Refusal(
            not args.eval_do_concat_batches,
            "eval_do_concat_batches=False",
            "predictions come in the order of the data set, not in that of batches.",
            "Leave it at True.",
        ),
        Refusal(
            given("model_init") is not None,
            "model_init",
            "every call would make a model that is not patched.",
            "Pass model=apply_context_parallel(model, config).",
        ),
    ]


def _sft_refusals(args: TrainingArguments) -> list[Refusal]:
    """What SFTTrainer computes from whole logits or labels that are not shifted."""
    return [
        Refusal(
            args.label_smoothing_factor > 0,
            f"label_smoothing_factor={args.label_smoothing_factor} in SFTTrainer",
            "it smooths logits of whole rows, and a rank has only parts.",
            "Set it to 0, or use ContextParallelTrainer, which smooths exactly.",
        ),
    ]


def _gradient_refusal(model: Any, args: TrainingArguments, config: ContextParallelConfig) -> Refusal:
    """DDP reduces gradients in the type of the weights, as does FSDP in a run without mixed precision."""
    uses_fsdp = args.fsdp_plugin_args is not None or is_fsdp_launched()
    is_safe = args.deepspeed_plugin is not None or (uses_fsdp and (args.bf16 or args.fp16))
    names = sixteen_bit_weights(model) if config.cp_size > 1 and not is_safe else []
    return Refusal(
        bool(names),
        f"{len(names)} trainable parameters in 16 bits" + (f" ({names[0]}, ...)" if names else ""),
        f"the cp_size={config.cp_size} ranks of a row hold parts of one gradient, which must be added up in fp32.",
        "Keep trainable weights in fp32 and set bf16=True; frozen weights may stay in 16 bits.",
    )


def _show(config: ContextParallelConfig) -> str:
    return f"cp_size={config.cp_size} (ring_degree={config.ring_degree}, ulysses_degree={config.ulysses_degree})"
