"""Families whose attention is called as Llama's is: each is supported because this test passes."""

from __future__ import annotations

import pytest
import torch

from hf_cp import ContextParallelConfig
from tests.models.test_patch import LENGTHS, train_step
from tests.models.test_rope import check_against_untouched, settings_of
from tests.models.tiny import OTHERS

# Phi-3 comes with LongRoPE and windows; SmolLM3 has layers without RoPE, which may have windows
CASES = {
    "phi3": [{}, settings_of("longrope") | {"sliding_window": 4}],
    "olmo2": [{}],
    "smollm3": [{}, {"use_sliding_window": True, "sliding_window": 4}],
}


def every_family() -> None:
    for family, cases in CASES.items():
        for settings in cases:
            loss_error, gradient_error = train_step(family, 2, 1, torch.float64, **settings)
            assert loss_error < 1e-12 and gradient_error < 1e-10, (family, settings)
            check_against_untouched(family, settings, LENGTHS, ContextParallelConfig(ring_degree=2))


@pytest.mark.distributed
def test_loss_and_every_gradient_are_exact(world2):
    assert CASES.keys() == OTHERS.keys()
    world2.run(every_family)
