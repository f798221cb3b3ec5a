"""RoPE types: with every one of them a rank uses the frequencies that one process uses, row after row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from hf_cp import (
    ContextParallelConfig,
    DataCollatorForContextParallel,
    apply_context_parallel,
    context_parallel_disabled,
)
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import context_parallel_state
from hf_cp.models.rope import frequencies_of_the_sample, rope_types, rotaries_by_length
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample
from tests.attention.cases import gather_shards
from tests.attention.reference import relative_error
from tests.models.test_patch import averaged_gradients, train_step
from tests.models.tiny import Row, tiny_model

FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 8} | BANDS,
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 8} | FACTORS,
}
SPLITS = {"contiguous": (2, 1), "zigzag": (2, 1), "document": (1, 2)}


def settings_of(rope_type: str) -> dict[str, Any]:
    """Made for a context of 8, which the documents of these tests leave."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4} | ROPES[rope_type]
    is_extended = "original_max_position_embeddings" in rope
    return {"rope_parameters": rope, "max_position_embeddings": 32 if is_extended else 8}


def config_of(layout: str) -> ContextParallelConfig:
    return ContextParallelConfig(*SPLITS[layout], layout=layout)


def whole_logits(model: nn.Module, row: Row, layout: SequenceLayout, positions: torch.Tensor | None) -> torch.Tensor:
    """Of a patched model, put together from its ranks."""
    batch = {name: value for name, value in row.local_batch(layout, dist.get_rank()).items() if "labels" not in name}
    if positions is None:
        del batch["position_ids"]
    else:
        batch["position_ids"] = layout.shard(positions, dist.get_rank())[None]
    return layout.unshard(gather_shards(model(**batch).logits, context_parallel_state(model).mesh), dim=1)


def dynamic_frequencies() -> None:
    """Every rank has the second frequency of length 16, also the one that sees positions 0 to 7 only."""
    row = Row([16])
    untouched = tiny_model(**settings_of("dynamic"))
    expected = untouched(row.input_ids[None], use_cache=False).logits
    for layout in SPLITS:
        for positions in (None, row.position_ids):  # made from the layout, or given by hand
            model = apply_context_parallel(tiny_model(**settings_of("dynamic")), config_of(layout))
            found = whole_logits(model, row, SequenceLayout([16], config_of(layout)), positions)
            assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(0.069336, abs=1e-6), layout
            assert (found - expected).abs().max() < 1e-10, layout


@pytest.mark.distributed
def test_dynamic_frequencies_are_those_of_the_whole_row(world2):
    world2.run(dynamic_frequencies)


# (documents, trained on): grows, keeps, is evaluated, is reset by a short row, grows by less, keeps
HISTORY = (
    ([16, 3], True),
    ([10], True),
    ([12, 2], False),
    ([5, 6], False),
    ([9, 8], True),
    ([8], True),
    ([20], False),
)


def same_history(rope_type: str) -> list[float]:
    """Training steps and evaluations on one model: after each the frequencies are those of one process."""
    config = config_of("zigzag")
    untouched = tiny_model(**settings_of(rope_type))
    model = apply_context_parallel(tiny_model(**settings_of(rope_type)), config)
    frequencies = []
    for lengths, is_trained in HISTORY:
        row, layout = Row(lengths), SequenceLayout(lengths, config)
        for each in (untouched, model):
            each.train(is_trained)
        with torch.set_grad_enabled(is_trained):
            expected = untouched(**row.whole_batch()).loss
            loss = model(**row.local_batch(layout, dist.get_rank())).loss
        assert relative_error(loss.detach(), expected.detach()) < 1e-6, lengths
        if is_trained:
            loss.backward()
        assert torch.equal(model.model.rotary_emb.inv_freq, untouched.model.rotary_emb.inv_freq), lengths
        frequencies.append(model.model.rotary_emb.inv_freq[1].item())
    rotary = model.model.rotary_emb
    assert not rotary._forward_hooks and not rotary._forward_pre_hooks
    return frequencies


def both_histories() -> dict[str, list[float]]:
    return {rope_type: same_history(rope_type) for rope_type in ("dynamic", "longrope")}


@pytest.mark.distributed
def test_the_frequencies_have_the_history_of_one_process(world2):
    first, second = world2.run(both_histories)
    assert first == second
    grown, kept, evaluated, reset, *_ = first["dynamic"]
    assert grown == kept == evaluated != reset == pytest.approx(0.1, abs=1e-6)
    assert len(set(first["longrope"])) == 2


def check_against_untouched(
    family: str, settings: dict, lengths: tuple[int, ...], config: ContextParallelConfig
) -> None:
    """Loss and gradients to 1e-6: the loss of transformers is in fp32."""
    untouched, row = tiny_model(family, **settings), Row(lengths)
    expected = untouched(**row.whole_batch()).loss
    expected.backward()
    model = apply_context_parallel(tiny_model(family, **settings), config)
    mesh = context_parallel_state(model).mesh
    loss = model(**row.local_batch(SequenceLayout(lengths, config), mesh.cp_rank)).loss
    loss.backward()
    assert relative_error(loss.detach(), expected.detach()) < 1e-6, settings
    for name, gradient in averaged_gradients(model, mesh).items():
        assert relative_error(gradient, dict(untouched.named_parameters())[name].grad) < 1e-6, name


