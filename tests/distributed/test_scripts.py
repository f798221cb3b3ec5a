"""Forked scripts end as torchrun's do: the first failure ends all, and one that hangs says where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.scripts import run_script
from tests.examples.launch import environment

pytestmark = pytest.mark.distributed

SUM = """
import os, sys
import torch
import torch.distributed as dist

if "RANK" in os.environ:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + int(sys.argv[1]))
    dist.all_reduce(total)
    print("total", int(total), flush=True)
else:
    print("alone", sys.argv[1:], __name__)
"""
FAILS = """
import os, time

if os.environ["RANK"] == "1":
    raise ValueError("rank 1 left early")
time.sleep(1000)
"""
HANGS = """
import time

def wait_for_nobody():
    time.sleep(1000)

wait_for_nobody()
"""


def run(folder: Path, text: str, *arguments: str, processes: int, timeout: float = 60.0) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(text)
    return run_script([str(script), *arguments], processes=processes, variables=environment(), timeout=timeout)


def test_a_world_and_a_process_alone(tmp_path):
    status, output = run(tmp_path, SUM, "10", processes=2)
    assert status == 0 and output.count("total 21") == 2
    assert run(tmp_path, SUM, "10", "--x", processes=1) == (0, "alone ['10', '--x'] __main__\n")


def test_the_first_failure_ends_all(tmp_path):
    began = time.monotonic()
    status, output = run(tmp_path, FAILS, processes=2)
    assert status == 1 and time.monotonic() - began < 40
    assert "rank 1 raised" in output and "ValueError: rank 1 left early" in output
    assert run(tmp_path, "raise SystemExit(7)", processes=1) == (7, "")


def test_who_hangs_says_where(tmp_path):
    with pytest.raises(AssertionError, match=r"did not end within 3 s") as caught:
        run(tmp_path, HANGS, processes=2, timeout=3.0)
    assert str(caught.value).count("in wait_for_nobody") == 2
    assert {f"rank {rank} of 2 hangs here" in str(caught.value) for rank in (0, 1)} == {True}
