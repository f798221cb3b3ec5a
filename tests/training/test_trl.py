"""TRL's SFTTrainer on shared rows against the stock one in one process: gradients, weights and what it logs.

TRL's head adds up the gradient of `lm_head` in fp32, whatever the model is; everything else keeps fp64. So the
gradients of the first step, `lm_head` aside, agree to 1e-10, and all others to fp32. Its logs are fp32, too.
"""

from __future__ import annotations

import dataclasses
import re
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig
from trl.experimental.gkd import GKDTrainer
from trl.trainer import add_fused_lm_head

from hf_cp.config import ContextParallelConfig
from hf_cp.data import ContextParallelDataLoader, DataCollatorForContextParallel, to_documents
from hf_cp.models.patch import (
    apply_context_parallel,
    context_parallel_disabled,
    context_parallel_state,
    remove_context_parallel,
)
from hf_cp.training import ContextParallelTrainer, ContextParallelTrainerMixin
from hf_cp.training.sft import complete_sft
from tests.examples.launch import EXAMPLES, forked
from tests.models.tiny import Row, tiny_model
from tests.training.sft import (
    Case,
    ContextParallelSFTTrainer,
    Outcome,
    adapter,
    make_arguments,
    make_dataset,
    tokenizer,
    train_sft,
)
from tests.training.tiny import make_arguments as stock_arguments
from tests.training.tiny import relative

RING2 = ContextParallelConfig(ring_degree=2)
ULYSSES2 = ContextParallelConfig(ulysses_degree=2)
ONE = ContextParallelConfig(force=True)
PACKED = {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}

CASES = {
    "padded text": Case("text"),
    "packed by TRL": Case("text", PACKED),
    "completions, packed by TRL, LoRA": Case("completion", PACKED, lora=True),
    "chats, loss on the assistant": Case("messages", {"assistant_only_loss": True}),
    "completions, DFT": Case("completion", {"loss_type": "dft", "gradient_checkpointing": False}),
}
LOGGED = ("loss", "grad_norm", "num_tokens", "eval_loss", "eval_entropy", "eval_mean_token_accuracy")
PER_MICRO_STEP = ("entropy", "mean_token_accuracy")  # what TRL averages over micro-steps, whatever they hold


def train_all(names: list[str], config: ContextParallelConfig | None, dp_size: int = 1) -> list[Outcome]:
    return [train_sft(CASES[name], config, dp_size=dp_size) for name in names]


@pytest.fixture(scope="module")
def stock(world1) -> dict[str, Outcome]:
    """Every case by the untouched SFTTrainer in one process."""
    (outcomes,) = world1.run(train_all, list(CASES), None)
    return dict(zip(CASES, outcomes, strict=True))


def assert_same(outcome: Outcome, reference: Outcome, name: str, logged: tuple[str, ...]) -> None:
    assert len(outcome.gradients) == len(reference.gradients) == 2
    assert any(gradient.abs().max() > 1e-3 for gradient in reference.gradients[0].values())
    for step, gradients in enumerate(reference.gradients):
        assert outcome.gradients[step].keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            tolerance = 1e-10 if step == 0 and "lm_head" not in parameter else 1e-6
            assert relative(outcome.gradients[step][parameter], gradient) < tolerance, (name, step, parameter)
    for parameter, value in reference.parameters.items():
        assert relative(outcome.parameters[parameter], value) < 1e-6, (name, parameter)
    for entry, expected in zip(outcome.log_history, reference.log_history, strict=True):
        for key in [key for key in logged if key in expected]:
            assert entry[key] == pytest.approx(expected[key], rel=1e-6), (name, key)
    assert {key for entry in reference.log_history for key in entry} >= set(logged)


@pytest.mark.distributed
@pytest.mark.timeout(400)  # each process imports TRL once
@pytest.mark.parametrize("config", [RING2, ULYSSES2], ids=["ring", "ulysses"])
def test_two_processes_compute_what_one_does(world2, stock, config):
    names = list(CASES)[::2] if config is ULYSSES2 else list(CASES)
    for outcomes in world2.run(train_all, names, config, timeout=240):
        for name, outcome in zip(names, outcomes, strict=True):
            assert_same(outcome, stock[name], name, LOGGED + PER_MICRO_STEP)


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_two_rows_at_once(world2, stock):
    """Each process has every second row, so a step has the same ones."""
    for (outcome,) in world2.run(train_all, ["packed by TRL"], ONE, 2, timeout=240):
        assert_same(outcome, stock["packed by TRL"], "dp 2", LOGGED)


SETTINGS = {field.name for field in dataclasses.fields(SFTConfig)}


