"""What is measured once (zero_worlds.py) is shared by test_zero.py and test_zero_saves.py."""

from __future__ import annotations

import pytest
import torch

from tests.examples.launch import forked


@pytest.fixture(scope="session")
def worlds(tmp_path_factory, deepspeed_extension) -> dict[str, list[dict]]:
    """What every process of every world has computed; under `folder`, what they saved."""
    from tests.training.zero_worlds import WORLDS

    folder = tmp_path_factory.mktemp("zero")
    for world, (size, _) in WORLDS.items():
        (folder / world).mkdir()
        finished = forked("-m", "tests.training.zero_worlds", world, str(folder), processes=size, timeout=400)
        assert finished.status == 0, finished.output[-6000:]
    return {
        world: [
            torch.load(folder / world / f"rank{rank}.pt", weights_only=False) | {"folder": folder}
            for rank in range(size)
        ]
        for world, (size, _) in WORLDS.items()
    }


@pytest.fixture(scope="session")
def pair(worlds) -> list[dict]:
    """Of two processes that share every row."""
    return worlds["pair"]


@pytest.fixture(scope="session")
def two_pairs(worlds) -> list[dict]:
    """Of four processes, that share rows in pairs; they also go on from what two processes have saved."""
    return worlds["two_pairs"]
