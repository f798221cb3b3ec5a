"""Checkpoints of the Trainer: what it adds to them, and what it checks before it goes on from one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

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
    harmless_differences,
)
from hf_cp.training.deepspeed import repair_optimizer

logger = get_logger(__name__)


class CheckpointsMixin:
    """The part of [`ContextParallelTrainerMixin`] that is about checkpoints."""

    _train_loader: ContextParallelDataLoader | StreamDataLoader | None = None
    _resumed: CheckpointRecord | None = None  # while train() goes on from one

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As stock, with `hf_cp.json` beside the weights; these are whole, also with FSDP's SHARDED_STATE_DICT."""
        if not self._own_rows:
            return super().save_model(output_dir, _internal_call)
        record = self._record()  # on every process: before training it makes the process groups
        if self.args.should_save:
            record.save(self.args.output_dir if output_dir is None else output_dir)
        is_checkpoint = _internal_call and output_dir is not None
        with self._whole_weights() if self.is_fsdp_enabled and not is_checkpoint else nullcontext():
            super().save_model(output_dir, _internal_call)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Inside, the Trainer's `save_model` writes weights; with SHARDED_STATE_DICT it would silently write none."""
        plugin = self.accelerator.state.fsdp_plugin
        chosen = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            yield
        finally:
            plugin.set_state_dict_type(chosen)

    def _record(self) -> CheckpointRecord:
        return CheckpointRecord.of(
            self.accelerator,
            self.cp_mesh,
            self._cp_config,
            rows_per_step=self.get_total_train_batch_size(self.args),
            position=None if self._train_loader is None else self._train_loader.position,
        )

    def _note_train_loader(self, loader: ContextParallelDataLoader | StreamDataLoader) -> None:
        """Before the first step: are these the rows that the checkpoint counts?"""
        self._train_loader = loader
        if self._resumed is not None and not self.args.ignore_data_skip:
            check_steps(self._resumed, self._record())

    @contextmanager
    def _resuming(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | bool | None]:
        """Checks the checkpoint that train() is to go on from, and yields its folder."""
        if not self._own_rows:
            self._check_stock_order(resume_from_checkpoint)
            yield resume_from_checkpoint
            return
        found = find_on_all_ranks(resume_from_checkpoint, self.args.output_dir, self.cp_comm)
        if found is None:
            yield resume_from_checkpoint
            return
        is_other_world = self._check_found(found)
        self._resumed = found.record
        universal = self._universal_load(found.folder) if is_other_world else nullcontext()
        try:
            with universal, self._called(_SeedDropout(found.record, self.cp_mesh)):
                yield found.folder
        finally:
            self._resumed = None

    def _check_found(self, found: Found) -> bool:
        """Raises unless this run can go on from it; returns whether ZeRO's parts are for another number of ranks."""
        # the rows are compared once their loader is made; one of an earlier train() says nothing
        saved, current = found.record, replace(self._record(), position=None)
        if saved is None:
            if self.args.ignore_data_skip:
                return False
            raise ValueError(
                f"{found.folder} has no hf_cp.json: it was written by another Trainer, whose steps stand for other "
                "rows.\n  Set ignore_data_skip=True to take weights and optimizer from it and begin the epoch anew."
            )
        check_states(
            saved,
            current,
            change=f"Run `hf-cp universal {found.folder}` once, or resume with {saved.world_size} processes.",
            may_differ=found.is_universal,
        )
        if self.accelerator.is_fsdp2:
            check_fsdp_form(found.folder, self.accelerator.state.fsdp_plugin.state_dict_type.name)
        if not self.args.ignore_data_skip:
            check_steps(saved, current)
        differences = harmless_differences(saved, current)
        if differences:
            logger.info(f"Going on from {found.folder} with another layout or other versions: {differences}.")
        is_other_world = bool(saved.zero_stage) and saved.world_size != current.world_size
        if is_other_world and self.args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True does not work in a run that goes on from a universal checkpoint "
                f"({saved.world_size} -> {current.world_size} processes): DeepSpeed would look for more of them.\n"
                "  Set it to False, and load the best checkpoint yourself."
            )
        return is_other_world

    @contextmanager
    def _universal_load(self, folder: str) -> Iterator[None]:
        """Inside, DeepSpeed's engine reads universal checkpoints, and its optimizer is repaired after loading."""
        plugin = self.accelerator.state.deepspeed_plugin
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
        self.add_callback(callback)
        try:
            yield
        finally:
            self.remove_callback(callback)

    def _check_stock_order(self, resume_from_checkpoint: str | bool | None) -> None:
        """The stock Trainer deals features in another order than our loader."""
        folder = find_checkpoint(resume_from_checkpoint, self.args.output_dir) if resume_from_checkpoint else None
        saved = CheckpointRecord.load(folder) if folder is not None else None
        if saved is not None and not self.args.ignore_data_skip:
            raise ValueError(
                f"{folder} was written on packed or shared rows ({saved}), this run has neither: its steps stand for "
                f"other rows.\n  Use ContextParallelConfig(force=True), or the max_tokens of that run, or set "
                "ignore_data_skip=True to begin the epoch anew."
            )


class _SeedDropout(TrainerCallback):
    """Runs once the random states of a checkpoint are loaded, one per process.

    If the ranks of a row were not the ranks of a row before, some of them may now have equal states, and would drop
    the same units of different tokens.
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
