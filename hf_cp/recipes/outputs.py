"""What a training run leaves in its output folder: adapter or model, `summary.json`, the loss curve.

Invariant: each file has one writer, and the numbers are the same on every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import gather_objects
from hf_cp.environment import GIB, peak_memory_bytes
from hf_cp.recipes.held_out import LossDrop
from hf_cp.training.trainer import ContextParallelTrainer
from hf_cp.verify import VerifyReport

__all__ = ["base_model", "peak_memory_gib", "plot_losses", "summarise", "write_outputs"]


def base_model(trainer: ContextParallelTrainer) -> Any:
    """The Hugging Face model, without adapters around it."""
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def summarise(
    trainer: ContextParallelTrainer,
    step_seconds: Sequence[float],
    report: VerifyReport | None,
    result: LossDrop | None,
) -> dict[str, Any]:
    """The numbers of `summary.json`; `None` where there was no proof or result. All ranks must call it."""
    config, plugin = trainer.data_collator.config, trainer.accelerator.state.deepspeed_plugin
    seconds = step_seconds[1:] or step_seconds  # the first step also warms up
    return {
        "cp_size": config.cp_size,
        "ring_degree": config.ring_degree,
        "ulysses_degree": config.ulysses_degree,
        "processes": trainer.args.world_size,
        "zero_stage": plugin.zero_stage if plugin else None,
        "loss_first_step_cp1": report and report.loss_cp1,
        "loss_first_step_cpN": report and report.loss_cpN,
        "grad_norm_cp1": report and report.grad_norm_cp1,
        "grad_norm_cpN": report and report.grad_norm_cpN,
        "worst_gradient_relative_error": report and report.worst_gradient_relative_error,
        "proof": report and json.loads(report.to_json()),
        "eval_loss_before": result and result.before.mean,
        "eval_loss_after": result and result.after.mean,
        "eval_loss_drop_stderr": result and result.stderr,
        "eval_documents": result and len(result.before.sums),
        "steps": trainer.state.global_step,
        "seconds_per_step": sum(seconds) / max(1, len(seconds)),
        "peak_memory_gib": peak_memory_gib(trainer.cp_comm),  # of the whole process, proof included
    }


def peak_memory_gib(comm: Communicator) -> list[float]:
    """The most memory that each rank has held so far, in GiB by rank: of its GPU, or of the whole process on CPU.

    All ranks must call it.
    """
    gib = round(peak_memory_bytes(comm.mesh.device_type) / GIB, 3)
    return gather_objects(gib, comm=comm, what="the peak memory of all processes")


def write_outputs(
    trainer: ContextParallelTrainer,
    summary: Mapping[str, Any],
    held_out: Mapping[int, float],
    *,
    has_new_rope: bool,
) -> list[str]:
    """Writes adapter or model, summary and loss curve; all ranks must call it.

    Args:
        trainer (`ContextParallelTrainer`): after training; its `output_dir` is the folder.
        summary (`Mapping[str, Any]`): of [`summarise`].
        held_out (`Mapping[int, float]`): step -> loss of the held-out documents.
        has_new_rope (`bool`): whether the model's RoPE was changed.

    Returns:
        `list[str]`: lines that say what is there.
    """
    folder, is_adapter = Path(trainer.args.output_dir), base_model(trainer) is not trainer.model
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        if is_adapter and has_new_rope:  # the adapter belongs to the context that it was trained in
            base_model(trainer).config.save_pretrained(folder)
        if not is_adapter:  # the folder is a whole model
            trainer.data_collator.tokenizer.save_pretrained(folder)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    names = f"the trained {'LoRA adapter' if is_adapter else 'model'}, summary.json, packing_manifest.json"
    if not trainer.is_world_process_zero():
        return [names]
    training = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    try:
        plot_losses(folder / "loss_curve.png", training=training, held_out=held_out)
    except ImportError:
        return [names, "no loss_curve.png: matplotlib is not installed (pip install matplotlib)"]
    return [names, "loss_curve.png"]


def plot_losses(path: str | os.PathLike, *, training: Mapping[int, float], held_out: Mapping[int, float]) -> None:
    """Draws the training loss and the held-out loss by optimizer step into a PNG file.

    Args:
        path (`str` or `os.PathLike`): the file.
        training (`Mapping[int, float]`): step -> loss of the samples of that step (each step has others).
        held_out (`Mapping[int, float]`): step -> loss of the same held-out documents every time.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        list(training), list(training.values()), color="0.6", marker=".", label="training samples (others each step)"
    )
    axes.plot(
        list(held_out), list(held_out.values()), color="C0", marker="o", label="held-out documents (always the same)"
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean token loss (nats)")
    axes.legend()
    FigureCanvasAgg(figure).print_png(os.fspath(path))
