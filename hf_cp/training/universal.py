"""ZeRO checkpoints for another number of processes, through DeepSpeed's universal format.

ZeRO cuts the optimizer's state into one part per process. `make_universal` joins the parts beside the checkpoint, one
file per parameter; from then on any number of processes can resume. DeepSpeed's ZeRO-3 loader then needs two repairs
(0.19.8): it gives all parameter groups one shared step counter, which torch's optimizers increase once per group, and
the settings (weight decay, learning rate) of the first group. Both are set right from the same files.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"  # DeepSpeed's names


def is_universal(checkpoint: str | os.PathLike) -> bool:
    """Whether [`make_universal`] has converted this Trainer checkpoint."""
    return (Path(checkpoint) / LATEST_UNIVERSAL).is_file()


def make_universal(checkpoint: str | os.PathLike, *, num_workers: int = 1) -> Path:
    """Joins the parts of a ZeRO checkpoint, beside them; needs about as much disk as they take.

    Args:
        checkpoint (path): a folder `checkpoint-<step>` of the Trainer, with ZeRO stage 1, 2 or 3.
        num_workers (`int`, *optional*, defaults to 1): processes that read and write; each holds one part in memory.

    Returns:
        `Path`: the folder of the universal checkpoint, inside `checkpoint`.

    Raises:
        ValueError: it is no ZeRO checkpoint.
    """
    checkpoint = Path(checkpoint)
    latest = checkpoint / LATEST
    if not latest.is_file():
        raise ValueError(
            f"{checkpoint} is no ZeRO checkpoint: it has no file {LATEST!r}.\n"
            "  Pass a folder checkpoint-<step> of a run with ZeRO. (Without ZeRO any number of processes can resume.)"
        )
    from deepspeed.checkpoint import ds_to_universal

    source = checkpoint / latest.read_text(encoding="utf-8").strip()
    target = source.with_name(f"{source.name}_universal")
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=num_workers,
            num_merge_workers=num_workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # the note that nothing is tensor parallel, which only Megatron writes
        )
    )
    return target


def repair_optimizer(optimizer: Any, checkpoint: str | os.PathLike) -> None:
    """Gives every group of a ZeRO-3 optimizer its own step counter and its own settings, after a universal load.

    Args:
        optimizer: as the Trainer holds it (wrappers around torch's optimizer have it as `.optimizer`).
        checkpoint (path): what was loaded.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    checkpoint = Path(checkpoint)
    tag = (checkpoint / LATEST_UNIVERSAL).read_text(encoding="utf-8").strip()
    saved = torch.load(checkpoint / tag / "zero" / "optimizer_state.pt", mmap=True, weights_only=False)
    groups = saved["optimizer_state_dict"]["param_groups"]
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