def build(config: ContextParallelConfig = ONE, *, trainer_class=ContextParallelSFTTrainer, patch=True, **changes):
    if "eval_dataset" not in changes:
        changes["eval_strategy"] = "no"
    arguments = {name: changes.pop(name) for name in list(changes) if name in SETTINGS}
    args = changes.pop("args", None) or make_arguments(**arguments)
    given = {
        "model": tiny_model(dtype=torch.float64),
        "train_dataset": make_dataset("text", (30, 9)),
        "processing_class": tokenizer(),
        "data_collator": DataCollatorForContextParallel(config, max_tokens=changes.pop("max_tokens", None)),
        **changes,
    }
    if patch:
        given["model"] = apply_context_parallel(given["model"], config)
    return trainer_class(args=args, **given)


def test_rows_packed_by_trl_are_read_as_documents():
    """Its packing and ours hold the same documents, each with its own targets."""
    trainer = build(packing=True, per_device_train_batch_size=1, train_dataset=make_dataset("text", (9, 7, 15, 11)))
    rows = [to_documents(feature) for feature in trainer.train_dataset]
    assert max(len(row) for row in rows) > 1  # TRL has joined documents
    ours = build(train_dataset=make_dataset("text", (9, 7, 15, 11)), per_device_train_batch_size=1, max_tokens=40)
    documents = [document for row in rows for document in row]
    expected = [to_documents(feature)[0] for feature in ours.train_dataset]
    found = sorted((d.input_ids.tolist(), d.shift_labels.tolist()) for d in documents)
    assert found == sorted((d.input_ids.tolist(), d.shift_labels.tolist()) for d in expected)
    manifest = ours.get_train_dataloader().manifest
    assert sum(manifest.lengths) == sum(map(len, documents)) and len(manifest.samples) < 4


def test_predictions_and_metrics_are_those_of_the_data_set():
    """`compute_metrics` gets whole documents; SFTTrainer's own metrics are logged beside it."""
    dataset = make_dataset("text", (12, 5, 9))
    seen = []
    trainer = build(
        eval_dataset=dataset,
        max_tokens=40,
        per_device_train_batch_size=1,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda prediction: seen.append(prediction) or {"features": len(prediction.label_ids)},
    )
    calls = []
    trainer.model.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    metrics = trainer.evaluate()
    assert len(calls) == len(trainer.get_eval_dataloader())  # the logits come from the same forward pass as the loss
    assert seen[0].label_ids.shape == (3, 13) and metrics["eval_features"] == 3  # a word each, and the end
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"} <= metrics.keys()
    with context_parallel_disabled(trainer.model), torch.no_grad():
        for ids, predicted in zip(trainer.eval_dataset["input_ids"], seen[0].predictions, strict=True):
            logits = trainer.model(torch.tensor([ids])).logits[0]
            assert predicted[: len(ids)].tolist() == logits.argmax(-1).tolist()


def test_prompt_learning_is_refused():
    """SFTTrainer wraps the model only after the patch, which has therefore not seen the adapter."""
    from peft import PromptTuningConfig

    with pytest.raises(ValueError, match="puts virtual tokens before the sample"):
        build(peft_config=PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def test_a_refused_model_stays_patched():
    trainer = build()
    forward = vars(trainer.model)["forward"]
    for owner, name, value in ((trainer.model.config, "attention_dropout", 0.1), (trainer, "aux_loss_enabled", True)):
        with patch.object(owner, name, value), pytest.raises(ValueError, match="attention_dropout|load-balancing"):
            complete_sft(trainer, max_tokens=None)
        assert context_parallel_state(trainer.model) is not None and vars(trainer.model)["forward"] is forward


def trained_types(lora: bool) -> set[torch.dtype]:
    args = {"args": make_arguments(eval_strategy="no")}  # it starts what accelerate needs
    model = tiny_model(dtype=torch.bfloat16)
    trainer = build(RING2, model=model, peft_config=adapter() if lora else None, **args)
    return {p.dtype for p in trainer.model.parameters() if p.requires_grad}


@pytest.mark.distributed
def test_sixteen_bit_weights(world2):
    """Frozen weights may be in 16 bits; trainable ones may not be. SFTTrainer freezes them after the first checks."""
    assert world2.run(trained_types, True) == [{torch.float32}] * 2
    for error in world2.run(trained_types, False, expect_error=True):
        assert "trainable parameters are in 16 bits" in error.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1 in SFTTrainer"),
        ({"per_device_train_batch_size": 2, "max_tokens": 40}, "per_device_train_batch_size=2"),
        ({"data_collator": None}, "NoneType makes the batches"),
        ({"model": "some/name", "patch": False, "config": RING2}, "model is not patched"),
    ],
    ids=["label smoothing", "batch size", "no collator", "model name"],
)
def test_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_short_max_length_is_said(caplog):
    """SFTConfig cuts to 1024 tokens by default, which makes a row of 131,072 a row of many short documents."""
    build(max_length=20, max_tokens=40, per_device_train_batch_size=1)
    assert "cuts documents to 20 tokens before they are packed into samples of 40" in caplog.text
    caplog.clear()
    build(max_length=None, max_tokens=40, per_device_train_batch_size=1)
    assert "cuts documents" not in caplog.text


