"""Runs that test_callback.py looks at, on every rank of a world."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

from hf_cp.config import ContextParallelConfig
from hf_cp.data.manifest import PackingManifest
from hf_cp.training.telemetry.callback import ContextParallelCallback
from tests.training.tiny import RecordingTrainer, make_documents, make_model, make_trainer

LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens
SLEEP = 0.4


@dataclass(frozen=True)
class Observed:
    """What one rank has logged."""

    logs: list[dict[str, float]]  # of training, by log
    manifest: PackingManifest
    order: list[int]  # rows as they were dealt
    messages: list[str]  # on standard error, of this package
    clock_is_off: bool  # after training


class SleepyTrainer(RecordingTrainer):
    """The last rank sleeps before every micro-step, rank 1 logs by itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.cp_mesh.rank == self.cp_mesh.world_size - 1:
            time.sleep(SLEEP)
        if self.cp_mesh.rank == 1:
            self.log({"loss": 0.0})
        return super().training_step(model, inputs, num_items_in_batch)


def observe(config: ContextParallelConfig, callback: dict[str, Any], **settings: Any) -> Observed:
    settings.setdefault("callbacks", [ContextParallelCallback(**callback)])
    documents = make_documents(LENGTHS)
    trainer = make_trainer(
        make_model(), config, documents, eval_dataset=documents[:3], train_sampling_strategy="sequential", **settings
    )
    with redirect_stderr(io.StringIO()) as printed:
        trainer.train()
    messages = [line for line in printed.getvalue().splitlines() if line.startswith("hf_cp: ")]
    loader = trainer.get_train_dataloader()
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    return Observed(logs, loader.manifest, loader.order.samples(0), messages, trainer.cp_comm.clock is None)


def observe_pairs(folder: str) -> list[Observed]:
    """Two ranks share rows: over a ring, evaluated after every step; over Ulysses, with recomputed layers."""
    ring = ContextParallelConfig(ring_degree=2, ring_comm="p2p")
    return [
        observe(
            ring,
            {"record_dir": f"{folder}/ring", "profile_steps": {2}},
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=1,
        ),
        observe(
            ContextParallelConfig(ulysses_degree=2, keep_attention=False),
            {"record_dir": f"{folder}/ulysses", "peak_tflops": 1e-3},
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=2,
            max_steps=3,
        ),
    ]


def observe_two_pairs(folder: str) -> Observed:
    return observe(
        ContextParallelConfig(ring_degree=2),
        {"record_dir": folder},
        trainer_class=SleepyTrainer,
        logging_steps=3,
        max_steps=3,
    )
