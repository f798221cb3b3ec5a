"""The feed-forward part in chunks: exact, equally many calls on all ranks, never computed three times."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_cp import ContextParallelConfig, apply_context_parallel, context_parallel_disabled, remove_context_parallel
from hf_cp.models.mlp import in_chunks
from hf_cp.models.patch import context_parallel_state
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample
from tests.attention.reference import relative_error
from tests.models.tiny import Row, tiny_model
from tests.training.tiny import make_model

LENGTHS = (29, 5, 11, 3)


class Way(NamedTuple):
    family: str
    lora: bool = False
    checkpointing: bool | None = None  # use_reentrant
    chunk_tokens: int | None = 5
    common_length: int | None = None  # where another sample of the step is longer

    def prepared(self, config: ContextParallelConfig) -> nn.Module:
        model = apply_context_parallel(make_model(self.family, lora=self.lora), config)
        if self.checkpointing is not None:
            model.activation_checkpointing_enable({"use_reentrant": self.checkpointing})
        return model.train()


WAYS = [
    Way("llama"),
    Way("mistral", lora=True),
    Way("qwen2", checkpointing=False),
    Way("qwen3", lora=True, checkpointing=True),
    Way("llama", lora=True, checkpointing=False, chunk_tokens=7),
    Way("llama", chunk_tokens=1, common_length=60),  # more chunks than tokens
    Way("llama", chunk_tokens=1000),
]


def calls_of(model: nn.Module) -> Counter:
    """Counts the calls of one projection, with its tokens, from now on."""
    seen: Counter[str] = Counter()

    def hook(module: nn.Module, args: tuple) -> None:
        seen["calls"] += 1
        seen["most_tokens"] = max(seen["most_tokens"], args[0].shape[1])

    (projection,) = (m for name, m in model.named_modules() if name.endswith("layers.1.mlp.gate_proj"))
    projection.register_forward_pre_hook(hook)
    return seen


def gradients_of(model: nn.Module, config: ContextParallelConfig, way: Way) -> dict[str, torch.Tensor]:
    mesh, layout = context_parallel_state(model).mesh, SequenceLayout(LENGTHS, config)
    batch = Row(LENGTHS).local_batch(layout, mesh.cp_rank)
    batch["hf_cp_sample"] = PackedSample(layout, common_length=way.common_length)
    model(**batch).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if mesh.cp_size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=mesh.cp_group)
            gradient /= mesh.cp_size
    return gradients


class Compared(NamedTuple):
    """A step in chunks on this rank."""

    error: float  # the worst of a gradient, against one process that does all tokens at once
    calls: int  # of one projection, in forward and backward pass
    most_tokens: int  # in a call


def compare(way: Way) -> Compared:
    config = ContextParallelConfig(2, loss_chunk_tokens=5, mlp_chunk_tokens=way.chunk_tokens)
    model = way.prepared(config)
    calls = calls_of(model)
    gradients = gradients_of(model, config, way)
    one = ContextParallelConfig(force=True)
    expected = gradients_of(way._replace(checkpointing=None).prepared(one), one, way)
    assert gradients.keys() == expected.keys() and len(gradients) > 10
    worst = max(relative_error(gradients[name], value) for name, value in expected.items())
    return Compared(worst, calls["calls"], calls["most_tokens"])


def compare_all() -> list[Compared]:
    return [compare(way) for way in WAYS]


@pytest.mark.distributed
def test_exact_with_equally_many_calls(world2):
    """25 slots: 5 chunks of 5, 4 of up to 7, or 60 of up to 1; each computed once forward and once backward."""
    first, second = world2.run(compare_all, timeout=120)
    calls = [2 * 5, 2 * 5, 2 * 5, 3 * 5, 2 * 4, 2 * 60, 1]  # re-entrant checkpointing computes them three times
    most_tokens = [5, 5, 5, 5, 7, 1, 25]
    for rank in (first, second):
        assert all(compared.error < 1e-10 for compared in rank)
        assert [compared.calls for compared in rank] == calls
        assert [compared.most_tokens for compared in rank] == most_tokens


def tiny_mlp() -> nn.Module:
    return tiny_model(intermediate_size=640, hidden_size=32).model.layers[0].mlp


@pytest.mark.parametrize("needs_input_gradient", [True, False])
def test_chunks_bound_what_is_saved(needs_input_gradient):
    """Only the input is saved, and in no call more than a chunk is computed."""
    mlp, saved = tiny_mlp(), []
    hidden = torch.randn(1, 40, 32, dtype=torch.float64, requires_grad=needs_input_gradient)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = in_chunks(mlp.forward, hidden, 4)
    assert {x.untyped_storage().data_ptr() for x in saved} == {hidden.untyped_storage().data_ptr()}
    out.square().sum().backward()
    gradients = [p.grad.clone() for p in mlp.parameters()] + [hidden.grad] * needs_input_gradient
    mlp.zero_grad()
    again = hidden.detach().requires_grad_(needs_input_gradient)
    mlp(again).square().sum().backward()
    expected = [p.grad for p in mlp.parameters()] + [again.grad] * needs_input_gradient
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(gradients, expected, strict=True))


def test_dropout_masks_are_those_of_the_first_run():
    """out = mask * in * 2 for each token: the gradient of its sum shows the mask of the backward pass."""
    layer, hidden = nn.Sequential(nn.Dropout(0.5)), torch.ones(1, 64, 8, requires_grad=True)
    out = in_chunks(lambda x: layer(x) * x, hidden, 4)
    out.sum().backward()
    assert 0.2 < (out == 0).double().mean() < 0.8
    assert torch.equal(hidden.grad, 2 * out.detach())


def test_undo_and_whole_rows():
    config = ContextParallelConfig(force=True, mlp_chunk_tokens=3)
    model, row = tiny_model(), Row(LENGTHS)
    expected = model(**row.whole_batch()).loss
    seen = calls_of(model)
    apply_context_parallel(model, config)
    with context_parallel_disabled(model), torch.no_grad():
        assert model(**row.whole_batch()).loss.equal(expected)
    assert seen["calls"] == 1
    with torch.no_grad():
        model(**row.local_batch(SequenceLayout(LENGTHS, config), 0))
    assert seen["calls"] == 1 + 16
    remove_context_parallel(model)
    assert all("forward" not in vars(layer.mlp) for layer in model.model.layers)
    assert model(**row.whole_batch()).loss.equal(expected)


def test_experts_are_refused():
    model = tiny_model()
    model.model.layers[1].mlp.experts = nn.ModuleList()
    with pytest.raises(ValueError, match=r"mlp_chunk_tokens=4, but the feed-forward part of layer 1 .*\n.*=None"):
        apply_context_parallel(model, ContextParallelConfig(force=True, mlp_chunk_tokens=4))
