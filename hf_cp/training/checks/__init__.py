"""Everything that is refused before a run begins, in one table: [`CHECKS`].

The Trainer and the plugin raise from it ([`refuse`]), on every rank and before anything is communicated or written;
`hf-cp doctor` prints what it says about a recipe ([`problems`]). A setting that would change the numbers with cp_size
is refused with the reason, never ignored.

| subject | module | looked at |
|---|---|---|
| [`TrainerClass`], [`Pairing`], [`Arguments`] | arguments.py | what the Trainer is given |
| [`Documents`] | documents.py | a data set |
| [`OtherParallelism`], [`DataLoading`], [`PreparedLoader`], [`Launch`] | launch.py | what accelerate runs |
| [`GradientSums`] | gradients.py | the type in which gradients are added up |
| [`ZeroConfig`], [`ZeroRun`] | zero.py | a DeepSpeed config, alone and for a run |
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainingArguments

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.models.patch import context_parallel_state
from hf_cp.training.checks import arguments, documents, gradients, launch, zero
from hf_cp.training.checks.arguments import Arguments, Pairing, TrainerClass
from hf_cp.training.checks.documents import Documents
from hf_cp.training.checks.gradients import GradientSums, sixteen_bit_weights
from hf_cp.training.checks.launch import DataLoading, Launch, OtherParallelism, PreparedLoader, is_asked_for
from hf_cp.training.checks.table import Check, Problem
from hf_cp.training.checks.zero import ZeroConfig, ZeroRun
from hf_cp.training.sft import is_sft

__all__ = [
    "CHECKS",
    "Arguments",
    "Check",
    "DataLoading",
    "Documents",
    "GradientSums",
    "Launch",
    "OtherParallelism",
    "Pairing",
    "PreparedLoader",
    "Problem",
    "TrainerClass",
    "ZeroConfig",
    "ZeroRun",
    "first_problem",
    "is_asked_for",
    "problems",
    "refuse",
    "refuse_request",
    "sixteen_bit_weights",
]

CHECKS: tuple[Check, ...] = (
    *arguments.CHECKS,
    *documents.CHECKS,
    *launch.CHECKS,
    *gradients.CHECKS,
    *zero.CHECKS,
)


def problems(*subjects: Any) -> list[Problem]:
    """What the checks find, in the order of the subjects, then of the table."""
    found = (check.find(subject) for subject in subjects for check in CHECKS if isinstance(subject, check.subject))
    return [problem for problem in found if problem is not None]


def first_problem(*subjects: Any) -> Problem | None:
    """The first of [`problems`]."""
    return next(iter(problems(*subjects)), None)


def refuse(*subjects: Any) -> None:
    """Raises if the checks find something: what, the numbers, the fix; all problems at once.

    Raises:
        ValueError, RuntimeError: as the first problem says.
    """
    found = problems(*subjects)
    if len(found) == 1:
        raise found[0].error(str(found[0]))
    if found:
        lines = [f"{problem.what}\n    {problem.fix}" for problem in found]
        raise found[0].error(f"{len(found)} settings do not work with context parallelism:\n  " + "\n  ".join(lines))


def refuse_request(
    trainer_class: type, model: Any, args: TrainingArguments | None, collator: Any, others: dict
) -> bool:
    """Raises unless what the Trainer is given fits together; returns whether samples come from our loader.

    That is so with context parallelism or packing; otherwise the stock Trainer runs.
    """
    state = context_parallel_state(model) if isinstance(model, nn.Module) else None
    is_ours = isinstance(collator, DataCollatorForContextParallel)
    if state is None and not is_ours:
        return False
    config = collator.config if is_ours else state.config
    refuse(TrainerClass(trainer_class, config.cp_size))
    if model is not None:  # model_init is refused below
        refuse(Pairing(collator, None if state is None else state.config))
    is_packed = collator.max_tokens is not None
    if not config.enabled and not is_packed:
        return False
    args = args or TrainingArguments()
    # with adapters to come, SFTTrainer freezes the model's weights; they are looked at after that
    trained = model if others.get("peft_config") is None else None
    refuse(
        OtherParallelism.of(args.parallelism_config),
        DataLoading.of(args.accelerator_config),
        Arguments(args, is_packed, model, is_sft(trainer_class), others),
        GradientSums.of_arguments(args, trained, cp_size=config.cp_size),
        Documents(others.get("train_dataset"), args),
        *Documents.each(others.get("eval_dataset")),
    )
    return True
