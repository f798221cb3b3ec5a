"""predict() and compute_metrics on shared and packed rows: what the stock Trainer returns for the same documents.

The reference is the stock Trainer in one process, one document at a time, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import EvalPrediction, Trainer

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.models.loss import token_losses
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelTrainer
from tests.training.tiny import LORA_TARGETS, REF, STOCK, make_arguments, make_documents, make_model

pytestmark = pytest.mark.distributed

LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens
RING2 = ContextParallelConfig(ring_degree=2)


class Case(NamedTuple):
    """How rows are made and split; batch_size only counts where rows are not packed."""

    config: ContextParallelConfig
    max_tokens: int | None = 32
    batch_size: int = 1


class Result(NamedTuple):
    predictions: Any
    label_ids: np.ndarray
    metrics: dict[str, float]


ONE_PROCESS = [Case(REF), Case(STOCK), Case(STOCK, 40)]
TWO_PROCESSES = [
    Case(ContextParallelConfig(ring_degree=2, layout="zigzag")),
    Case(ContextParallelConfig(ring_degree=2, layout="striped", loss_chunk_tokens=3), 64),
    Case(ContextParallelConfig(ulysses_degree=2)),
    Case(RING2, None, 3),
    Case(STOCK),  # dp 2: packed rows, untouched model
]
FOUR_PROCESSES = [
    Case(RING2),  # dp 2, an odd number of rows
    Case(ContextParallelConfig(ring_degree=2, ulysses_degree=2)),
    Case(ContextParallelConfig(ring_degree=4, loss_chunk_tokens=2), 64),
]


def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def several(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Of several types and shapes, one of them from the labels."""
    values, tokens = logits.topk(3)
    return {"top": (values.to(torch.bfloat16), tokens), "seen": labels == -100, "size": logits.exp().sum(-1).float()}


def accuracy(result: EvalPrediction) -> dict[str, Any]:
    """Written for the stock Trainer: shifts by itself."""
    counted = result.label_ids[:, 1:] != -100
    hits = (result.predictions[:, :-1] == result.label_ids[:, 1:]) & counted
    return {"accuracy": hits.sum() / counted.sum(), "eval_targets": counted.sum()}


def build(case: Case, documents: list[dict], *, model: Any = None, overflow: str = "error", **settings: Any) -> Any:
    names = ("compute_metrics", "preprocess_logits_for_metrics", "eval_dataset")
    others = {name: settings.pop(name) for name in names if name in settings}
    args = make_arguments(per_device_eval_batch_size=case.batch_size, **settings)
    return ContextParallelTrainer(
        model=apply_context_parallel(make_model() if model is None else model, case.config),
        args=args,
        train_dataset=documents,
        data_collator=DataCollatorForContextParallel(case.config, max_tokens=case.max_tokens, overflow=overflow),
        **others,
    )


def predict(cases: list[Case], documents: list[dict], **settings: Any) -> list[Result]:
    results = []
    for case in cases:
        output = build(case, documents, **settings).predict(documents)
        results.append(Result(output.predictions, output.label_ids, output.metrics))
    return results


def one_at_a_time(features: list[dict]) -> dict[str, torch.Tensor]:
    (feature,) = features
    return {name: torch.tensor([feature[name]]) for name in ("input_ids", "labels")}


@cache
def stock(lengths: tuple[int, ...] = LENGTHS, preprocess: Callable | None = None, metrics: Callable | None = None):
    trainer = Trainer(
        model=make_model(),
        args=make_arguments(),
        data_collator=one_at_a_time,
        preprocess_logits_for_metrics=preprocess,
        compute_metrics=metrics,
    )
    return trainer.predict(make_documents(lengths))


def all_results(request, documents: list[dict], **settings: Any) -> list[Result]:
    """Of every case, on every rank."""
    results = predict(ONE_PROCESS, documents, **settings)
    for world, cases in (("world2", TWO_PROCESSES), ("world4", FOUR_PROCESSES)):
        for rank_results in request.getfixturevalue(world).run(predict, cases, documents, **settings):
            results += rank_results
    assert len(results) == 3 + 2 * 5 + 4 * 3
    return results


