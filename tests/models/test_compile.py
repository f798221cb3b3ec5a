"""torch.compile: the patched model computes what it computes uncompiled; graphs end only at attention."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from hf_cp import ContextParallelConfig, apply_context_parallel
from hf_cp.models.patch import context_parallel_state
from hf_cp.sequence.layout import SequenceLayout
from tests.attention.reference import relative_error
from tests.models.tiny import Row, tiny_model
from tests.training.tiny import make_documents, make_model, train, worst_difference

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = ((13, 1, 22, 6), (20, 9, 11), (31,))


class Compiled(NamedTuple):
    losses: list[float]
    expected_losses: list[float]
    error: float  # the worst of a gradient of the sum of the losses
    graphs: int
    breaks: list[str]  # names of the functions where graphs end


def losses_of(model: Any, run: Any, config: ContextParallelConfig, rows: tuple) -> list[float]:
    losses = []
    for seed, lengths in enumerate(rows):
        layout = SequenceLayout(lengths, config)
        loss = run(**Row(lengths, seed=seed).local_batch(layout, context_parallel_state(model).mesh.cp_rank)).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def compiled(backend: str, rows: tuple, *, checkpointing: bool = False, **settings: Any) -> Compiled:
    torch._dynamo.reset()
    counters.clear()
    config = ContextParallelConfig(2, loss_chunk_tokens=8, **settings)
    plain, model = (apply_context_parallel(tiny_model(num_hidden_layers=1), config).train() for _ in range(2))
    if checkpointing:
        model.activation_checkpointing_enable()
    expected = losses_of(plain, plain, config, rows)
    losses = losses_of(model, torch.compile(model, backend=backend), config, rows)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    error = max(relative_error(a.grad, b.grad) for a, b in pairs)
    # the function that is left out; for any other kind of break its whole text
    names = [re.sub(r"(?s).*function `?<function (\S+) at.*", r"\1", text) for text in counters["graph_break"]]
    return Compiled(losses, expected, error, counters["stats"]["unique_graphs"], names)


@pytest.mark.parametrize(
    ("settings", "breaks", "num_rows"),
    [
        ({"mlp_chunk_tokens": 16}, ["_telling.<locals>.forward", "_tiled.<locals>.forward", "attention"], 2),
        ({"checkpointing": True}, ["attention"], 1),  # torch runs checkpointed layers uncompiled
    ],
    ids=["chunked_mlp", "checkpointing"],
)
def test_exact(world2, settings, breaks, num_rows):
    """Rows of several lengths: the layout of a row is no part of what is compiled."""
    for result in world2.run(compiled, "aot_eager", ROWS[:num_rows], timeout=400, **settings):
        assert result.losses == pytest.approx(result.expected_losses, rel=1e-10)
        assert result.error < 1e-10
        assert sorted(set(result.breaks)) == breaks
        assert result.graphs >= 2


def test_inductor(world2):
    """Its code rounds the parts in fp32 (norms, rotary embeddings) differently."""
    for result in world2.run(compiled, "inductor", ROWS[:1], timeout=400):
        assert result.losses == pytest.approx(result.expected_losses, rel=1e-6)
        assert result.error < 1e-5
        assert set(result.breaks) == {"attention"}


def trained(**arguments: Any):
    torch._dynamo.reset()
    counters.clear()
    record = train(ContextParallelConfig(2), make_documents((29, 5, 11, 3)), max_steps=1, **arguments)
    return record, counters["stats"]["unique_graphs"]


def test_through_the_trainer(world2):
    start = make_model().state_dict()
    plain = world2.run(trained)
    compiled_runs = world2.run(trained, timeout=500, torch_compile=True, torch_compile_backend="aot_eager")
    for (record, graphs), (expected, none) in zip(compiled_runs, plain, strict=True):
        difference = worst_difference(record, expected, start)
        assert max(difference.loss, difference.gradient, difference.update) < 1e-10
        assert graphs >= 2 and none == 0