def every_type() -> None:
    """Loss and gradients, against the same loss in one process and against the untouched model."""
    for number, rope_type in enumerate(ROPES):
        ring, ulysses = ((2, 1), (1, 2))[number % 2]
        checkpointing = {"dynamic": False, "longrope": True}.get(rope_type)  # use_reentrant
        loss_error, gradient_error = train_step(
            "llama", ring, ulysses, torch.float64, checkpointing=checkpointing, **settings_of(rope_type)
        )
        assert loss_error < 1e-12 and gradient_error < 1e-10, rope_type
        check_against_untouched("qwen3", settings_of(rope_type), (16, 3, 9), config_of("zigzag"))


@pytest.mark.distributed
def test_every_type_is_exact(world2):
    world2.run(every_type)


def positions_of_the_user() -> None:
    """Two documents of 8 with running positions 0 to 15: the frequencies are those of length 16, not 8."""
    config, rank = config_of("zigzag"), dist.get_rank()
    documents = [{"input_ids": list(range(3, 11)), "position_ids": list(range(i, i + 8))} for i in (0, 8)]
    for running, second_frequency in ((True, 0.069336), (False, 0.1)):
        model = apply_context_parallel(tiny_model(**settings_of("dynamic")), config)
        if not running:
            documents = [{"input_ids": document["input_ids"]} for document in documents]
        batch = DataCollatorForContextParallel(config, cp_rank=rank)(documents)
        assert batch["hf_cp_sample"].max_position == (15 if running else 7)
        model(**batch).loss.backward()
        assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(second_frequency, abs=1e-6)
    row, layout = Row([8, 8]), SequenceLayout([8, 8], config)  # by hand: the layout does not know the positions
    untouched = tiny_model(**settings_of("dynamic"))
    cu_seqlens = {"position_ids": torch.arange(16)[None], "use_cache": False}
    model = apply_context_parallel(tiny_model(**settings_of("dynamic")), config)
    whole_logits(model, row, layout, torch.arange(16))
    untouched(row.input_ids[None], **cu_seqlens)
    assert torch.equal(model.model.rotary_emb.inv_freq, untouched.model.rotary_emb.inv_freq)


@pytest.mark.distributed
def test_positions_that_the_user_gives(world2):
    world2.run(positions_of_the_user)


def running_positions() -> list[int]:
    documents = [{"input_ids": [5] * 4, "position_ids": list(range(i, i + 4))} for i in (0, 4)]
    batch = DataCollatorForContextParallel(config_of("zigzag"), cp_rank=0)(documents)
    return batch["position_ids"].flatten().tolist()


def test_running_positions_are_sharded_as_they_are():
    assert running_positions() == [0, 3, 4, 7]


def test_hooks_are_gone_after_an_error():
    model = apply_context_parallel(tiny_model(**settings_of("dynamic")), ContextParallelConfig(force=True))
    rotary, layout = model.model.rotary_emb, SequenceLayout([16], ContextParallelConfig())
    with pytest.raises(RuntimeError, match="stop"):
        with frequencies_of_the_sample(
            (rotary,), PackedSample(layout), torch.arange(16)[None], comm=context_parallel_state(model).comm
        ):
            assert rotary._forward_hooks
            raise RuntimeError("stop")
    assert not rotary._forward_hooks and not rotary._forward_pre_hooks


def test_generation_and_whole_rows_are_those_of_the_untouched_model():
    prompt, settings = torch.tensor([[5, 6, 7, 8]]), {"max_new_tokens": 8, "do_sample": False}
    untouched = tiny_model(**settings_of("dynamic"))
    model = apply_context_parallel(tiny_model(**settings_of("dynamic")), ContextParallelConfig(force=True))
    assert model.generate(prompt, **settings).equal(untouched.generate(prompt, **settings))
    row = Row([16, 3])
    with context_parallel_disabled(model):
        assert model(**row.whole_batch()).loss.equal(untouched(**row.whole_batch()).loss)


def test_one_rotary_for_several_kinds_of_layers():
    """Newer models hold the frequencies of all kinds of layers in one module."""
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    }
    config = Gemma3TextConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=2, max_position_embeddings=8,
        layer_types=list(ropes), rope_parameters=ropes,
    )  # fmt: skip
    assert rope_types(config) == {"default", "dynamic"}
    alone, shared = Gemma3RotaryEmbedding(config), Gemma3RotaryEmbedding(config)
    assert rotaries_by_length(nn.ModuleList([shared])) == (shared,)
    comm = Communicator(ContextParallelMesh(ContextParallelConfig()))
    sample = PackedSample(SequenceLayout([16], ContextParallelConfig()), max_position=15)
    x = torch.zeros(1, dtype=torch.float64)
    local = torch.tensor([[0, 1, 6, 7]])
    for kind in ropes:
        whole = alone(x, torch.arange(16)[None], kind)
        with frequencies_of_the_sample((shared,), sample, local, comm=comm):
            for found in (shared(x, local, kind), shared(x, position_ids=local, layer_type=kind)):
                for table, expected in zip(found, whole, strict=True):
                    assert torch.equal(table, expected[:, [0, 1, 6, 7]]), kind


def test_a_type_that_nobody_knows_is_refused(monkeypatch):
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="'spiral'.*default, linear, llama3, yarn, dynamic, longrope"):
        apply_context_parallel(model, ContextParallelConfig(force=True))
