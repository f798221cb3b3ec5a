"""What test_zero.py starts: DeepSpeed runs of two, of four, and of two processes again.

    python -m tests.training.zero_worlds OUT

Most of a launch is the import of torch, transformers and DeepSpeed. It is done once, here; the processes are forked,
with torchrun's variables. Every world goes on from the checkpoints of the one before, in OUT. A process writes what
it computed to OUT/<world>/rank<r>.pt, and ends at once: DeepSpeed's processes do not always end by themselves.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.examples.launch import free_port
from tests.training.tiny import make_model
from tests.training.zero_cases import four_processes, two_processes
from tests.training.zero_resume import go_back

WORLDS = {"pair": (2, two_processes), "two_pairs": (4, four_processes), "pair_again": (2, go_back)}


def run_rank(rank: int, world: str, port: int, out: Path) -> None:
    size, cases = WORLDS[world]
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    torch.save(cases(out), out / world / f"rank{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def import_all() -> None:
    import deepspeed  # noqa: F401

    make_model(lora=True)


def main() -> None:
    out = Path(sys.argv[1])
    import_all()
    for world, (size, _) in WORLDS.items():
        (out / world).mkdir()
        method = "fork" if sys.platform == "linux" else "spawn"
        start_processes(run_rank, (world, free_port(), out), nprocs=size, start_method=method)


if __name__ == "__main__":
    main()
