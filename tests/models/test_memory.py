"""Bytes of a training step: what is kept for the backward pass, and the peak of everything alive."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from hf_cp import ContextParallelConfig, apply_context_parallel
from hf_cp.sequence.layout import SequenceLayout
from tests.models.tiny import Row, tiny_model


class StepBytes(NamedTuple):
    saved: int  # distinct storages that autograd holds after the forward pass, parameters left out
    peak: int  # of all tensors together, parameters and gradients left out


def training_step(num_tokens: int, ring: int, ulysses: int) -> StepBytes:
    config = ContextParallelConfig(ring, ulysses, force=True, loss_chunk_tokens=256)
    model = apply_context_parallel(
        tiny_model(dtype=torch.float32, max_position_embeddings=num_tokens, intermediate_size=96), config
    )
    layout = SequenceLayout([num_tokens], config)
    cp_rank = dist.get_rank() % config.cp_size if dist.is_initialized() else 0
    batch = Row([num_tokens]).local_batch(layout, cp_rank)
    constant = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constant:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(**batch).loss.backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    fixed = sum(value for key, value in snapshot.items() if key in ("Parameter", "Gradient"))
    return StepBytes(sum(saved.values()), snapshot["Total"] - fixed)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_training_step_of_4096_tokens_needs_half_on_two_ranks(world1, world2):
    (one,) = world1.run(training_step, 4096, 1, 1)
    for degrees in ((2, 1), (1, 2)):
        for two in world2.run(training_step, 4096, *degrees):
            assert two.saved / one.saved <= 0.55
            assert two.peak / one.peak <= 0.55


@pytest.mark.distributed
def test_saved_bytes_shrink_with_the_group(world1, world2, world4):
    (one,) = world1.run(training_step, 1024, 1, 1)
    for world, size in ((world2, 2), (world4, 4)):
        for result in world.run(training_step, 1024, size, 1):
            assert abs(result.saved / one.saved * size - 1) < 0.15
