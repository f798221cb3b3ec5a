"""Shared fixtures: process pools of 1 to 4 ranks, and the same seeds and default dtype for every test.

And the two speeds: everything, or with `--fast` one case of every kind. Two pytest processes share the work (`-n 2`):
a file stays together, since its cases share what was computed before them.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

# Before torch is imported: one thread per process, and nothing from outside this machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import numpy as np
import pytest
import torch

from tests.distributed.template import process_context
from tests.distributed.world import InProcessWorld, World
from tests.examples.launch import build_deepspeed_extension, start_deepspeed_build

# Shared machines stall for seconds; tests have time limits of their own.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def deepspeed_extension() -> None:
    """It is compiled before the tests that launch DeepSpeed, so it does not count as their time."""
    build_deepspeed_extension()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the first case of every test; slow ones only if marked fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast"):
        chosen = fast_ones(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    slow = {group_of(str(item.path)) for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: group_of(str(item.path)) not in slow
    )  # long ones first: nobody waits for them at the end


@pytest.hookimpl(optionalhook=True)  # there is no such hook without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files for a worker, so that what a file computes once is computed once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.split("::")[0])

    return ByGroup(config, log)


def fast_ones(items: list[pytest.Item]) -> set[pytest.Item]:
    """The first case of every test that is not slow, and the slow ones that are marked: no other is like them."""
    first: dict[tuple, pytest.Item] = {}
    for item in items:
        left_out = item.get_closest_marker("slow") or item.get_closest_marker("multihost")
        if item.get_closest_marker("fast") or not left_out:
            first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
    return set(first.values())


def group_of(path: str) -> str:
    """A test file; the files about ZeRO are one, since they look at one set of runs."""
    return "zero" if path.endswith(("test_zero.py", "test_zero_saves.py")) else path


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("deepspeed_extension" in getattr(item, "fixturenames", ()) for item in session.items):
        start_deepspeed_build()
    if any(item.get_closest_marker("distributed") for item in session.items):
        process_context()  # it imports beside the first tests
    gc.freeze()  # what is imported now stays: collections need not visit it


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
