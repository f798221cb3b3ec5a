"""Runs of zero_cases.py that stop, and go on with other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import ProjectConfiguration

from hf_cp.config import ContextParallelConfig
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelPlugin
from hf_cp.training.checkpoint import CheckpointRecord
from hf_cp.training.deepspeed import make_universal
from tests.training.loops import make_optimizer
from tests.training.tiny import REF, make_documents, make_model, make_trainer

RING2 = ContextParallelConfig(ring_degree=2)
LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens, 2 a step: 3 steps an epoch
CASES = {"2": (2, False), "3": (3, False), "3-lora": (3, True)}  # stage, LoRA
SHRUNK = ("2", "3")
STOP, STOP_AGAIN, END = 2, 4, 5
EVALUATION = {"eval_strategy": "steps", "eval_dataset": make_documents(LENGTHS[:2])}


def resumable_run(
    folder: Path,
    case: str,
    config: ContextParallelConfig,
    accumulation: int,
    resume: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Adam with weight decay (which norms do not have) and a schedule: all of it must be found again."""
    from tests.training.zero_cases import DEEPSPEED, fresh_state, whole_parameters

    fresh_state()
    stage, lora = CASES[case]
    model = make_model(lora=lora, dtype=torch.float32)
    trainer = make_trainer(
        model,
        config,
        make_documents(LENGTHS),
        deepspeed={**DEEPSPEED, "zero_optimization": {"stage": stage}},
        gradient_accumulation_steps=accumulation,
        output_dir=str(folder),
        max_steps=END,
        save_strategy="steps",
        save_steps=STOP,
        optim="adamw_torch",
        learning_rate=1e-2,
        weight_decay=0.3,
        lr_scheduler_type="cosine",
        **settings,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    log = trainer.state.log_history
    return {
        "losses": trainer.step_losses(),
        "rates": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "parameters": whole_parameters(model),
    }


def attempt(run: Any, *args: Any, **kwargs: Any) -> str:
    try:
        run(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def make_all_universal(checkpoints: dict[str, Path]) -> None:
    """Each one by one of the processes."""
    for number, checkpoint in enumerate(checkpoints.values()):
        if dist.get_rank() == number % dist.get_world_size():
            make_universal(checkpoint)
    dist.barrier()


def write_checkpoints(out: Path) -> dict[str, Any]:
    """On one shared row; then, from the checkpoint, on two processes with a row each."""
    whole = {case: resumable_run(out / "resume" / case, case, RING2, 2) for case in CASES}
    own_rows = resumable_run(out / "own_rows", "2", REF, 1, out / "resume" / "2" / f"checkpoint-{STOP}")
    return {"whole": whole, "own_rows": own_rows}


def go_on(out: Path) -> dict[str, Any]:
    """With four processes instead of two: first the refusals, then through the universal format."""
    saved = {case: out / "resume" / case / f"checkpoint-{STOP}" for case in CASES}
    refused = {case: attempt(resumable_run, out / "grown", case, RING2, 1, saved[case]) for case in CASES}
    own_loops = {stage: attempt(own_loop, out / "own_loops", stage, 1, resume=True) for stage in (2, 3)}
    make_all_universal(saved)
    results: dict[str, Any] = {"own_loops": own_loops}
    for case in CASES:
        best = attempt(
            resumable_run, out / "grown", case, RING2, 1, saved[case], load_best_model_at_end=True, **EVALUATION
        )
        run = resumable_run(out / "grown" / case, case, RING2, 1, saved[case])
        again = CheckpointRecord.load(out / "grown" / case / f"checkpoint-{STOP_AGAIN}")
        results[case] = {"refused": refused[case], "best": best, "world_size": again.world_size, **run}
    return results


def go_back(out: Path) -> dict[str, Any]:
    """With two processes again, from what four have saved."""
    PartialState(cpu=True)  # makes the world's group
    saved = {case: out / "grown" / case / f"checkpoint-{STOP_AGAIN}" for case in SHRUNK}
    make_all_universal(saved)
    return {case: resumable_run(out / "shrunk" / case, case, RING2, 2, saved[case]) for case in SHRUNK}


def own_loop(out: Path, stage: int, accumulation: int, *, resume: bool) -> dict[str, Any]:
    """Three steps of Adam without the Trainer: saves its state after the second, or goes on from there.

    In a folder with a name, and in one that accelerate names.
    """
    from tests.training.zero_cases import fresh_state, whole_parameters

    fresh_state()
    folder, plugin = out / str(stage), ContextParallelPlugin(RING2)
    names = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = plugin.accelerator(
        gradient_accumulation_steps=accumulation,
        deepspeed_plugin=plugin.deepspeed_plugin(zero_stage=stage),
        project_config=names if stage == 3 else None,
    )
    model = apply_context_parallel(make_model(dtype=torch.float32), plugin.config, mesh=plugin.mesh)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model, "adam", 1e-2))
    loader, losses = plugin.data_loader(make_documents(LENGTHS), max_tokens=32), []
    if resume:
        accelerator.load_state(None if stage == 3 else str(folder))
    for batches, num_items in plugin.accumulation_windows(loader):
        total = 0.0
        for batch in batches:
            loss = plugin.loss(wrapped, batch, num_items=num_items)
            accelerator.backward(loss)
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if len(losses) == STOP and not resume:
            accelerator.save_state(None if stage == 3 else str(folder))
    weights = accelerator.get_state_dict(wrapped)  # of ZeRO-3 on the first process only
    return {"losses": losses, "parameters": whole_parameters(model), "weights": weights}


def own_loops(out: Path) -> dict[int, dict[str, Any]]:
    return {
        stage: {"whole": own_loop(out, stage, 2, resume=False), "resumed": own_loop(out, stage, 2, resume=True)}
        for stage in (2, 3)
    }
