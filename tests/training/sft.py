"""Tiny runs of TRL's SFTTrainer, stock and on shared rows; importable on every rank."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelTrainerMixin
from tests.models.tiny import VOCAB_SIZE, tiny_model

disable_progress_bars()

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w3 {% generation %}{{ m.content }} </s>"
    "{% endgeneration %} {% else %}w4 {{ m.content }} {% endif %}{% endfor %}"
)


class ContextParallelSFTTrainer(ContextParallelTrainerMixin, SFTTrainer):
    """As a user writes it."""


@dataclass(frozen=True)
class Case:
    """One way to use SFTTrainer: the columns of the data set and the settings."""

    columns: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    max_tokens: int | None = None  # of our collator


@dataclass(frozen=True)
class Outcome:
    """What a run computed."""

    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    log_history: list[dict[str, float]]


class _Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 ... w63 are the tokens 3 ... 63."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("</s>", "isolated")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = CHAT_TEMPLATE
    return made


def make_dataset(columns: str, lengths: tuple[int, ...], *, seed: int = 0) -> Dataset:
    """Documents of about `lengths` words, as `text`, `completion` (with a prompt) or `messages`."""
    rng = np.random.default_rng(seed)

    def words(length: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(5, VOCAB_SIZE, length))

    def feature(length: int) -> dict[str, Any]:
        if columns == "text":
            return {"text": words(length)}
        if columns == "completion":
            return {"prompt": words(length // 3), "completion": " " + words(length - length // 3)}
        turns = [words(length // 4) for _ in range(4)]
        roles = ("user", "assistant", "user", "assistant")
        return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}

    return Dataset.from_list([feature(length) for length in lengths])


def make_arguments(**changes: Any) -> SFTConfig:
    settings = {
        "output_dir": os.path.join(tempfile.gettempdir(), "hf_cp_test_runs"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_length": 40,
        **changes,
    }
    return SFTConfig(**settings)


def adapter() -> Any:
    from peft import LoraConfig

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    # B is not zero with these weights
    return LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


def train_sft(case: Case, config: ContextParallelConfig | None = None, *, dp_size: int = 1) -> Outcome:
    """Trains a tiny model; without a config, as stock.

    Args:
        case (`Case`): what is trained.
        config (`ContextParallelConfig`, *optional*): how rows are split.
        dp_size (`int`): groups of processes that have rows of their own; accumulation steps are divided by it.
    """
    settings = {"gradient_accumulation_steps": 2, **case.settings}
    settings["gradient_accumulation_steps"] //= dp_size
    args = make_arguments(**settings)  # first: it starts what accelerate needs
    model, recorder = tiny_model(dtype=torch.float64), _Recorder()
    shared: dict[str, Any] = {
        "args": args,
        "train_dataset": make_dataset(case.columns, (30, 9, 21, 14, 33, 12, 26, 17)),
        "eval_dataset": make_dataset(case.columns, (20, 7, 15), seed=1),
        "processing_class": tokenizer(),
        "callbacks": [recorder],
        "peft_config": adapter() if case.lora else None,
    }
    if config is None:
        trainer = SFTTrainer(model=model, **shared)
    else:
        model = apply_context_parallel(model, config)
        collator = DataCollatorForContextParallel(config, max_tokens=case.max_tokens)
        trainer = ContextParallelSFTTrainer(model=model, data_collator=collator, **shared)
    trainer.train()
    parameters = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Outcome(recorder.gradients, parameters, trainer.state.log_history)
