"""The chunked loss on the local shard: shards and rows without targets, memory, and equal numbers of module calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_cp import ContextParallelConfig, apply_context_parallel
from hf_cp.models.patch import context_parallel_state, local_token_losses
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample
from tests.attention.reference import relative_error
from tests.models.test_patch import LENGTHS, averaged_gradients
from tests.models.tiny import Row, tiny_model


def loss_without_targets(rank_without: int) -> None:
    """All targets of one rank are masked: the loss is still the mean over the row, and has a graph everywhere."""
    config = ContextParallelConfig(ring_degree=2, layout="contiguous")
    row, layout = Row([8], masked=0), SequenceLayout([8], config)
    row.shift_labels[rank_without * 4 : rank_without * 4 + 4] = -100
    model = apply_context_parallel(tiny_model(), config)
    mesh = context_parallel_state(model).mesh
    loss = model(**row.local_batch(layout, mesh.cp_rank)).loss
    untouched = tiny_model()
    expected = untouched(**row.whole_batch()).loss
    assert abs(loss - expected) < 1e-6 and loss.requires_grad
    loss.backward()
    expected.backward()
    got = averaged_gradients(model, mesh)["lm_head.weight"]
    assert relative_error(got, untouched.lm_head.weight.grad) < 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("rank_without", [0, 1])
def test_a_rank_without_targets(world2, rank_without):
    world2.run(loss_without_targets, rank_without)


def no_targets_at_all() -> None:
    config = ContextParallelConfig(ring_degree=2)
    row, layout = Row([8], masked=1.0), SequenceLayout([8], config)
    model = apply_context_parallel(tiny_model(), config)
    for count in ({}, {"num_items_in_batch": torch.tensor(0)}):
        loss = model(**row.local_batch(layout, dist.get_rank()), **count).loss
        loss.backward()
        assert loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.distributed
def test_a_row_without_targets_has_zero_loss_and_zero_gradients(world2):
    world2.run(no_targets_at_all)


def widest_logits(vocab_size: int) -> int:
    """Rows of the largest tensor with a vocabulary axis that a training step holds."""
    config = ContextParallelConfig(ring_degree=4, loss_chunk_tokens=32)
    row, layout = Row([512]), SequenceLayout([512], config)
    model = apply_context_parallel(tiny_model(dtype=torch.float32, vocab_size=vocab_size), config)
    rows = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == vocab_size:
                rows.append(result.numel() // vocab_size)
            return result

    with Record():
        model(**row.local_batch(layout, dist.get_rank())).loss.backward()
    return max(rows)


@pytest.mark.distributed
def test_logits_of_a_whole_shard_never_exist(world4):
    assert max(world4.run(widest_logits, 1000)) <= 32


def calls_of_lm_head(common_length: int | None) -> int:
    """A short row; beside it another replica may have a longer one."""
    config = ContextParallelConfig(ring_degree=2, loss_chunk_tokens=4)
    model, row, layout = apply_context_parallel(tiny_model(), config), Row([8]), SequenceLayout([8], config)
    calls = []
    model.lm_head.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    with torch.no_grad():
        batch = row.local_batch(layout, dist.get_rank())
        batch["hf_cp_sample"] = PackedSample(layout, common_length=common_length)
        loss = model(**batch).loss
    expected = tiny_model()(**row.whole_batch()).loss
    assert abs(loss - expected) < 1e-6
    return len(calls)


@pytest.mark.distributed
def test_a_short_row_calls_lm_head_as_often_as_the_longest(world2):
    assert world2.run(calls_of_lm_head, None) == [1, 1]
    assert world2.run(calls_of_lm_head, 23) == [6, 6]


def test_token_losses_of_patched_and_untouched_models():
    row = Row(LENGTHS)
    config = ContextParallelConfig(force=True)
    patched = local_token_losses(
        apply_context_parallel(tiny_model(), config), row.local_batch(SequenceLayout(LENGTHS, config), 0)
    )
    untouched = local_token_losses(tiny_model(), row.whole_batch())
    assert patched.shape == (sum(LENGTHS),) and torch.allclose(patched, untouched, atol=1e-12)
    assert not patched[row.shift_labels == -100].any() and (patched[row.shift_labels != -100] > 0).all()


def packed_against_single_documents() -> None:
    """A packed row on two ranks against its documents one by one in the untouched model, weighted by their targets."""
    lengths, config = (3, 5, 2, 6), ContextParallelConfig(ring_degree=2)
    row = Row(lengths, masked=0.2)
    untouched = tiny_model()
    for ids, labels in zip(row.input_ids.split(lengths), row.labels.split(lengths), strict=True):
        num_targets = int((labels[1:] != -100).sum())
        if num_targets:
            mean = untouched(ids[None], labels=labels[None], use_cache=False).loss
            (mean * num_targets / row.num_targets).backward()
    model = apply_context_parallel(tiny_model(), config)
    mesh = context_parallel_state(model).mesh
    model(**row.local_batch(SequenceLayout(lengths, config), mesh.cp_rank)).loss.backward()
    for name, gradient in averaged_gradients(model, mesh).items():
        assert relative_error(gradient, dict(untouched.named_parameters())[name].grad) < 1e-5, name


@pytest.mark.distributed
def test_a_packed_row_is_the_token_mean_of_its_documents(world2):
    world2.run(packed_against_single_documents)
