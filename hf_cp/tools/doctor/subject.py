"""What `hf-cp doctor` looks at: a model, a recipe, documents, a checkpoint, a report, this machine.

Everything is read when a check first asks for it, once. What cannot be read raises the same exception object every
time, so that one cause is one failure ([`examine`] tells by the object). What was not given is [`NotGiven`].
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import numpy as np

from hf_cp.config import ContextParallelConfig
from hf_cp.data.files import documents_of_lengths, load_features
from hf_cp.planning.model_names import HUB_NAMES, has_sizes_only, load_config, name_of_sizes
from hf_cp.tools.doctor.check import NotGiven
from hf_cp.tools.options import config_from_arguments

SAMPLE = 1000  # documents that are tokenized
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LAUNCHER_PREFIXES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_", "TORCHELASTIC_")
CP_FIELDS = tuple(field.name for field in dataclasses.fields(ContextParallelConfig))


def part(read: Callable) -> property:
    """A property that is read once, with success or not."""

    @wraps(read)
    def get(self: Subject) -> Any:
        name = read.__name__
        if name in self._errors:
            raise self._errors[name]
        if name not in self._parts:
            try:
                self._parts[name] = read(self)
            except Exception as error:
                self._errors[name] = error
                raise
        return self._parts[name]

    return property(get)


class Subject:
    """See the module.

    Args:
        args (`argparse.Namespace`): the options of `hf-cp doctor`.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.environment = dict(os.environ)  # as the user has it; checks run as a single process
        self._parts: dict[str, Any] = {}
        self._errors: dict[str, Exception] = {}

    # The recipe

    @property
    def recipe(self) -> Path:
        """The folder.

        Raises:
            NotGiven: there is none.
        """
        if self.args.recipe is None:
            raise NotGiven("needs --recipe FOLDER")
        return self.args.recipe

    @part
    def train(self) -> dict[str, Any]:
        """The training YAML as it is written; keys without a value are left out."""
        import yaml

        if self.args.config is None and self.args.recipe is None:
            raise NotGiven("needs --recipe FOLDER or --config train.yaml")
        path = self.args.config or self.args.recipe / "train.yaml"
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}.\n  Write `key: value` lines.")
        return {key: value for key, value in values.items() if value is not None}

    @part
    def accelerate(self) -> Any:
        """The `ClusterConfig` of `accelerate launch`; accelerate itself refuses keys that it does not know."""
        from accelerate.commands.config.config_args import load_config_from_file

        return load_config_from_file(str(self.recipe / "accelerate.yaml"))

    @property
    def uses_deepspeed(self) -> bool:
        """Whether accelerate.yaml starts it."""
        return self.accelerate.distributed_type.value == "DEEPSPEED"

    @part
    def deepspeed(self) -> dict[str, Any]:
        """From the JSON file that accelerate.yaml names (from where the run starts), or from its own keys."""
        if not self.uses_deepspeed:
            raise NotGiven(
                f"no DeepSpeed: accelerate.yaml has distributed_type {self.accelerate.distributed_type.value}"
            )
        settings = self.accelerate.deepspeed_config
        named = settings.get("deepspeed_config_file")
        if named is None:
            return _from_accelerate(settings)
        path = Path(named) if Path(named).exists() else self.recipe / Path(named).name
        if not path.exists():
            raise ValueError(
                f"deepspeed_config_file={named} does not exist (looked in {Path.cwd()} and {self.recipe}).\n"
                "  Paths in accelerate.yaml count from the folder where the run starts."
            )
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{path} holds a {type(config).__name__}.\n  Write a JSON object.")
        return config

    @property
    def zero_stage(self) -> int:
        """Of the DeepSpeed config; 0 where it names none."""
        return self.deepspeed.get("zero_optimization", {}).get("stage", 0)

    @part
    def training(self) -> Any:
        """`TrainingArguments` of train.yaml, on the CPU where there is no accelerator."""
        import torch
        from transformers import HfArgumentParser, TrainingArguments

        names = {field.name for field in dataclasses.fields(TrainingArguments)}
        values = {"output_dir": "outputs"} | {key: value for key, value in self.train.items() if key in names}
        if not torch.accelerator.is_available():
            values["use_cpu"] = True
        parser = HfArgumentParser(TrainingArguments, allow_abbrev=False)
        parser.error = _refuse  # argparse would end the process
        (arguments,) = parser.parse_args_into_dataclasses(as_options(values), look_for_args_file=False)
        return arguments

    @part
    def cp(self) -> ContextParallelConfig:
        """Degrees and the rest: options of the command win over train.yaml; `cp_size` chooses or shrinks degrees."""
        if self.args.config is None and self.args.recipe is None:
            return config_from_arguments(self.args)
        given = {name: getattr(self.args, name) for name in CP_FIELDS if getattr(self.args, name, None) is not None}
        config = ContextParallelConfig(**{name: self.train[name] for name in CP_FIELDS if name in self.train} | given)
        size = self.train.get("cp_size")
        if size is None or size == config.cp_size:
            return config
        if config.cp_size > 1:
            return config.with_cp_size(size, None)
        return config.with_cp_size(size, self.model_config, min(size, self.ranks_per_node or size))

    # The processes

    @property
    def world_size(self) -> int:
        """Of the launch (with --launch), of accelerate.yaml, of train.yaml's `expected_processes`, or one group."""
        if self.args.launch:
            return int(self.environment["WORLD_SIZE"])
        if self.args.recipe is not None:
            return self.accelerate.num_processes
        with contextlib.suppress(NotGiven):
            stated = self.train.get("expected_processes") or self.train.get("cp_size")
            if stated:
                return stated
        return self.cp.cp_size

    @property
    def num_machines(self) -> int:
        """Of the launch (with --launch), of accelerate.yaml, or one."""
        if self.args.launch and "LOCAL_WORLD_SIZE" in self.environment:
            return max(1, self.world_size // int(self.environment["LOCAL_WORLD_SIZE"]))
        return self.accelerate.num_machines if self.args.recipe is not None else 1

    @property
    def ranks_per_node(self) -> int:
        """Processes of a machine."""
        return self.world_size // max(1, self.num_machines)

    @property
    def dp_size(self) -> int:
        """Groups that have rows of their own.

        Raises:
            NotGiven: the processes do not divide into groups (another check says so).
        """
        if self.world_size % self.cp.cp_size:
            raise NotGiven(f"{self.world_size} processes do not divide into groups of {self.cp.cp_size}, see above")
        return self.world_size // self.cp.cp_size

    @property
    def wants_cpu(self) -> bool:
        """Whether the recipe says so; without one, whether there is nothing else."""
        import torch

        if self.args.recipe is not None and self.accelerate.use_cpu:
            return True
        with contextlib.suppress(NotGiven):
            return bool(self.train.get("use_cpu", False))
        return not torch.accelerator.is_available()

    # The model

    @part
    def model_config(self) -> Any:
        """With the RoPE of train.yaml, if it changes that."""
        from hf_cp.models.rope import set_rope_parameters

        try:
            config = load_config(name_of_sizes(self.model_name))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"The config of the model {self.model_name!r} cannot be read here: {reason}\n"
                "  Give --model with a folder or a config.json, or download the model first."
            ) from error
        with contextlib.suppress(NotGiven):
            if "rope_parameters" in self.train:
                set_rope_parameters(config, self.train["rope_parameters"])
        return config

    @property
    def model_name(self) -> str:
        """`--model`, else that of train.yaml.

        Raises:
            NotGiven: neither is there.
        """
        if self.args.model is not None:
            return self.args.model
        name = self.train.get("model_name_or_path")
        if name is None:
            raise NotGiven("needs --model, or model_name_or_path in train.yaml")
        return str(name)

    @property
    def loaded_name(self) -> str:
        """What the run loads weights by: a `--model` that has sizes only stands in for that of train.yaml."""
        if self.args.model is not None and has_sizes_only(self.args.model):
            with contextlib.suppress(NotGiven):
                return str(self.train.get("model_name_or_path", self.args.model))
        return self.model_name

    @property
    def dtype_name(self) -> str:
        """What attention computes in: of autocast, else of the weights."""
        with contextlib.suppress(NotGiven):
            names = {"bf16": "bfloat16", "fp16": "float16"}
            chosen = next((name for key, name in names.items() if self.train.get(key)), None)
            return chosen or str(self.train.get("model_dtype", "float32"))
        return "bfloat16"

    @part
    def meta_model(self) -> Any:
        """The whole model without memory for its weights, in the type that it would be loaded in."""
        import torch
        from transformers import AutoModelForCausalLM

        dtype = torch.float32
        with contextlib.suppress(NotGiven):
            dtype = getattr(torch, str(self.train.get("model_dtype", "float32")))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.model_config, dtype=dtype)

    # The documents

    @part
    def features(self) -> Sequence[Any]:
        """All features of the data set, not tokenized."""
        if self.args.data is not None:
            return load_features(self.args.data)
        name = self.train.get("dataset")
        if name is None:
            raise NotGiven("needs --data FILE, or dataset in train.yaml")
        return load_features(name)

    @part
    def tokenizer(self) -> Any:
        """Of the model (or as given); `None` where it has none, or none that can be read here."""
        from hf_cp.verify.inputs import load_tokenizer

        name = str(self.args.tokenizer or self.model_name)
        if name.lower() in HUB_NAMES and not Path(name).is_dir():  # sizes only
            return None
        try:
            return load_tokenizer(name)
        except OSError:
            if self.args.tokenizer is not None:
                raise
            return None  # documents of text are then refused, with the reason

    @part
    def collator(self) -> Any:
        """As the run makes it, for rank 0 of a row."""
        from hf_cp.data.collator import DataCollatorForContextParallel

        overflow, max_tokens = "error", self.args.max_tokens
        with contextlib.suppress(NotGiven):
            max_tokens = max_tokens or self.train.get("max_tokens")
            overflow = self.train.get("overflow", "error") if max_tokens else "error"
        tokenizer = None
        with contextlib.suppress(NotGiven):
            tokenizer = self.tokenizer if self._reads_documents else None  # it may have to be downloaded
        return DataCollatorForContextParallel(
            self.cp, cp_rank=0, max_tokens=max_tokens, overflow=overflow, tokenizer=tokenizer
        )

    @property
    def _reads_documents(self) -> bool:
        """Whether there are any, for training or evaluation, that a tokenizer could be needed for."""
        names = [self.args.data]
        with contextlib.suppress(NotGiven):
            names += [self.train.get("dataset"), self.train.get("eval_dataset")]
        return any(name is not None and Path(name).exists() for name in names)

    @part
    def packed(self) -> Any:
        """Rows of the first documents, by the collator of the run."""
        from hf_cp.data.packed import PackedDataset

        count = min(SAMPLE, len(self.features))
        return PackedDataset([self.features[index] for index in range(count)], collator=self.collator)

    @cached_property
    def synthetic(self) -> Any:
        """Rows of made-up documents of log-normal lengths, where the real ones cannot be read."""
        from hf_cp.data.packed import PackedDataset

        longest = self.collator.max_tokens or 4096
        lengths = np.random.default_rng(0).lognormal(np.log(longest / 8), 1.0, 16).astype(int).clip(1, longest)
        documents = documents_of_lengths(lengths.tolist())
        for number, document in enumerate(documents):
            document.input_ids[:] = (np.arange(len(document)) + number) % 97
        return PackedDataset(documents, collator=self.collator)


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


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, this process knows of no launcher and of no request of one; the environment is put back afterwards."""
    kept = dict(os.environ)
    for name in kept:
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _from_accelerate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config from the keys that accelerate.yaml may hold itself."""
    from hf_cp.training.deepspeed import GATHER_WEIGHTS

    zero = {"stage": int(settings.get("zero_stage", 2)), GATHER_WEIGHTS: settings.get("zero3_save_16bit_model", False)}
    config: dict[str, Any] = {"zero_optimization": zero}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    return config | {name: settings[name] for name in names if name in settings}


def _refuse(message: str) -> None:
    raise ValueError(f"{message}.\n  Correct it in train.yaml.")