def test_without_splitting_it_is_the_stock_trainer():
    config = ContextParallelConfig()
    trainer = build(config, packing=True, per_device_train_batch_size=1)
    assert context_parallel_state(trainer.model) is None
    assert not isinstance(trainer.get_train_dataloader(), ContextParallelDataLoader)
    trainer.train()


def test_removing_the_patch_leaves_trl_its_head():
    """The patch may stand inside of what TRL has put around the model, or around it."""
    row = Row([9, 4])
    batch = row.whole_batch() | {"fused_lm_head": True}
    model = tiny_model()
    add_fused_lm_head(model)
    expected = model(**batch).log_probs
    for model in (tiny_model(), tiny_model()):
        apply_context_parallel(model, ONE)
        add_fused_lm_head(model)
        remove_context_parallel(model)
        torch.testing.assert_close(model(**batch).log_probs, expected, rtol=1e-12, atol=0)
        apply_context_parallel(model, ONE)  # around it
        layout = DataCollatorForContextParallel(ONE)([{"input_ids": [5, 6, 7]}])
        assert model(**layout, fused_lm_head=True).log_probs.shape == (1, 3)
        remove_context_parallel(model)
        torch.testing.assert_close(model(**batch).log_probs, expected, rtol=1e-12, atol=0)


class ContextParallelDPO(ContextParallelTrainerMixin, DPOTrainer):
    pass


class ContextParallelGKD(ContextParallelTrainerMixin, GKDTrainer):
    pass


PAIRS = [{"prompt": "w5 w6", "chosen": "w7", "rejected": "w8"}]


@pytest.mark.parametrize("trainer_class", [ContextParallelDPO, ContextParallelGKD])
@pytest.mark.parametrize("collator", [DataCollatorForContextParallel(ONE), None], ids=["ours", "own"])
def test_other_trainers_of_trl_are_refused(trainer_class, collator, tmp_path):
    """GKDTrainer is an SFTTrainer, but not its loss."""
    args = DPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none")
    model = apply_context_parallel(tiny_model(), ONE)
    with pytest.raises(ValueError, match=rf"{trainer_class.__name__} is TRL's .*whole sequences"):
        trainer_class(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer(),
            data_collator=collator,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "feature",
    [
        PAIRS[0],
        {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]},
        {"input_ids": [5, 6], "input_ids_chosen": [5, 6], "attention_mask": [0, 1]},
        {"prompt": "w5", "completion": "w6", "label": True},
    ],
    ids=["pairs", "tokens", "old names", "KTO"],
)
@pytest.mark.parametrize("hold", [list, Dataset.from_list], ids=["list", "Dataset"])
def test_preference_data_is_refused_by_its_columns(feature, hold):
    """Before anything is packed, whatever trainer the user has written."""
    with pytest.raises(ValueError, match="preference or reward training"):
        ContextParallelTrainer(
            model=apply_context_parallel(tiny_model(), ONE),
            args=stock_arguments(),
            train_dataset=hold([feature]),
            data_collator=DataCollatorForContextParallel(ONE, max_tokens=32),
        )
    with pytest.raises(ValueError, match="Feature 3 has the column"):  # at another place of a data set
        to_documents(feature, name="Feature 3")


def test_a_class_label_beside_text_is_no_preference_data():
    assert len(to_documents({"input_ids": [5, 6, 7], "label": 1})) == 1


LOSSES = re.compile(r"loss ([\d.]+) -> ([\d.]+)")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_example(tmp_path):
    assert len((EXAMPLES / "sft_trl.py").read_text().splitlines()) < 120
    finished = forked("sft_trl.py", "--output_dir", str(tmp_path / "split"), processes=2, timeout=200)
    assert finished.status == 0, finished.output
    before, after = (float(loss) for loss in LOSSES.search(finished.output).groups())
    assert after < before - 0.2
    assert (tmp_path / "split" / "model.safetensors").exists()
