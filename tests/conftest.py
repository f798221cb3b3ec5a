"""Shared fixtures: process pools of 1 to 4 ranks, and the same seeds and default dtype for every test."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Before torch is imported: one thread per process, and nothing from outside this machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import numpy as np
import pytest
import torch

from tests.distributed.world import InProcessWorld, World

# Shared machines stall for seconds; tests have time limits of their own.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


POOLS = {"world2", "world3", "world4"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` (pytest-xdist) one worker runs all files that start processes, one after another.

    The other one runs the rest, so that the second core works while a pool waits, and no pool exists twice.
    """
    with_processes = {
        item.path
        for item in items
        if item.get_closest_marker("distributed") or POOLS & set(getattr(item, "fixturenames", ()))
    }
    for item in items:
        group = "processes" if item.path in with_processes else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """The main process starts every test as worker.py starts every call: seed 0, fp32, one thread."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def world1() -> InProcessWorld:
    return InProcessWorld()


def _world_fixture(size: int):
    @pytest.fixture(scope="session", name=f"world{size}")
    def fixture() -> Iterator[World]:
        world = World(size)
        yield world
        world.close()

    return fixture


world2 = _world_fixture(2)
world3 = _world_fixture(3)
world4 = _world_fixture(4)