@pytest.mark.parametrize("lengths", [(16,) * 8, LENGTHS], ids=["8 rows", "uneven"])
def test_logits_are_those_of_the_stock_trainer(request, lengths):
    """Natural token order, order of the data set, every document once, padded with -100."""
    documents, expected = make_documents(lengths), stock(lengths)
    assert expected.predictions.shape == (len(lengths), max(lengths), 64)
    for result in all_results(request, documents):
        assert result.predictions.dtype == np.float64 and result.label_ids.dtype == np.int64
        np.testing.assert_allclose(result.predictions, expected.predictions, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(result.label_ids, expected.label_ids)


def test_reduced_logits_are_those_of_the_stock_trainer(request):
    """A dict with a tuple in it; bf16, integers, booleans and fp32."""
    expected = stock(preprocess=several).predictions
    for result in all_results(request, make_documents(LENGTHS), preprocess_logits_for_metrics=several):
        found = result.predictions
        assert list(found) == list(expected) and isinstance(found["top"], tuple)
        np.testing.assert_allclose(found["top"][0], expected["top"][0], rtol=1e-2)
        np.testing.assert_array_equal(found["top"][1], expected["top"][1])
        is_token = expected["top"][1][..., 0] >= 0  # stock pads booleans with True
        np.testing.assert_array_equal(found["seen"][is_token], expected["seen"][is_token])
        np.testing.assert_allclose(found["size"], expected["size"], rtol=1e-6)


def test_metrics_are_those_of_the_stock_trainer(request):
    documents = make_documents(LENGTHS)
    expected = stock(preprocess=argmax, metrics=accuracy).metrics
    targets = sum(label != -100 for document in documents for label in document["labels"][1:])
    settings = {"preprocess_logits_for_metrics": argmax, "compute_metrics": accuracy}
    for result in all_results(request, documents, **settings):
        assert result.metrics["test_accuracy"] == expected["test_accuracy"] > 0
        assert result.metrics["test_eval_targets"] == targets
        assert result.metrics["test_loss"] == pytest.approx(4.29, abs=0.1)


def losses_and_inputs(result: EvalPrediction) -> dict[str, Any]:
    return {"losses": result.losses.tolist(), "inputs": result.inputs.tolist()}


def test_losses_and_inputs_for_metrics(world4):
    documents = make_documents((9, 4, 1, 7, 6))
    settings = {"compute_metrics": losses_and_inputs, "include_for_metrics": ["loss", "inputs"]}
    model, expected = make_model(), []
    for document in documents:
        ids, targets = torch.tensor([document["input_ids"]]), torch.tensor(document["labels"])[1:]
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], targets, reduction="none")
        expected.append(float(losses.sum() / max(1, (targets != -100).sum())))
    results = [predict([Case(REF, 12), Case(STOCK, 12)], documents, **settings)]
    results += world4.run(predict, [Case(RING2, 12)], documents, **settings)
    for result in [result for rank_results in results for result in rank_results]:
        assert result.metrics["test_losses"] == pytest.approx(expected, rel=1e-10)
        assert [[i for i in row if i != -100] for row in result.metrics["test_inputs"]] == [
            document["input_ids"] for document in documents
        ]


FEATURES = [
    {"input_ids": list(range(20, 41))},  # 21 tokens: too long for a row of 8
    {"input_ids": []},
    {"input_ids": [3, 4, 5, 6, 7, 8], "seq_lengths": [4, 2]},
    {"input_ids": [0, 0, 9, 10, 11], "attention_mask": [0, 0, 1, 1, 1]},
    {"input_ids": [12, 13]},
]


