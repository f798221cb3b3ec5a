"""What the processes of zero_worlds.py compute with DeepSpeed.

With 2 processes a row is shared by both; with 4 there are two such pairs. fp32, where nothing else is said.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cp.config import ContextParallelConfig
from hf_cp.models.patch import context_parallel_disabled
from hf_cp.training import ContextParallelPlugin
from hf_cp.training.deepspeed import GATHER_WEIGHTS
from tests.models.test_generate import PROMPTS, generate
from tests.training.fixed_loss import LOSS_2, LOSS_4, make_document, make_fixed_loss_model
from tests.training.loops import run_loop
from tests.training.tiny import REF, Record, make_documents, make_model, make_trainer
from tests.training.zero_resume import go_on, own_loops, write_checkpoints

LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens
RING2 = ContextParallelConfig(ring_degree=2)
DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "communication_data_type": "fp32",
    "zero_allow_untested_optimizer": True,
}

# without the threshold such small parameters stay whole on every process
SHARD_ALL = {"stage3_param_persistence_threshold": 0}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def fresh_state() -> None:
    """Forgets the run before: also its stage, which transformers would use for the next model's parameters."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of every stage: ZeRO-3 keeps 1/W of each parameter."""
    import deepspeed

    is_sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    whole = deepspeed.zero.GatheredParameters(list(model.parameters())) if is_sharded else contextlib.nullcontext()
    with whole:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def master_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole fp32 weights that ZeRO updates, of which a bf16 run computes with copies."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in model.named_parameters()}


class Line(nn.Module):
    """y = w x with x = rank + 1; its sum of token losses is y."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, num_items_in_batch: int, **kwargs: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(loss=(self.w * x).sum() / num_items_in_batch)


def make_plugin(stage: int, accumulation: int = 1):
    plugin = ContextParallelPlugin(RING2)
    accelerator = plugin.accelerator(
        gradient_accumulation_steps=accumulation, deepspeed_plugin=plugin.deepspeed_plugin(zero_stage=stage)
    )
    return plugin, accelerator


def time_limit_of_the_plugin() -> float:
    """Seconds; the first call of a process, since that makes the world's group."""
    plugin = ContextParallelPlugin(RING2)
    plugin.accelerator(
        deepspeed_plugin=plugin.deepspeed_plugin(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=777))],
    )
    return plugin.mesh.time_limit.total_seconds()


def line_update(stage: int) -> torch.Tensor:
    """Gradients 1 and 2 on the two ranks, 3 targets: w falls by (1 + 2) / 3."""
    fresh_state()
    model = Line()
    plugin, accelerator = make_plugin(stage)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = {"x": torch.tensor(float(dist.get_rank() % 2 + 1)), "shift_labels": torch.zeros(1, 3, dtype=torch.long)}
    for batches, _ in plugin.accumulation_windows([batch]):
        for micro_batch in batches:
            accelerator.backward(plugin.loss(wrapped, micro_batch, num_items=3 * plugin.mesh.dp_size))
        optimizer.step()
        optimizer.zero_grad()
    return 1.0 - whole_parameters(model)["w"]


def plugin_loop(stage: int, accumulation: int = 2, **settings: Any) -> Record:
    fresh_state()
    model = make_model(dtype=torch.float32)
    plugin, accelerator = make_plugin(stage, accumulation)
    record = run_loop(plugin, accelerator, make_documents(LENGTHS), model=model, **settings)
    return replace(record, gradients=[], parameters=whole_parameters(model))


def unequal_micro_steps(stage: int) -> tuple[float, torch.Tensor]:
    """Targets: 6 of loss 2 and 2 of loss 4 in two micro-steps."""
    documents = [
        make_document([LOSS_2] * 16, [True] * 6 + [False] * 10),
        make_document([LOSS_4] * 16, [True] * 2 + [False] * 14),
    ]
    fresh_state()
    model = make_fixed_loss_model(torch.float32)
    plugin, accelerator = make_plugin(stage, 2)
    record = run_loop(plugin, accelerator, documents, model=model, max_tokens=16)
    return record.losses[0], whole_parameters(model)["lm_head.weight"]


class Speaker(TrainerCallback):
    """Generates after the second step, and keeps the weights that it was generated with."""

    text: torch.Tensor
    parameters: dict[str, torch.Tensor]

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step == 2:
            self.text, self.parameters = generate(model), whole_parameters(model)


def whole_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad(), context_parallel_disabled(model):
        return model.eval()(input_ids=PROMPTS, use_cache=False).logits


