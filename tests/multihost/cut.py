"""What test_two_hosts.py starts once on each host: a sum over the hosts, and one more after the cable is cut.

Writes the error of the second one, and after how many seconds it came, to OUT/lost<r>.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.collectives import sum_over_cp
from hf_cp.distributed.communicator import CommunicationError, Communicator
from hf_cp.distributed.mesh import ContextParallelMesh

LIMIT = 5.0  # seconds


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = ContextParallelMesh(ContextParallelConfig(ring_degree=2, timeout_seconds=LIMIT))
    assert sum_over_cp(torch.ones(1), Communicator(mesh)).item() == 2.0
    (out / f"ready{mesh.rank}").touch()
    while not (out / "cut").exists():
        time.sleep(0.05)
    began = time.monotonic()
    try:
        sum_over_cp(torch.ones(1), Communicator(mesh))
    except CommunicationError as error:
        (out / f"lost{mesh.rank}").write_text(f"{time.monotonic() - began}\n{error}")
    os._exit(0)  # the store is on the other side of the cut


if __name__ == "__main__":
    main()
