"""Context parallelism for a Trainer that exists already: stock, TRL's SFTTrainer, or a user's own class.

The instance changes its class to one with [`ContextParallelTrainerMixin`] before its own, so afterwards it is what
building it with the mixin would have made, with the same numbers. Nothing is changed unless every check has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
)

from hf_cp import _compat
from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.documents import PreparedDocuments
from hf_cp.distributed.mesh import ContextParallelMesh, config_of
from hf_cp.models.patch import apply_context_parallel, context_parallel_state, remove_context_parallel
from hf_cp.training.backend import check_trainer
from hf_cp.training.checks import TrainerClass, refuse
from hf_cp.training.trainer import ContextParallelTrainerMixin

# What the mixin does itself, so that a user's version would not be asked; and the loss, whose exactness on a shard
# depends on how it is computed.
_REPLACED = (
    "get_train_dataloader",
    "get_eval_dataloader",
    "get_test_dataloader",
    "evaluation_loop",
    "prediction_step",
    "compute_loss",
)


def attach_context_parallel(
    trainer: Trainer,
    config_or_mesh: ContextParallelConfig | ContextParallelMesh | None = None,
    *,
    data_collator: DataCollatorForContextParallel | None = None,
    mesh: ContextParallelMesh | None = None,
) -> Trainer:
    """Gives a Trainer context parallelism, in place: patches its model, makes it a [`ContextParallelTrainerMixin`].

    Call it on every rank between building the Trainer and its first `train()` or `evaluate()`. If the config splits
    nothing (`cp_size` 1 without `force`) and no collator is given, the Trainer stays as it is.

    Args:
        trainer ([`~transformers.Trainer`]): an instance of it, of TRL's SFTTrainer, or of a class of your own that
            keeps their loss, evaluation and loaders.
        config_or_mesh (*optional*): how samples are split; by default as `data_collator` or the patched model says.
        data_collator (`DataCollatorForContextParallel`, *optional*): makes the samples. By default the Trainer's own
            collator is replaced by one that reads the features in the same way, and a sample holds
            `per_device_train_batch_size` of them. That is known for transformers' `default_data_collator`,
            `DataCollatorWithPadding`, `DataCollatorForSeq2Seq`, `DataCollatorWithFlattening` and
            `DataCollatorForLanguageModeling(mlm=False)`, and for SFTTrainer's. Pass one to pack documents.
        mesh (`ContextParallelMesh`, *optional*): a mesh to share, beside a config.

    Returns:
        The same Trainer.

    Raises:
        TypeError: it is not a Trainer.
        ValueError: the Trainer has begun, its class or collator cannot be kept, or the model or a setting of it does
            not work on shared samples. The Trainer is left as it was.
        RuntimeError: other processes run than were launched, or DeepSpeed or FSDP is silently off.
    """
    _check_trainer(trainer)
    config_or_mesh = _choose_config(trainer, config_or_mesh, data_collator)
    config = config_of(config_or_mesh)
    mesh = config_or_mesh if isinstance(config_or_mesh, ContextParallelMesh) else mesh
    if data_collator is None and not config.enabled and not _is_ours(trainer.data_collator):
        return trainer
    refuse(TrainerClass(type(trainer), config.cp_size))
    collator = data_collator or _collator_like(trainer, config)
    before, was_patched = dict(vars(trainer)), context_parallel_state(trainer.model) is not None
    trainer_class, keeps_columns = type(trainer), trainer.args.remove_unused_columns
    try:
        if not was_patched:
            apply_context_parallel(trainer.model, config, mesh=mesh)
        _change_class(trainer, collator)
    except Exception:
        trainer.__class__ = trainer_class
        vars(trainer).clear()
        vars(trainer).update(before)
        trainer.args.remove_unused_columns = keeps_columns
        if not was_patched:
            remove_context_parallel(trainer.model)
        raise
    return trainer


def _change_class(trainer: Trainer, collator: DataCollatorForContextParallel) -> None:
    """What the mixin's constructor does around that of the Trainer."""
    own = type(trainer)
    trainer.__class__ = type(f"ContextParallel{own.__name__}", (ContextParallelTrainerMixin, own), {})
    names = ("train_dataset", "eval_dataset", "model_init", "compute_loss_func", "compute_metrics")
    others = {name: getattr(trainer, name) for name in names}
    trainer._begin_samples(model=trainer.model, args=trainer.args, data_collator=collator, others=others)
    if trainer._loaders is not None:
        check_trainer(trainer)
    trainer._use_collator(collator)


