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
from tests.examples.launch import build_deepspeed_extension, start_deepspeed_build

# Shared machines stall for seconds; tests have time limits of their own.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def deepspeed_extension() -> None:
    """It is compiled before the tests that launch DeepSpeed, so it does not count as their time."""
    build_deepspeed_extension()


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("deepspeed_extension" in getattr(item, "fixturenames", ()) for item in session.items):
        start_deepspeed_build()


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