def largest_logit(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.amax(-1)


def mean_of_largest(result: EvalPrediction) -> dict[str, float]:
    return {"largest": result.predictions[result.predictions != -100].mean()}


class TrainerRun(NamedTuple):
    """What one process knows of a run of the Trainer."""

    losses: list[float]  # of every optimizer step, in full precision
    logged: list[float]
    grad_norms: list[float]
    eval_losses: list[float]  # in training
    eval_loss: float | None  # afterwards
    largest: float | None  # the metric of `mean_of_largest`
    predictions: np.ndarray | None
    spoken: dict[str, Any]  # of the `Speaker`
    logits: torch.Tensor | None  # after training
    shards: list[tuple[int, int]]  # of ZeRO-3: numbers of a whole parameter, and of this process's part
    parameters: dict[str, torch.Tensor]
    offloads: bool
    reduce_scatters: bool
    trainable: tuple[list[str], list[str]]  # parameters, before and afterwards
    train_batch_size: int  # of DeepSpeed
    samples_per_step: int
    run_numbers: list[dict[str, float]]
    engine: str


def trainer_run(
    folder: Path | None = None,
    *,
    stage: int = 2,
    config: ContextParallelConfig = RING2,
    zero_settings: dict[str, Any] | None = None,
    deepspeed_settings: dict[str, Any] | None = None,
    lora: bool = False,
    accumulation: int = 2,
    family: str = "llama",
    model_changes: dict[str, Any] | None = None,
    evaluates: bool = True,
    **settings: Any,
) -> TrainerRun:
    """Trains, evaluates and saves (into `folder`) through the Trainer."""
    fresh_state()
    model = make_model(family, lora=lora, dtype=torch.float32, **(model_changes or {}))
    before = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    documents, speaker = make_documents(LENGTHS), Speaker()
    trainer = make_trainer(
        model,
        config,
        documents,
        eval_dataset=documents[:5],
        callbacks=[speaker] if stage == 3 and evaluates else None,
        deepspeed={
            **DEEPSPEED,
            **(deepspeed_settings or {}),
            "zero_optimization": {"stage": stage, **(zero_settings or {})},
        },
        gradient_accumulation_steps=accumulation,
        eval_on_start=evaluates,
        eval_strategy="no",
        **settings,
    )
    trainer.preprocess_logits_for_metrics, trainer.compute_metrics = largest_logit, mean_of_largest
    trainer.train()
    evaluated, predictions = {}, None
    if evaluates:
        evaluated, predictions = trainer.evaluate(), trainer.predict(documents).predictions
    if folder is not None:
        trainer.save_model(str(folder))
    log = trainer.state.log_history
    return TrainerRun(
        losses=trainer.step_losses(),
        logged=[entry["loss"] for entry in log if "loss" in entry],
        grad_norms=[entry["grad_norm"] for entry in log if "grad_norm" in entry],
        eval_losses=[entry["eval_loss"] for entry in log if "eval_loss" in entry],
        eval_loss=evaluated.get("eval_loss"),
        largest=evaluated.get("eval_largest"),
        predictions=predictions,
        spoken=vars(speaker),
        logits=None if folder is None else whole_logits(model),
        shards=[(p.ds_numel, p.ds_tensor.numel()) for p in model.parameters() if hasattr(p, "ds_id")],
        parameters=master_parameters(model) if settings.get("bf16") else whole_parameters(model),
        offloads=trainer.deepspeed.zero_cpu_offload(),
        reduce_scatters=trainer.deepspeed.zero_reduce_scatter(),
        trainable=(before, [name for name, p in model.named_parameters() if p.requires_grad]),
        train_batch_size=trainer.deepspeed.train_batch_size(),
        samples_per_step=trainer.get_total_train_batch_size(trainer.args),
        run_numbers=[{k: v for k, v in entry.items() if k.startswith("cp/")} for entry in log if "loss" in entry],
        engine=type(trainer.deepspeed).__name__,
    )


def refusals() -> dict[str, str]:
    """Messages of what must not start."""

    def message(function) -> str:
        fresh_state()
        try:
            function()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    def contradiction() -> None:
        make_trainer(
            make_model(dtype=torch.float32), RING2, make_documents([9]), deepspeed={**DEEPSPEED, "train_batch_size": 1}
        )

    def plugin_contradiction() -> None:
        plugin = ContextParallelPlugin(RING2)
        config = plugin.deepspeed_plugin(config={"train_batch_size": 1})
        plugin.accelerator(deepspeed_plugin=config)

    def bf16_without_zero() -> None:
        plugin = ContextParallelPlugin(RING2)
        plugin.accelerator(deepspeed_plugin=plugin.deepspeed_plugin(0), mixed_precision="bf16")

    def evaluate_first() -> None:
        documents = make_documents([9])
        trainer = make_trainer(
            make_model(dtype=torch.float32), RING2, documents, eval_dataset=documents, deepspeed=DEEPSPEED
        )
        trainer.evaluate()

    def silently_ddp() -> None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        try:
            plugin = ContextParallelPlugin(RING2)
            plugin.accelerator(deepspeed_plugin=plugin.deepspeed_plugin())
        finally:
            del os.environ["ACCELERATE_USE_CPU"]

    def trainer_silently_ddp() -> None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        try:
            make_trainer(make_model(dtype=torch.float32), RING2, make_documents([9]), deepspeed=DEEPSPEED)
        finally:
            del os.environ["ACCELERATE_USE_CPU"]

    def weights_that_are_not_gathered() -> None:
        config = {**DEEPSPEED, "zero_optimization": {"stage": 3, GATHER_WEIGHTS: False}}
        make_trainer(make_model(dtype=torch.float32), RING2, make_documents([9]), deepspeed=config)

    cases = (
        contradiction,
        plugin_contradiction,
        bf16_without_zero,
        evaluate_first,
        silently_ddp,
        trainer_silently_ddp,
        weights_that_are_not_gathered,
    )
    return {case.__name__: message(case) for case in cases}


def zero_variants() -> dict[str, Any]:
    """Six steps, with settings that take other paths through DeepSpeed."""
    offload = {
        "zero_settings": {"offload_optimizer": {"device": "cpu"}},
        "deepspeed_settings": {"zero_force_ds_cpu_optimizer": False},  # its own Adam is compiled for minutes
    }
    whole_buckets = {"zero_settings": {"reduce_scatter": False, **SHARD_ALL}}
    return {
        f"{name}{stage}": trainer_run(stage=stage, max_steps=6, evaluates=False, **settings)
        for name, settings in (("offload", offload), ("no_reduce_scatter", whole_buckets))
        for stage in (2, 3)
    }


def bf16_runs() -> dict[str, Any]:
    """Six steps in bf16, in every stage: on shared rows, and on whole rows of the same steps."""
    settings = {"max_steps": 6, "bf16": True, "evaluates": False}
    return {
        stage: {
            "shared": trainer_run(stage=stage, **settings),
            "whole": trainer_run(stage=stage, config=REF, accumulation=1, **settings),
        }
        for stage in (1, 2, 3)
    }


def bf16_chunks() -> dict[str, Any]:
    """One step on one row: in 64 calls of lm_head and 32 of every feed-forward part, and in one call of each."""
    many = replace(RING2, loss_chunk_tokens=2, mlp_chunk_tokens=4)
    settings = {"stage": 3, "zero_settings": SHARD_ALL, "bf16": True, "evaluates": False}
    return {
        name: trainer_run(config=config, max_steps=1, max_tokens=256, accumulation=1, **settings)
        for name, config in (("many", many), ("one", RING2))
    }


def two_processes(out: Path) -> dict[str, Any]:
    return {
        "time_limit": time_limit_of_the_plugin(),
        "line": {stage: line_update(stage) for stage in (0, 1, 2, 3)},
        "plugin": {stage: plugin_loop(stage) for stage in (0, 1, 2, 3)},
        "adam": {stage: plugin_loop(stage, optimizer="adam", lr=1e-2) for stage in (0, 2)},
        "unequal": {stage: unequal_micro_steps(stage) for stage in (0, 2)},
        "trainer": trainer_run(out / "full"),
        "trainer_lora": trainer_run(out / "lora", lora=True),
        "trainer_lora3": trainer_run(out / "lora3", stage=3, lora=True),
        "trainer_stages": {stage: trainer_run(out / f"full{stage}", stage=stage) for stage in (0, 1, 3)},
        "variants": zero_variants(),
        "bf16": bf16_runs(),
        "bf16_chunks": bf16_chunks(),
        "resume": write_checkpoints(out),
        "own_loops": own_loops(out / "own_loops"),
        "refusals": refusals(),
    }


def sharded_run(mlp_chunk_tokens: int | None = None, **settings: Any) -> dict[str, Any]:
    """Stage 3 that really gathers: by default, parameters as small as these stay whole on every process.

    5 rows over dp 2: in the last micro-step one pair has a masked row, much shorter than that of the other pair. The
    loss is computed in chunks of 4 tokens, and each chunk gathers lm_head, so all must make equally many.
    """
    config = replace(RING2, loss_chunk_tokens=4, mlp_chunk_tokens=mlp_chunk_tokens)
    return trainer_run(stage=3, config=config, zero_settings=SHARD_ALL, accumulation=1, **settings)


def four_processes(out: Path) -> dict[str, Any]:
    experts = {"family": "mixtral", "model_changes": BALANCED | {"experts_implementation": "grouped_mm"}}
    clipped = {"max_grad_norm": 0.1, "evaluates": False}
    return {
        "resume": go_on(out),
        "trainer": trainer_run(),
        "clipped": trainer_run(**clipped),
        "clipped_stage0": trainer_run(stage=0, **clipped),
        "clipped_sharded": trainer_run(stage=3, zero_settings=SHARD_ALL, **clipped),
        "sharded": sharded_run(),
        "sharded_saving": sharded_run(mlp_chunk_tokens=4, activation_checkpointing=True, evaluates=False),
        "experts": sharded_run(**experts, evaluates=False),
    }
