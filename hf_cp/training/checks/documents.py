"""Data sets: no preference data, and no stream where all documents must be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from hf_cp.data.documents import check_columns
from hf_cp.data.streaming import is_stream
from hf_cp.training.checks.table import Check, Problem


@dataclass(frozen=True)
class Documents:
    """A data set, for training with these arguments or for evaluation.

    Args:
        dataset: of documents; `None` is fine.
        args (`TrainingArguments`, *optional*): of the training.
    """

    dataset: Any
    args: TrainingArguments | None = None

    @classmethod
    def each(cls, dataset: Any) -> list[Documents]:
        """Of a data set, or of a dict of them, for evaluation."""
        return [cls(member) for member in (dataset.values() if isinstance(dataset, dict) else [dataset])]

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    @property
    def is_stream(self) -> bool:
        return is_stream(self.dataset) or (self.dataset is not None and not hasattr(self.dataset, "__getitem__"))

    def first_columns(self) -> Mapping[str, Any]:
        """The first feature, where that costs nothing."""
        dataset = self.dataset
        is_held = isinstance(dataset, list | tuple) or hasattr(dataset, "column_names")
        is_filled = is_held and hasattr(dataset, "__len__") and len(dataset)
        return dataset[0] if is_filled and isinstance(dataset[0], Mapping) else {}


def _columns(subject: Documents) -> Problem | None:
    try:
        check_columns(subject.first_columns(), name=f"The {subject.name}")
    except ValueError as error:
        return Problem.of(error)
    return None


def _rereadable(subject: Documents) -> Problem | None:
    if not subject.is_stream or (is_stream(subject.dataset) and not hasattr(subject.dataset, "__next__")):
        return None
    return Problem(
        f"{subject.name} is a stream that can be read only once: a run could not be resumed, nor go on after its end.",
        "Pass an IterableDataset (each iteration begins anew), or a list of documents.",
    )


def _evaluated(subject: Documents) -> Problem | None:
    if subject.args is not None or not subject.is_stream:
        return None
    return Problem(
        f"{subject.name} is a stream: it has no length, so an evaluation over it would never end.",
        "Evaluate on a map-style dataset, e.g. list(dataset.take(1000)).",
    )


def _streamed(subject: Documents) -> Problem | None:
    args = subject.args
    if args is None or not subject.is_stream:
        return None
    unfit = {
        "dataloader_num_workers": (args.dataloader_num_workers, (0,)),
        "train_sampling_strategy": (args.train_sampling_strategy, ("random", "sequential")),
    }
    for setting, (value, allowed) in unfit.items():
        if value not in allowed:
            return Problem(
                f"{setting}={value!r} does not work with {subject.name}, a stream: it is read once, forwards, in the "
                "training process.",
                f"Set it to {' or '.join(map(repr, allowed))}, or pass a map-style dataset.",
            )
    return None


CHECKS = (
    Check("columns", Documents, _columns),
    Check("stream is read again", Documents, _rereadable),
    Check("stream for evaluation", Documents, _evaluated),
    Check("stream for training", Documents, _streamed),
)
