"""What `hf-cp doctor` looks at: a model, a recipe, documents, a checkpoint, a report, this machine.

Everything is read when a check first asks for it, once. What cannot be read raises the same exception object every
time, so that one cause is one failure ([`examine`] tells by the object). What was not given is [`NotGiven`].
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.files import documents_of_lengths, load_features
from hf_cp.models.rope import set_rope_parameters
from hf_cp.planning.model_names import HUB_NAMES, has_sizes_only, load_config, name_of_sizes
from hf_cp.recipes.settings import make_training_arguments, read_train_file
from hf_cp.tools.doctor.check import NotGiven
from hf_cp.tools.options import config_from_arguments
from hf_cp.training.checks.zero import GATHER_WEIGHTS
from hf_cp.verify.inputs import load_tokenizer

NEEDS_TRAIN = "needs --recipe FOLDER or --config train.yaml"
FIRST = 1000  # documents that are tokenized
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
LAUNCHER_PREFIXES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_", "TORCHELASTIC_")
CP_FIELDS = tuple(field.name for field in dataclasses.fields(ContextParallelConfig))


def part(read: Callable) -> property:
    """A property that is read once, with success or not."""

    @wraps(read)
    def get(self: Subject) -> Any:
        if read.__name__ not in self._parts:
            try:
                self._parts[read.__name__] = read(self), None
            except Exception as error:
                self._parts[read.__name__] = None, error
        value, error = self._parts[read.__name__]
        if error is not None:
            raise error
        return value

    return property(get)


class Subject:
    """See the module; `args` are the options of `hf-cp doctor`."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.environment = dict(os.environ)  # as the user has it; checks run as a single process
        self.has_recipe = args.recipe is not None
        self.has_train = self.has_recipe or args.config is not None
        self._parts: dict[str, tuple[Any, Exception | None]] = {}

    # The recipe

    @part
    def train(self) -> dict[str, Any]:
        """The training YAML as it is written, without keys that have no value; empty where there is no file."""
        return read_train_file(self.args.config or self.args.recipe / "train.yaml") if self.has_train else {}

    @part
    def training(self) -> TrainingArguments:
        """Those of train.yaml, on the CPU where there is no accelerator."""
        if not self.has_train:
            raise NotGiven(NEEDS_TRAIN)
        values = {"output_dir": "outputs"} | self.train
        return make_training_arguments(values if torch.accelerator.is_available() else values | {"use_cpu": True})

    @part
    def accelerate(self) -> Any:
        """The `ClusterConfig` of `accelerate launch`; accelerate itself refuses keys that it does not know."""
        if not self.has_recipe:
            raise NotGiven("needs --recipe FOLDER")
        return load_config_from_file(str(self.args.recipe / "accelerate.yaml"))

    @property
    def backend(self) -> str:
        """The distributed type in accelerate.yaml."""
        return self.accelerate.distributed_type.value

    @part
    def deepspeed(self) -> dict[str, Any]:
        """From the JSON file that accelerate.yaml names (from where the run starts), or from its own keys."""
        if self.backend != "DEEPSPEED":
            raise NotGiven(f"no DeepSpeed: accelerate.yaml has distributed_type {self.backend}")
        settings, recipe = self.accelerate.deepspeed_config, self.args.recipe
        named = settings.get("deepspeed_config_file")
        if named is None:
            return _from_accelerate(settings)
        path = Path(named) if Path(named).exists() else recipe / Path(named).name
        if not path.exists():
            raise ValueError(
                f"deepspeed_config_file={named} does not exist (looked in {Path.cwd()} and {recipe}).\n"
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
    def cp(self) -> ContextParallelConfig:
        """Degrees and the rest: options of the command win over train.yaml; `cp_size` chooses or shrinks degrees."""
        if not self.has_train:
            return config_from_arguments(self.args)
        given = {name: getattr(self.args, name) for name in CP_FIELDS if getattr(self.args, name, None) is not None}
        config = ContextParallelConfig(**{name: self.train[name] for name in CP_FIELDS if name in self.train} | given)
        size = self.train.get("cp_size")
        if size is None or size == config.cp_size:
            return config
        model = None if config.cp_size > 1 else self.model_config  # degrees that are given need no heads
        return config.with_cp_size(size, model, min(size, self.ranks_per_node or size))

    # The processes

    @property
    def world_size(self) -> int:
        """Of the launch (with --launch), of accelerate.yaml, of train.yaml's `expected_processes`, or one group."""
        if self.args.launch:
            return int(self.environment["WORLD_SIZE"])
        if self.has_recipe:
            return self.accelerate.num_processes
        return self.train.get("expected_processes") or self.train.get("cp_size") or self.cp.cp_size

    @property
    def num_machines(self) -> int:
        """Of the launch (with --launch), of accelerate.yaml, or one."""
        if self.args.launch and "LOCAL_WORLD_SIZE" in self.environment:
            return max(1, self.world_size // int(self.environment["LOCAL_WORLD_SIZE"]))
        return self.accelerate.num_machines if self.has_recipe else 1

    @property
    def ranks_per_node(self) -> int:
        """Processes of a machine."""
        return self.world_size // max(1, self.num_machines)

    @property
    def dp_size(self) -> int:
        """Groups that have samples of their own."""
        if self.world_size % self.cp.cp_size:
            raise NotGiven(f"{self.world_size} processes do not divide into groups of {self.cp.cp_size}, see above")
        return self.world_size // self.cp.cp_size

    @property
    def wants_cpu(self) -> bool:
        """Whether the recipe says so; without one, whether there is nothing else."""
        if self.has_recipe and self.accelerate.use_cpu:
            return True
        return bool(self.train.get("use_cpu", False)) if self.has_train else not torch.accelerator.is_available()

    # The model

    @property
    def model_name(self) -> str:
        """`--model`, else that of train.yaml."""
        name = self.args.model or self.train.get("model_name_or_path")
        if name is None:
            raise NotGiven("needs --model, or model_name_or_path in train.yaml")
        return str(name)

    @property
    def loaded_name(self) -> str:
        """What the run loads weights by: that of train.yaml where `--model` has sizes only."""
        if self.args.model is not None and has_sizes_only(self.args.model):
            return str(self.train.get("model_name_or_path", self.args.model))
        return self.model_name

    @part
    def model_config(self) -> Any:
        """With the RoPE of train.yaml, if it changes that."""
        try:
            config = load_config(name_of_sizes(self.model_name))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"The config of the model {self.model_name!r} cannot be read here: {reason}\n"
                "  Give --model with a folder or a config.json, or download the model first."
            ) from error
        if "rope_parameters" in self.train:
            set_rope_parameters(config, self.train["rope_parameters"])
        return config

    @property
    def weights_dtype(self) -> str:
        """The type that the weights are loaded in."""
        return str(self.train.get("model_dtype", "float32"))

    @property
    def dtype_name(self) -> str:
        """What attention computes in: of autocast, else of the weights."""
        names = {"bf16": "bfloat16", "fp16": "float16"}
        chosen = next((name for key, name in names.items() if self.train.get(key)), None)
        return chosen or (self.weights_dtype if self.has_train else "bfloat16")

    @part
    def meta_model(self) -> Any:
        """The whole model without memory for its weights. Attention dropout has a check of its own: here it is 0."""
        config = copy.deepcopy(self.model_config)
        config.attention_dropout = 0.0
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.weights_dtype))

    # The documents

    @part
    def features(self) -> Sequence[Any]:
        """All features of the data set, not tokenized."""
        name = self.args.data or self.train.get("dataset")
        if name is None:
            raise NotGiven("needs --data FILE, or dataset in train.yaml")
        return load_features(name)

    @part
    def tokenizer(self) -> Any:
        """Of the model (or as given); `None` where it has none, or none that can be read here."""
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
    def collator(self) -> DataCollatorForContextParallel:
        """As the run makes it, for rank 0 of a group."""
        max_tokens = self.args.max_tokens or self.train.get("max_tokens")
        overflow = self.train.get("overflow", "error") if max_tokens else "error"
        sources = (self.args.data, self.train.get("dataset"), self.train.get("eval_dataset"))
        tokenizer = None  # it may have to be downloaded: only where there are documents
        if any(name is not None and Path(name).exists() for name in sources):
            with contextlib.suppress(NotGiven):
                tokenizer = self.tokenizer
        return DataCollatorForContextParallel(
            self.cp, cp_rank=0, max_tokens=max_tokens, overflow=overflow, tokenizer=tokenizer
        )

    @part
    def packed(self) -> PackedDataset:
        """Samples of the first documents, by the collator of the run."""
        count = min(FIRST, len(self.features))
        return PackedDataset([self.features[index] for index in range(count)], collator=self.collator)

    @part
    def made_up(self) -> PackedDataset:
        """Samples of made-up documents of log-normal lengths, where the real ones cannot be read."""
        longest = self.collator.max_tokens or 4096
        lengths = np.random.default_rng(0).lognormal(np.log(longest / 8), 1.0, 16).astype(int).clip(1, longest)
        documents = documents_of_lengths(lengths.tolist())
        for number, document in enumerate(documents):
            document.input_ids[:] = (np.arange(len(document)) + number) % 97
        return PackedDataset(documents, collator=self.collator)


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
    zero = {"stage": int(settings.get("zero_stage", 2)), GATHER_WEIGHTS: settings.get("zero3_save_16bit_model", False)}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    return {"zero_optimization": zero} | {name: settings[name] for name in names if name in settings}
