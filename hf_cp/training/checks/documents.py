"""Data sets: no preference data, and no stream where all documents must be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import TrainingArguments

from hf_cp.data.columns import check_columns
from hf_cp.data.streaming import is_stream
from hf_cp.training.checks.table import Check, Problem

STREAM_SAMPLING = ("random", "sequential")


class Unfit(NamedTuple):
    """A training argument that does not work with a stream."""

    setting: str
    value: Any
    allowed: str


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

    def preference_columns(self) -> Problem | None:
        try:
            check_columns(self.first_columns(), name=f"The {self.name}")
        except ValueError as error:
            return Problem(*str(error).split("\n  "))
        return None

    def unfit_for_stream(self) -> Unfit | None:
        """A training argument that needs all documents."""
        if self.args is None or not self.is_stream:
            return None
        for setting, allowed in (("dataloader_num_workers", (0,)), ("train_sampling_strategy", STREAM_SAMPLING)):
            value = getattr(self.args, setting)
            if value not in allowed:
                return Unfit(setting, value, " or ".join(map(repr, allowed)))
        return None


CHECKS = (
    Check("columns", Documents, Documents.preference_columns, "{found.what}", "{found.fix}"),
    Check(
        "stream is read again",
        Documents,
        lambda s: s.is_stream and (not is_stream(s.dataset) or hasattr(s.dataset, "__next__")),
        "{s.name} is a stream that can be read only once: a run could not be resumed, nor go on after its end.",
        "Pass an IterableDataset (each iteration begins anew), or a list of documents.",
    ),
    Check(
        "stream for evaluation",
        Documents,
        lambda s: s.is_stream and s.args is None,
        "{s.name} is a stream: it has no length, so an evaluation over it would never end.",
        "Evaluate on a map-style dataset, e.g. list(dataset.take(1000)).",
    ),
    Check(
        "stream for training",
        Documents,
        Documents.unfit_for_stream,
        "{found.setting}={found.value!r} does not work with {s.name}, a stream: it is read once, forwards, in the "
        "training process.",
        "Set it to {found.allowed}, or pass a map-style dataset.",
    ),
)
