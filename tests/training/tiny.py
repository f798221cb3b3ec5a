"""Tiny models, documents and Trainer runs that the training tests share; importable on every rank.

A run returns a `Record`: what one process, or a world of them, computed. `worst_difference` compares two of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelTrainer
from tests.models.tiny import VOCAB_SIZE, tiny_model

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# ref = the same loss code in one process; stock = the untouched Hugging Face model and loss
REF = ContextParallelConfig(force=True)
STOCK = ContextParallelConfig()


def make_model(
    family: str = "llama",
    *,
    lora: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Any:
    """A model with the same random weights on every rank and in every dtype (they are fp32 numbers).

    With `lora`, adapters, with `dropout` (see `with_adapters`).
    """
    model = tiny_model(family, dtype=torch.float32, **changes)
    return (with_adapters(model, dropout=dropout) if lora else model).to(dtype)


def with_adapters(model: Any, *, dropout: float = 0.0) -> Any:
    """LoRA on all linear layers, B not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def make_documents(lengths: Sequence[int], *, seed: int = 0, masked: float = 0.3) -> list[dict[str, list[int]]]:
    """Documents with random tokens and a random loss mask."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = rng.integers(0, VOCAB_SIZE, length)
        labels = np.where(rng.random(length) < masked, -100, ids)
        documents.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return documents


@dataclass(frozen=True)
class Record:
    """What a training run computed; equal on all ranks unless the code is wrong."""

    losses: list[float]  # of every optimizer step, in full precision
    grad_norms: list[float]
    gradients: list[dict[str, torch.Tensor]]  # of every optimizer step
    parameters: dict[str, torch.Tensor]  # after the last step
    log_history: list[dict[str, float]]
    metrics: dict[str, float] = field(default_factory=dict)


class _Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


class RecordingTrainer(ContextParallelTrainer):
    """Keeps the loss of every micro-step in full precision (the Trainer adds them up in fp32)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_losses: list[tuple[int, float]] = []
        self.rows_seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.micro_losses.append((self.state.global_step, float(loss)))
        return loss

    def step_losses(self) -> list[float]:
        """Of every optimizer step, the mean over ranks: what the Trainer logs."""
        sums = [0.0] * self.state.global_step
        for step, loss in self.micro_losses:
            sums[step] += loss
        mesh = self.cp_mesh
        return [total / mesh.world_size for total in sum_over_world(sums, comm=Communicator(mesh))]


def make_arguments(**changes: Any) -> TrainingArguments:
    settings = {
        "output_dir": os.path.join(tempfile.gettempdir(), "hf_cp_test_runs"),  # nothing is saved by default
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "max_steps": 3,
        **changes,
    }
    return TrainingArguments(**settings)


def make_trainer(
    model: Any,
    config: ContextParallelConfig,
    documents: list[dict],
    *,
    max_tokens: int | None = 32,
    trainer_class: type[Trainer] = RecordingTrainer,
    eval_dataset: Any = None,
    callbacks: list[TrainerCallback] | None = None,
    arguments_from: Callable[..., TrainingArguments] = make_arguments,
    **arguments: Any,
) -> Any:
    """The arguments come first: they start what accelerate needs."""
    args = arguments_from(**arguments)
    return trainer_class(
        model=apply_context_parallel(model, config),
        args=args,
        train_dataset=documents,
        eval_dataset=eval_dataset,
        data_collator=DataCollatorForContextParallel(config, max_tokens=max_tokens),
        callbacks=callbacks,
    )


def train(
    config: ContextParallelConfig,
    documents: list[dict],
    *,
    family: str = "llama",
    lora: bool = False,
    dtype: torch.dtype = torch.float64,
    model_changes: dict[str, Any] | None = None,
    **settings: Any,
) -> Record:
    """Trains a tiny model through the Trainer on this rank."""
    recorder = _Recorder()
    model = make_model(family, lora=lora, dtype=dtype, **(model_changes or {}))
    trainer = make_trainer(model, config, documents, callbacks=[recorder], **settings)
    output = trainer.train()
    log = trainer.state.log_history
    return Record(
        losses=trainer.step_losses(),
        grad_norms=[entry["grad_norm"] for entry in log if "grad_norm" in entry],
        gradients=recorder.gradients,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        log_history=log,
        metrics=output.metrics,
    )


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over the largest reference value."""
    value, reference = value.detach(), reference.detach()
    return float((value - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


@dataclass(frozen=True)
class Difference:
    """Relative differences of two records: of the worst step, tensor and parameter."""

    loss: float
    grad_norm: float
    gradient: float
    update: float


def worst_difference(record: Record, reference: Record, start: dict[str, torch.Tensor]) -> Difference:
    """Compares loss, gradient norm, every gradient of every step, and every parameter's total update."""
    assert len(record.losses) == len(reference.losses) > 0
    assert [sorted(g) for g in record.gradients] == [sorted(g) for g in reference.gradients]
    assert sorted(record.parameters) == sorted(reference.parameters)
    gradients = [
        relative(record.gradients[step][name], gradient)
        for step, step_gradients in enumerate(reference.gradients)
        for name, gradient in step_gradients.items()
    ]
    trained = reference.gradients[0]
    updates = [
        relative(record.parameters[name] - start[name], reference.parameters[name] - start[name]) for name in trained
    ]
    return Difference(
        loss=max(abs(a / b - 1) for a, b in zip(record.losses, reference.losses, strict=True)),
        grad_norm=max(abs(a / b - 1) for a, b in zip(record.grad_norms, reference.grad_norms, strict=True)),
        gradient=max(gradients),
        update=max(updates),
    )
