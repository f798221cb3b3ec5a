"""What test_zero.py starts: DeepSpeed runs of two, of four, and of two processes again.

    torchrun --nproc_per_node 2 -m tests.training.zero_worlds pair OUT

Every world goes on from the checkpoints of the one before, in OUT. A process writes what it computed to
OUT/<world>/rank<r>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.zero_cases import four_processes, two_processes
from tests.training.zero_resume import go_back

WORLDS = {"pair": (2, two_processes), "two_pairs": (4, four_processes), "pair_again": (2, go_back)}


def main() -> None:
    world, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    _, cases = WORLDS[world]
    torch.save(cases(out), out / world / f"rank{os.environ['RANK']}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
