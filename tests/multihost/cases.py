"""What test_two_hosts.py launches, two processes on each of two hosts: ring across the hosts, Ulysses inside.

Writes what it computed to OUT/rank<r>.pt. Then it trains on, until the last rank is killed in the middle of a step.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from tests.training.tiny import Record, make_documents, make_model, make_trainer, train
from tests.training.zero_cases import LENGTHS, fresh_state, trainer_run

USP = ContextParallelConfig(ring_degree=2, ulysses_degree=2, timeout_seconds=60.0)


def ddp() -> Record:
    """In fp64, where only DeepSpeed's launcher is used."""
    fresh_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return train(USP, make_documents(LENGTHS), gradient_accumulation_steps=2)


def train_until_killed() -> None:
    """The last rank dies in the second micro-step, in the backward pass of layer 1."""
    fresh_state()
    model, calls = make_model(), []

    def strike(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make_trainer(model, USP, make_documents(LENGTHS), gradient_accumulation_steps=2)
    if dist.get_rank() == dist.get_world_size() - 1:
        model.model.layers[1].self_attn.register_full_backward_pre_hook(strike)
    trainer.train()


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    results = {"zero": trainer_run(config=USP)}
    results["ddp"] = replace(ddp(), log_history=[])
    results["host"] = Path("/proc/self/ns/net").readlink().name
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    train_until_killed()


if __name__ == "__main__":
    main()
