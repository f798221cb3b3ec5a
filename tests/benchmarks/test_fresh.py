"""benchmarks/fresh.py: new processes with a launcher's environment; a failure ends them all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh import busy_core, run_fresh


def place() -> tuple[int, int, str]:
    return os.getpid(), int(os.environ["RANK"]), os.environ["WORLD_SIZE"]


def make_append(path: Path) -> Callable[[], None]:
    def append() -> None:
        with path.open("a") as file:
            file.write("x")
        time.sleep(0.01)

    return append


@pytest.mark.distributed
def test_new_processes(tmp_path):
    calls = tmp_path / "calls"
    with busy_core(make_append, calls):
        before = calls.stat().st_size
        results = run_fresh(place, world_size=2)
        assert calls.stat().st_size > before > 0
    assert len({pid for pid, _, _ in results} | {os.getpid()}) == 3
    assert [(rank, size) for _, rank, size in results] == [(0, "2"), (1, "2")]
    after = calls.stat().st_size
    time.sleep(0.1)
    assert calls.stat().st_size == after
