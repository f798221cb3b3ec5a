"""The keys of train.yaml, and of the options of `hf-cp train`: declared here once, for training, doctor and writer.

A training YAML fills three dataclasses at once: [`TrainSettings`], [`ContextParallelConfig`] and
`transformers.TrainingArguments`. Invariant: a key has one owner among them, and a file is read as the options that it
stands for, so `key: value` in YAML and `--key value` behind it mean the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_cp.config import ContextParallelConfig

__all__ = [
    "TrainSettings",
    "as_options",
    "make_training_arguments",
    "parse_settings",
    "read_train_file",
    "train_keys",
]


@dataclass(frozen=True)
class TrainSettings:
    """What `ContextParallelConfig` and `TrainingArguments` do not cover. The help of a key is its comment in YAML."""

    model_name_or_path: str = field(metadata={"help": "Folder or hub name of a model of a supported family."})
    dataset: str = field(metadata={"help": "JSONL file, folder of text files, or saved Hugging Face dataset."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out documents, in the same forms."})
    model_dtype: str = field(default="float32", metadata={"help": "Type that the weights are loaded in."})
    rope_parameters: dict | str | None = field(
        default=None, metadata={"help": "RoPE for longer documents, as in a model's config; rope_theta is kept."}
    )
    max_tokens: int = field(
        default=4096, metadata={"help": "Tokens in one packed sample; whole documents are packed into samples."}
    )
    overflow: str = field(default="error", metadata={"help": "Longer documents: error, truncate, split or drop."})
    cp_size: int | None = field(
        default=None,
        metadata={
            "help": "Processes that share one sample: the degrees follow from the model's heads; given ones shrink, "
            "the ring first. 1: every process has whole samples."
        },
    )
    expected_processes: int | None = field(
        default=None, metadata={"help": "Stop if the launcher started another number."}
    )
    expected_zero_stage: int | None = field(default=None, metadata={"help": "Stop if DeepSpeed is not really on."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters on all linear layers; 0: all weights."})
    lora_alpha: int = field(default=32, metadata={"help": "Adapters are scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout in front of the adapters."})
    proof_tokens: int = field(
        default=0, metadata={"help": "Most tokens of the proof's sample before training; 0 leaves the proof out."}
    )
    eval_every: int = field(
        default=0, metadata={"help": "Optimizer steps between evaluations; 0 is before and after only."}
    )
    required_drop_stderr: float = field(
        default=0.0, metadata={"help": "Standard errors by which the held-out loss must fall; 0 asks for nothing."}
    )
    record_dir: str | None = field(
        default=None, metadata={"help": "Folder for a record of every rank and step, which `hf-cp report` reads."}
    )
    profile_steps: list[int] = field(
        default_factory=list, metadata={"help": "Optimizer steps, from 1, of which traces go to record_dir."}
    )

    def __post_init__(self):
        if isinstance(self.rope_parameters, str):  # an option is text
            object.__setattr__(self, "rope_parameters", json.loads(self.rope_parameters))


class _Parser(HfArgumentParser):
    """argparse would end the process; commands have their own way to say what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}.\n  Correct it in train.yaml, or among the options.")


def train_keys() -> frozenset[str]:
    """Every key that a training YAML may have."""
    groups = (TrainSettings, ContextParallelConfig, TrainingArguments)
    return frozenset(field.name for group in groups for field in dataclasses.fields(group))


def read_train_file(path: Path) -> dict[str, Any]:
    """The keys and values of a training YAML; keys without a value are left out.

    Raises:
        ValueError: the file does not hold `key: value` lines.
    """
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}.\n  Write `key: value` lines.")
    return {key: value for key, value in values.items() if value is not None}


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Keys and values as options of a command line, which know the types (YAML reads 2e-5 as text).

    >>> as_options({"bf16": True, "learning_rate": "2e-5", "label_names": ["a", "b"]})
    ['--bf16', 'true', '--learning_rate', '2e-5', '--label_names', 'a', 'b']
    """
    options = []
    for key, value in values.items():
        listed = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        options += [f"--{key}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in listed)]
    return options


def parse_settings(arguments: Sequence[str]) -> tuple[TrainSettings, ContextParallelConfig, TrainingArguments]:
    """A training YAML, if the first argument is one, and options that win over it.

    Raises:
        ValueError: a key is unknown or missing, or a value does not have its type.
    """
    options = list(arguments)
    if options and not options[0].startswith("-"):
        options[:1] = as_options(read_train_file(Path(options[0])))
    parser = _Parser((TrainSettings, ContextParallelConfig, TrainingArguments), allow_abbrev=False, prog="hf-cp train")
    return parser.parse_args_into_dataclasses(options, look_for_args_file=False)


def make_training_arguments(values: Mapping[str, Any]) -> TrainingArguments:
    """The `TrainingArguments` among the keys of a training YAML; other keys are left out.

    Raises:
        ValueError: a value does not have its type, or values do not fit each other.
    """
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    options = as_options({key: value for key, value in values.items() if key in names})
    (arguments,) = _Parser(TrainingArguments, allow_abbrev=False).parse_args_into_dataclasses(
        options, look_for_args_file=False
    )
    return arguments