@pytest.mark.parametrize("overflow", ["split", "drop", "truncate"])
def test_features_that_are_not_one_document(world4, overflow):
    """Entry i is feature i: cut ones are joined, left out ones are -100 throughout, padding is cut off."""
    kept = {"split": 21, "drop": 0, "truncate": 8}[overflow]
    length, model = max(kept, 6), make_model()
    pieces = [  # (feature, start, documents)
        *((0, start, list(range(20, 41))[start : start + 8]) for start in range(0, kept, 8)),
        (2, 0, [3, 4, 5, 6]),
        (2, 4, [7, 8]),
        (3, 0, [9, 10, 11]),
        (4, 0, [12, 13]),
    ]
    logits, labels = np.full((5, length, 64), -100.0), np.full((5, length), -100)
    for feature, start, ids in pieces:
        with torch.no_grad():
            logits[feature, start : start + len(ids)] = model(torch.tensor([ids])).logits[0].numpy()
        labels[feature, start : start + len(ids)] = ids
        labels[feature, start] = -100 if start else ids[0]
    results = [predict([Case(REF, 8), Case(STOCK, 8)], FEATURES, overflow=overflow)]
    results += world4.run(predict, [Case(RING2, 8)], FEATURES, overflow=overflow)
    for result in [result for rank_results in results for result in rank_results]:
        np.testing.assert_allclose(result.predictions, logits, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(result.label_ids, labels)


def shards_without_targets() -> dict[str, float]:
    """All targets are on rank 0; then nowhere."""
    document = make_documents([16], masked=0.0)[0]
    document["labels"][8:] = [-100] * 8
    config = ContextParallelConfig(ring_degree=2, layout="contiguous")
    settings = {"preprocess_logits_for_metrics": argmax, "compute_metrics": accuracy}
    metrics = build(Case(config), [document], eval_dataset=[document], **settings).evaluate()
    document["labels"] = [-100] * 16
    without = build(Case(config), [document], preprocess_logits_for_metrics=argmax).predict([document])
    assert without.predictions.shape == (1, 16) and not any("loss" in name for name in without.metrics)
    return metrics


def test_a_rank_without_targets(world2):
    for metrics in world2.run(shards_without_targets):
        assert metrics["eval_targets"] == 7
        assert 0 <= metrics["eval_accuracy"] <= 1 and np.isfinite(metrics["eval_loss"])


def shorter(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)[:, :-1]


def fails_on_rank_1(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise KeyError("no such label")
    return logits.argmax(-1)


def other_sizes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[..., : 3 + dist.get_rank()]


def changes_on_rank_1(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Another size in every second call."""
    changes_on_rank_1.calls = getattr(changes_on_rank_1, "calls", 0) + 1
    return logits[..., : 3 + changes_on_rank_1.calls % 2 * (dist.get_rank() == 1)]


def predict_with(preprocess: Callable | None, max_bytes: int | None = None) -> None:
    config = ContextParallelConfig(ring_degree=2, loss_chunk_tokens=4)  # several calls of a micro-step
    trainer = build(Case(config), make_documents(LENGTHS), preprocess_logits_for_metrics=preprocess)
    if max_bytes is not None:
        trainer.max_prediction_bytes = max_bytes
    trainer.predict(make_documents(LENGTHS))


@pytest.mark.parametrize(
    ("preprocess", "words"),
    [
        (shorter, ("ValueError", "returned [1, ", "compute_metrics")),
        (fails_on_rank_1, ("RuntimeError", "1 of 4 ranks", "rank 1: KeyError", "no such label")),
        (changes_on_rank_1, ("RuntimeError", "1 of 4 ranks", "rank 1: ValueError", "the shapes [[3]] and [[4]]")),
        (other_sizes, ("ValueError", "[24, 32, 40, 48] bytes by rank")),
    ],
)
def test_errors_of_a_preprocess_function_reach_all_ranks(world4, preprocess, words):
    for error in world4.run(predict_with, preprocess, expect_error=True):
        assert all(word in f"{error.type_name}: {error.message}" for word in words), error


def test_a_result_that_is_too_large_is_refused(world2):
    """13 documents x 30 tokens x 64 logits x 8 bytes = 199,680."""
    for error in world2.run(predict_with, None, 199_679, expect_error=True):
        assert error.type_name == "ValueError"
        words = ("13 features", "30 tokens", "199,680 bytes", "199,679", "argmax")
        assert all(word in error.message for word in words)
    assert world2.run(predict_with, None, 199_680) == [None, None]
    assert world2.run(predict_with, argmax, 199_679) == [None, None]


def train_lora(evaluated: bool) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """With dropout, so that a draw of random numbers would show."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        make_model(), LoraConfig(r=2, lora_dropout=0.3, target_modules=LORA_TARGETS, init_lora_weights=False)
    )
    trainer = build(
        Case(RING2),
        make_documents(LENGTHS),
        model=model,
        eval_dataset=make_documents((9, 4, 17)),
        preprocess_logits_for_metrics=argmax,
        compute_metrics=accuracy,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=1,
        eval_on_start=evaluated,
    )
    trainer.train()
    if evaluated:
        trainer.predict(make_documents((9, 4)))
    trainer.train()
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return trained, [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]


def test_evaluation_changes_nothing_in_training(world2):
    plain = world2.run(train_lora, False)
    for (expected, _), (parameters, log) in zip(plain, world2.run(train_lora, True), strict=True):
        assert all(torch.equal(parameters[name], parameter) for name, parameter in expected.items())
        assert len(log) == 4 and all(entry["eval_targets"] > 0 for entry in log)


def test_logits_are_shown_without_gradients_only():
    """In training a chunk is computed twice, so its logits would be seen twice."""
    hidden, targets = torch.randn(5, 8), torch.tensor([1, 2, -100, 3, -100])
    seen, head = [], torch.nn.Linear(8, 64)
    with torch.no_grad():
        token_losses(hidden, head, targets, num_chunks=8, on_logits=seen.append)
    assert torch.allclose(torch.cat(seen), head(hidden)) and all(len(logits) == 1 for logits in seen)
    with pytest.raises(ValueError, match="no_grad"):
        token_losses(hidden, head, targets, num_chunks=8, on_logits=seen.append)
