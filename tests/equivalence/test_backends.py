"""Configurations that must follow the same trajectory: six steps, every backend that runs in a pool, every split.

Losses, gradient norms, gradients and final parameters are those of one process in fp64, with and without clipping. In
bf16 the error may be twice that of one process, and the losses must not drift to one side. (ZeRO is launched as users
do: tests/training/test_zero.py.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from tests.training.fsdp2 import train_with_fsdp2
from tests.training.tiny import REF, STOCK, Record, make_documents, make_model, train, worst_difference

pytestmark = pytest.mark.distributed

LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens
NUM_STEPS = 6
RING, ULYSSES, USP = (ContextParallelConfig(*degrees) for degrees in ((2, 1), (1, 2), (2, 2)))

# size of the world, its split, and the backend's run
TABLE = {
    "ddp-ring2": (2, RING, "ddp"),
    "ddp-usp2x2": (4, USP, "ddp"),
    "ddp-dp2-ring2": (4, RING, "ddp"),
    "fsdp2-ring2": (2, RING, "fsdp2"),
    "fsdp2-ulysses2": (2, ULYSSES, "fsdp2"),
    "fsdp2-dp2-ring2": (4, RING, "fsdp2"),
    "hsdp2x2-usp2x2": (4, USP, "hsdp"),
}
CLIPPED = ("ddp-usp2x2", "fsdp2-dp2-ring2")


def run(config: ContextParallelConfig, backend: str, accumulation: int, **settings) -> Record:
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": NUM_STEPS, **settings}
    if backend == "ddp":
        return train(config, make_documents(LENGTHS), **settings)
    return train_with_fsdp2(config, make_documents(LENGTHS), replicas=2 if backend == "hsdp" else 1, **settings)


@cache
def reference(accumulation: int, max_grad_norm: float = 0.0) -> Record:
    return run(REF, "ddp", accumulation, max_grad_norm=max_grad_norm)


def check(request, name: str, max_grad_norm: float) -> None:
    size, config, backend = TABLE[name]
    expected = reference(2 * size // config.cp_size, max_grad_norm)
    records = request.getfixturevalue(f"world{size}").run(run, config, backend, 2, max_grad_norm=max_grad_norm)
    start = dict(make_model().named_parameters())
    assert len(expected.losses) == NUM_STEPS
    for record in records:
        difference = worst_difference(record, expected, start)
        assert max(vars(difference).values()) < 1e-10, difference
        logged = [entry["loss"] for entry in record.log_history if "loss" in entry]
        assert logged == pytest.approx(expected.losses, rel=1e-6)  # the Trainer adds up in fp32


@pytest.mark.parametrize("name", TABLE)
def test_trajectory(request, name):
    check(request, name, 0.0)


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_trajectory(request, name):
    """Every step is clipped; the gradients are recorded after that."""
    assert min(reference(4 if "dp2" in name else 2, 0.1).grad_norms) > 0.2
    check(request, name, 0.1)


@dataclass(frozen=True)
class Distance:
    """Of a bf16 run from the exact one: the updates' relative difference, and the mean of the losses' residuals."""

    update: float
    drift: float


def distance(record: Record, exact: Record) -> Distance:
    start = make_model().state_dict()
    squares = sum(float((record.parameters[n].double() - p).square().sum()) for n, p in exact.parameters.items())
    total = sum(float((p - start[n]).square().sum()) for n, p in exact.parameters.items())
    residuals = [a / b - 1 for a, b in zip(record.losses, exact.losses, strict=True)]
    return Distance((squares / total) ** 0.5, abs(sum(residuals)) / NUM_STEPS)


def test_bf16(world2):
    """Mixed precision, six steps: at most twice the error of one process, and no drift of the losses beyond it."""
    settings = {"bf16": True, "dtype": torch.float32}
    exact = reference(2)
    one = distance(run(STOCK, "ddp", 2, **settings), exact)
    assert 1e-4 < one.update < 0.1  # it did compute in bf16
    for backend in ("ddp", "fsdp2"):
        for record in world2.run(run, RING, backend, 2, **settings):
            found = distance(record, exact)
            assert found.update < 2 * one.update, (backend, found, one)
            assert found.drift < 2 * max(one.drift, one.update / 10), (backend, found, one)
