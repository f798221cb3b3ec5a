"""Checkpoints of the Trainer: what it adds to them, and what it checks before it goes on from one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from transformers import Trainer, TrainerCallback

from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import StreamDataLoader
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.training.checkpoint import (
    CheckpointRecord,
    Found,
    check_fsdp_form,
    check_states,
    check_steps,
    find_checkpoint,
    find_on_all_ranks,
    log_differences,
)
from hf_cp.training.deepspeed import repair_optimizer


class Checkpoints:
    """Of one Trainer.

    Args:
        trainer (`Trainer`): a [`ContextParallelTrainerMixin`] on samples of ours.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._loader: ContextParallelDataLoader | StreamDataLoader | None = None  # of the training samples
        self._resumed: CheckpointRecord | None = None  # while train() goes on from one

    def record(self) -> CheckpointRecord:
        """Of the run as it is now. Call it on every process: before training it makes the process groups."""
        trainer = self._trainer
        return CheckpointRecord.of(
            trainer.accelerator,
            trainer.cp_mesh,
            trainer.cp_config,
            samples_per_step=trainer.get_total_train_batch_size(trainer.args),
            position=None if self._loader is None else self._loader.position,
        )

    def note_loader(self, loader: ContextParallelDataLoader | StreamDataLoader) -> None:
        """Before the first step: are these the samples that the checkpoint counts?"""
        self._loader = loader
        if self._resumed is not None and not self._trainer.args.ignore_data_skip:
            check_steps(self._resumed, self.record())

    @contextmanager
    def saving(self, output_dir: str | None, *, is_checkpoint: bool) -> Iterator[None]:
        """Around the Trainer's `save_model`: `hf_cp.json` beside the weights, which are whole.

        With FSDP's SHARDED_STATE_DICT the Trainer would silently write no weights, but for checkpoints.
        """
        trainer, record = self._trainer, self.record()
        if trainer.args.should_save:
            record.save(trainer.args.output_dir if output_dir is None else output_dir)
        if not trainer.is_fsdp_enabled or is_checkpoint:
            yield
            return
        plugin = trainer.accelerator.state.fsdp_plugin
        chosen = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            yield
        finally:
            plugin.set_state_dict_type(chosen)

    @contextmanager
    def resuming(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | bool | None]:
        """Checks the checkpoint that train() is to go on from, and yields its folder."""
        trainer = self._trainer
        found = find_on_all_ranks(resume_from_checkpoint, trainer.args.output_dir, trainer.cp_comm)
        if found is None:
            yield resume_from_checkpoint
            return
        is_other_world = self._check(found)
        self._resumed = found.record
        universal = self._universal_load(found.folder) if is_other_world else nullcontext()
        try:
            with universal, self._called(_SeedDropout(found.record, trainer.cp_mesh)):
                yield found.folder
        finally:
            self._resumed = None

    def _check(self, found: Found) -> bool:
        """Raises unless this run can go on from it; returns whether ZeRO's parts are for another number of ranks."""
        trainer, args = self._trainer, self._trainer.args
        # the samples are compared once their loader is made; one of an earlier train() says nothing
        saved, current = found.record, replace(self.record(), position=None)
        if saved is None:
            if args.ignore_data_skip:
                return False
            raise ValueError(
                f"{found.folder} has no hf_cp.json: it was written by another Trainer, whose steps stand for other "
                "samples.\n  Set ignore_data_skip=True to take weights and optimizer from it and begin the epoch anew."
            )
        check_states(
            saved,
            current,
            change=f"Run `hf-cp universal {found.folder}` once, or resume with {saved.world_size} processes.",
            may_differ=found.is_universal,
        )
        if trainer.accelerator.is_fsdp2:
            check_fsdp_form(found.folder, trainer.accelerator.state.fsdp_plugin.state_dict_type.name)
        if not args.ignore_data_skip:
            check_steps(saved, current)
        log_differences(saved, current, folder=found.folder)
        is_other_world = bool(saved.zero_stage) and saved.world_size != current.world_size
        if is_other_world and args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True does not work in a run that goes on from a universal checkpoint "
                f"({saved.world_size} -> {current.world_size} processes): DeepSpeed would look for more of them.\n"
                "  Set it to False, and load the best checkpoint yourself."
            )
        return is_other_world

    @contextmanager
    def _universal_load(self, folder: str) -> Iterator[None]:
        """Inside, DeepSpeed's engine reads universal checkpoints, and its optimizer is repaired after loading."""
        plugin = self._trainer.accelerator.state.deepspeed_plugin
        config = plugin.deepspeed_config
        before = config.get("checkpoint")
        config["checkpoint"] = {**(before or {}), "load_universal": True}
        try:
            with self._called(_RepairOptimizer(folder)) if plugin.zero_stage == 3 else nullcontext():
                yield
        finally:
            if before is None:
                del config["checkpoint"]
            else:
                config["checkpoint"] = before

    @contextmanager
    def _called(self, callback: TrainerCallback) -> Iterator[None]:
        """Inside, the Trainer calls `callback`."""
        self._trainer.add_callback(callback)
        try:
            yield
        finally:
            self._trainer.remove_callback(callback)


def check_stock_order(trainer: Trainer, resume_from_checkpoint: str | bool | None) -> None:
    """Refuses that a run without samples of ours goes on from one with them: the stock order is another one."""
    folder = find_checkpoint(resume_from_checkpoint, trainer.args.output_dir) if resume_from_checkpoint else None
    saved = CheckpointRecord.load(folder) if folder is not None else None
    if saved is not None and not trainer.args.ignore_data_skip:
        raise ValueError(
            f"{folder} was written on packed or shared samples ({saved}), this run has neither: its steps stand for "
            "other samples.\n  Use ContextParallelConfig(force=True), or the max_tokens of that run, or set "
            "ignore_data_skip=True to begin the epoch anew."
        )


class _SeedDropout(TrainerCallback):
    """Runs once the random states of a checkpoint are loaded, one per process.

    If the ranks of a sample were not the ranks of a sample before, some of them may now have equal states, and would
    drop the same units of different tokens.
    """

    def __init__(self, saved: CheckpointRecord | None, mesh: ContextParallelMesh):
        self.mesh = mesh
        self.is_due = mesh.cp_size > 1 and (
            saved is None or (saved.world_size, saved.dp_size) != (mesh.world_size, mesh.dp_size)
        )

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.is_due:
            # no two pairs (step, cp_rank) have the same seed
            torch.manual_seed(args.seed + self.mesh.cp_size * state.global_step + self.mesh.cp_rank)
            self.is_due = False


class _RepairOptimizer(TrainerCallback):
    """Runs after the checkpoint is loaded and before the first step."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = folder

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        repair_optimizer(optimizer, self.folder)
