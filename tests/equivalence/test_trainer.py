"""cp=N equals cp=1 through the real Trainer, in fp64, with SGD and without clipping.

Packed documents of uneven lengths with random loss masks, 5 rows, windows of 2 micro-steps with a short last one, 3
optimizer steps. The loss of every step, the gradient norm, every gradient and every updated parameter are compared:
with the same loss code in one process to 1e-10, with the untouched model and the stock loss (which casts logits to
fp32) to 1e-6.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from tests.models.tiny import FAMILIES
from tests.training.tiny import (
    REF,
    STOCK,
    Record,
    make_documents,
    make_model,
    train,
    worst_difference,
)

# 13 documents fill 5 rows of 32 tokens; one document is a single token, three rows hold more than two documents
LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)
MAX_TOKENS = 32
NUM_ROWS = 5

SPLITS = {
    "ring2": (2, ContextParallelConfig(ring_degree=2)),
    "ulysses2": (2, ContextParallelConfig(ulysses_degree=2)),
    "ring4": (4, ContextParallelConfig(ring_degree=4)),
    "usp2x2": (4, ContextParallelConfig(ring_degree=2, ulysses_degree=2)),
    "dp2-ring2": (4, ContextParallelConfig(ring_degree=2)),
}


def run(config: ContextParallelConfig, family: str, lora: bool, accumulation: int, **settings) -> Record:
    return train(
        config,
        make_documents(LENGTHS),
        family=family,
        lora=lora,
        max_tokens=MAX_TOKENS,
        gradient_accumulation_steps=accumulation,
        **settings,
    )


@cache
def run_one_process(config: ContextParallelConfig, family: str, lora: bool, accumulation: int) -> Record:
    return run(config, family, lora, accumulation)


def start_parameters(family: str, lora: bool) -> dict[str, torch.Tensor]:
    return dict(make_model(family, lora=lora).named_parameters())


def compare_all_ranks(request, split: str, family: str, lora: bool) -> None:
    size, config = SPLITS[split]
    dp_size = size // config.cp_size
    records = request.getfixturevalue(f"world{size}").run(run, config, family, lora, 2)
    # the same rows per step in one process: dp takes dp_size rows per micro-step
    reference = run_one_process(REF, family, lora, 2 * dp_size)
    stock = run_one_process(STOCK, family, lora, 2 * dp_size)
    start = start_parameters(family, lora)
    assert len(reference.losses) == 3
    for record in records:
        difference = worst_difference(record, reference, start)
        assert max(vars(difference).values()) < 1e-10, difference
        difference = worst_difference(record, stock, start)
        assert max(vars(difference).values()) < 1e-6, difference


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_full_training(request, split, family):
    compare_all_ranks(request, split, family, lora=False)


@pytest.mark.distributed
@pytest.mark.parametrize("split", SPLITS)
def test_lora(request, split):
    """The gradients of A and B; the base weights do not move."""
    compare_all_ranks(request, split, "llama", lora=True)
    record = run_one_process(REF, "llama", True, 2)
    assert all(("lora_A" in name or "lora_B" in name) for name in record.gradients[0])
    start = start_parameters("llama", True)
    frozen = [name for name in start if "lora" not in name]
    assert frozen and all(torch.equal(record.parameters[name], start[name]) for name in frozen)
