"""Runs of zero_cases.py that stop, and go on with other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.training.checkpoint import CheckpointRecord
from hf_cp.training.universal import make_universal
from tests.training.tiny import REF, make_documents, make_model, make_trainer

RING2 = ContextParallelConfig(ring_degree=2)
LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens, 2 a step: 3 steps an epoch
CASES = {"2": (2, False), "3": (3, False), "3-lora": (3, True)}  # stage, LoRA
STOP, END = 2, 5
EVALUATION = {"eval_strategy": "steps", "eval_dataset": make_documents(LENGTHS[:2])}


def resumable_run(
    folder: Path, case: str, config: ContextParallelConfig, accumulation: int, resume: bool = False, **settings: Any
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
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STOP}") if resume else None)
    log = trainer.state.log_history
    return {
        "losses": trainer.step_losses(),
        "rates": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "parameters": whole_parameters(model),
    }


def attempt(*args: Any, **kwargs: Any) -> str:
    try:
        resumable_run(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def write_checkpoints(out: Path) -> dict[str, Any]:
    """On one shared row; then, from the checkpoint, on two processes with a row each."""
    whole = {case: resumable_run(out / "resume" / case, case, RING2, 2) for case in CASES}
    own_rows = resumable_run(out / "resume" / "2", "2", REF, 1, resume=True)
    return {"whole": whole, "own_rows": own_rows}


def go_on(first: Path) -> dict[str, Any]:
    """With four processes instead of two: first the refusal, then through the universal format."""
    results: dict[str, Any] = {}
    for case in CASES:
        folder = first / "resume" / case
        refused = attempt(folder, case, RING2, 1, resume=True)
        if dist.get_rank() == 0:
            make_universal(folder / f"checkpoint-{STOP}")
        dist.barrier()
        best = attempt(folder, case, RING2, 1, resume=True, load_best_model_at_end=True, **EVALUATION)
        run = resumable_run(folder, case, RING2, 1, resume=True)
        again = CheckpointRecord.load(folder / f"checkpoint-{2 * STOP}")
        results[case] = {"refused": refused, "best": best, "world_size": again.world_size, **run}
    return results
