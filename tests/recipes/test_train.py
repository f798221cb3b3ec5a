"""Parts of `hf-cp train` that a launched run does not reach."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from hf_cp.data.documents import to_documents
from hf_cp.recipes import train
from hf_cp.recipes.held_out import DocumentLosses
from hf_cp.recipes.settings import TrainSettings
from tests.training.tiny import REF, make_documents, make_model, make_trainer


def settings(**changes):
    return TrainSettings(model_name_or_path="model", dataset="documents", **changes)


def heads(query: int, kv: int) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=query, num_key_value_heads=kv)


@pytest.mark.parametrize(
    ("model", "cp_size", "ring", "ulysses"),
    [(heads(9, 3), 2, 2, 1), (heads(9, 3), 6, 2, 3), (heads(32, 8), 16, 1, 16), (heads(28, 4), 8, 2, 4)],
    ids=str,
)
def test_degrees_follow_from_the_heads(monkeypatch, model, cp_size, ring, ulysses):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = train.choose_degrees(settings(cp_size=cp_size), ContextParallelConfig(layout="contiguous"), model)
    assert (config.ring_degree, config.ulysses_degree, config.layout) == (ring, ulysses, "contiguous")


def test_ulysses_stays_inside_a_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = train.choose_degrees(settings(cp_size=16), ContextParallelConfig(), heads(32, 8))
    assert (config.ring_degree, config.ulysses_degree) == (4, 4)


def test_given_degrees_are_kept_or_refused():
    given = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
    assert train.choose_degrees(settings(), given, heads(4, 2)) is given
    assert train.choose_degrees(settings(cp_size=4), given, heads(4, 2)) is given
    with pytest.raises(ValueError, match=r"cp_size=8, but ring_degree=2 x ulysses_degree=2 is 4.*\n.*\(1, 2, 4\)"):
        train.choose_degrees(settings(cp_size=8), given, heads(4, 2))
    with pytest.raises(ValueError, match="does not divide the 9 query heads"):
        train.choose_degrees(settings(), given, heads(9, 3))


@pytest.mark.parametrize(
    ("given", "cp_size", "ring", "ulysses"),
    [((2, 8), 1, 1, 1), ((2, 8), 8, 1, 8), ((2, 8), 4, 1, 4), ((4, 2), 4, 2, 2), ((4, 1), 2, 2, 1), ((3, 4), 6, 3, 2)],
    ids=str,
)
def test_given_degrees_shrink_with_cp_size_the_ring_first(given, cp_size, ring, ulysses):
    """What the recipes promise: any divisor, `--cp_size 1` for whole rows; all other settings stay."""
    config = ContextParallelConfig(*given, layout="zigzag", keep_attention=False)
    found = train.choose_degrees(settings(cp_size=cp_size), config, heads(32, 8))
    assert (found.ring_degree, found.ulysses_degree) == (ring, ulysses)
    assert (found.layout, found.keep_attention) == ("zigzag", False)


def test_another_launch_than_expected_is_refused():
    zero2 = SimpleNamespace(world_size=2, deepspeed_plugin=SimpleNamespace(zero_stage=2))
    ddp = SimpleNamespace(world_size=2, deepspeed_plugin=None)
    train.check_processes(settings(expected_processes=2, expected_zero_stage=2), zero2)
    train.check_processes(settings(), ddp)
    with pytest.raises(RuntimeError, match="4 processes are expected, but 2 run together"):
        train.check_processes(settings(expected_processes=4), zero2)
    with pytest.raises(RuntimeError, match="stage 3 is expected, but the launcher asks for stage 2"):
        train.check_processes(settings(expected_zero_stage=3), zero2)
    with pytest.raises(RuntimeError, match="stage 2 is expected, but the launcher asks for no DeepSpeed"):
        train.check_processes(settings(expected_zero_stage=2), ddp)


def test_proof_documents_are_whole_and_one_is_long():
    documents = [to_documents({"input_ids": [1] * n})[0] for n in (900, 10, 300, 640, 200, 90, 5)]
    chosen = [len(document["input_ids"]) for document in train.choose_proof_documents(documents, 1000)]
    assert chosen == [640, 300, 10, 5]  # 900 is longer than two thirds of the row; 200 and 90 do not fit beside 940
    assert sum(chosen) <= 1000
    with pytest.raises(ValueError, match=r"shortest has 5 tokens, proof_tokens=6"):
        train.choose_proof_documents(documents, 6)


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_held_out_documents_are_evaluated_in_the_precision_of_training(bf16, expected):
    documents, computed_in = make_documents([20, 9, 14]), set()
    model = make_model(lora=True, dtype=torch.float32)
    trainer = make_trainer(model, REF, documents, eval_dataset=documents, bf16=bf16)
    recorder = train.Recorder(trainer, eval_every=0)
    trainer.add_callback(recorder)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, _, output: computed_in.add((module.training, output.dtype)))
    trainer.train()
    assert computed_in == {(True, expected), (False, expected)}
    assert sorted(recorder.evaluations) == [0, 3]


@pytest.mark.parametrize(
    ("named", "expected"), [(None, None), ("false", None), ("true", True), ("True", True), ("out/c-1", "out/c-1")]
)
def test_where_a_run_goes_on(named, expected):
    assert train.resume_point(SimpleNamespace(resume_from_checkpoint=named)) == expected


def test_loss_drop_of_the_evaluations():
    losses = [DocumentLosses((total, 2 * total), (1, 2)) for total in (3.0, 2.5, 2.0)]
    recorder = train.Recorder(trainer=None, eval_every=0)
    assert recorder.loss_drop(0.0) is None
    recorder.evaluations = {5: losses[0]}  # resumed at its last step
    assert recorder.loss_drop(0.0).drop == 0 and not recorder.loss_drop(3.0).passed
    recorder.evaluations = dict(enumerate(losses))
    assert recorder.loss_drop(0.0).drop == pytest.approx(1.0)