def _check_trainer(trainer: Any) -> None:
    """Raises unless it is a Trainer that has not begun and whose own methods would still be used."""
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"attach_context_parallel takes a transformers.Trainer instance, not {trainer!r}.\n"
            "  Build the Trainer first; for a training loop of your own use ContextParallelPlugin."
        )
    name = type(trainer).__name__
    if isinstance(trainer, ContextParallelTrainerMixin):
        raise ValueError(f"{name} is context-parallel already. Call attach_context_parallel once, or not at all.")
    wrapped = trainer.model_wrapped is not trainer.model or _compat.is_prepared(trainer.model)
    if trainer.state.max_steps or wrapped or trainer.deepspeed is not None:
        raise ValueError(
            f"{name} has begun (step {trainer.state.global_step} of {trainer.state.max_steps}; model "
            f"{'prepared' if wrapped else 'not prepared'}), so its model is set up for whole samples.\n"
            "  Call attach_context_parallel right after building the Trainer. To go on with a run, build a new one, "
            "attach, and call train(resume_from_checkpoint=...)."
        )
    namespaces = list(_own_namespaces(trainer))
    replaced = [method for method in _REPLACED if any(method in namespace for namespace in namespaces)]
    if replaced:
        pronoun = "it" if len(replaced) == 1 else "them"
        raise ValueError(
            f"{name} has its own {', '.join(replaced)}, which would not be used, or not see whole samples, under "
            "context parallelism.\n"
            f"  Remove {pronoun}, or write class My{name}(ContextParallelTrainerMixin, {name}) and make {pronoun} "
            "work on this rank's part of a sample."
        )


def _own_namespaces(trainer: Trainer) -> Iterable[dict[str, Any]]:
    """Attributes of the instance and of the user's classes, down to transformers' or TRL's."""
    yield vars(trainer)
    for owner in type(trainer).__mro__:
        if owner.__module__.split(".")[0] in ("transformers", "trl"):
            return
        yield vars(owner)


def _is_ours(collator: Any) -> bool:
    return isinstance(collator, DataCollatorForContextParallel)


def _choose_config(trainer: Trainer, given: Any, collator: Any) -> ContextParallelConfig | ContextParallelMesh:
    if given is not None:
        return given
    state = context_parallel_state(trainer.model)
    if state is not None:
        return state.config
    collator = collator or trainer.data_collator
    if _is_ours(collator):
        return collator.config
    raise ValueError(
        f"How {type(trainer).__name__}'s samples are to be split is not known: no config was given, its model is not "
        f"patched, and its collator is {_name(collator)}.\n"
        "  Pass attach_context_parallel(trainer, ContextParallelConfig(ring_degree=...))."
    )


def _collator_like(trainer: Trainer, config: ContextParallelConfig) -> DataCollatorForContextParallel:
    """Ours, reading features as the Trainer's does. Only known collators are replaced, of exactly these types."""
    theirs = trainer.data_collator
    if _is_ours(theirs):
        return theirs
    tokenizer = trainer.processing_class
    settings: dict[str, Any] = {"config": config}
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        settings |= {"tokenizer": tokenizer, "pad_token_id": tokenizer.pad_token_id or 0}
    kind = type(theirs)
    if kind is DataCollatorForLanguageModeling and not theirs.mlm:
        return _CollatorForLanguageModeling(**settings, masked_token=theirs.tokenizer.pad_token_id)
    ignored = {DataCollatorForSeq2Seq: "label_pad_token_id", DataCollatorWithFlattening: "separator_id"}.get(kind)
    is_known = theirs is default_data_collator or kind in (DefaultDataCollator, DataCollatorWithPadding)
    is_sft = kind.__module__ == "trl.trainer.sft_trainer" and kind.__name__ == "DataCollatorForLanguageModeling"
    if is_known or is_sft or (ignored is not None and getattr(theirs, ignored) == IGNORE_INDEX):
        return DataCollatorForContextParallel(**settings)
    raise ValueError(
        f"{type(trainer).__name__} makes its batches with {_name(theirs)}, and what that does to labels is not known "
        f"here, so cp_size={config.cp_size} could train on something else.\n"
        "  Pass data_collator=DataCollatorForContextParallel(config, ...), and give the data set the labels that the "
        "old collator makes (-100 where there is no loss)."
    )


class _CollatorForLanguageModeling(DataCollatorForContextParallel):
    """As transformers' for causal models: every token is a label, except the padding token (often that which ends)."""

    def __init__(self, *args: Any, masked_token: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._masked_token = masked_token

    def prepare(self, features: Iterable[Any], *, allow_none: bool = False) -> PreparedDocuments:
        return super().prepare(map(self._with_labels, features), allow_none=allow_none)

    def _with_labels(self, feature: Any) -> dict[str, Any]:
        feature = dict(feature) if hasattr(feature, "keys") else {"input_ids": feature}
        labels = [IGNORE_INDEX if token == self._masked_token else token for token in map(int, feature["input_ids"])]
        return feature | {"labels": labels}


def _name(collator: Callable) -> str:
    return getattr(collator, "__name__", type(collator).__name__)
