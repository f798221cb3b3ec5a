"""Label smoothing, windows without targets, and counters of tokens: those of one process with whole rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from hf_cp.config import ContextParallelConfig
from tests.training.tiny import (
    REF,
    STOCK,
    Record,
    make_documents,
    make_model,
    make_trainer,
    relative,
    train,
    worst_difference,
)

pytestmark = pytest.mark.distributed

LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens
RING2 = ContextParallelConfig(ring_degree=2)
SMOOTHING = 0.3


def train_smoothed(config: ContextParallelConfig, accumulation: int = 2, **settings) -> Record:
    """3 steps over 5 rows: the last window is short."""
    documents = make_documents(LENGTHS)
    return train(
        config,
        documents,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=SMOOTHING,
        eval_dataset=documents[:5],
        eval_on_start=True,
        **settings,
    )


def eval_loss(record: Record) -> float:
    return next(entry["eval_loss"] for entry in record.log_history if "eval_loss" in entry)


@cache
def smoothed_by_hand() -> tuple[float, dict[str, torch.Tensor]]:
    """Mean over all targets of (1 - e) * loss + e * mean of -log p, without any code of ours: value and gradients."""
    model, total, count = make_model(), 0.0, 0
    for document in make_documents(LENGTHS):
        ids, labels = torch.tensor([document["input_ids"]]), torch.tensor(document["labels"])[1:]
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)[labels != -100]
        targets = labels[labels != -100]
        total -= (1 - SMOOTHING) * log_probs.gather(1, targets[:, None]).sum() + SMOOTHING * log_probs.mean(-1).sum()
        count += len(targets)
    (total / count).backward()
    return float(total.detach() / count), {name: p.grad for name, p in model.named_parameters()}


def test_one_step_over_all_rows(world2):
    """The smoothed mean over every target; the stock smoother gives the same for a row's logits."""
    loss, gradients = smoothed_by_hand()
    records = [train_smoothed(REF, 5, max_steps=1), train_smoothed(STOCK, 5, max_steps=1)]
    for record in records + world2.run(train_smoothed, RING2, 5, max_steps=1):
        tolerance = 1e-6 if record is records[1] else 1e-10  # stock adds up in fp32
        assert record.losses == pytest.approx([loss], rel=tolerance)
        assert record.log_history[-2]["loss"] == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert relative(record.gradients[0][name], gradient) < tolerance
    plain = train(REF, make_documents(LENGTHS), gradient_accumulation_steps=5, max_steps=1)
    assert abs(plain.losses[0] - loss) > 1e-3


@pytest.mark.parametrize(
    ("world", "config", "accumulation"),
    [
        ("world2", replace(RING2, loss_chunk_tokens=3), 2),
        ("world2", STOCK, 1),  # dp 2, packed, untouched model
        ("world4", RING2, 1),  # dp 2
        ("world4", ContextParallelConfig(ring_degree=2, ulysses_degree=2), 2),
    ],
    ids=["ring2", "dp2", "dp2-ring2", "usp"],
)
def test_smoothed_training(request, world, config, accumulation):
    reference = train_smoothed(REF)
    start = {name: p.detach() for name, p in make_model().named_parameters()}
    tolerance = 1e-10 if config.enabled else 1e-6
    for record in request.getfixturevalue(world).run(train_smoothed, config, accumulation):
        assert max(vars(worst_difference(record, reference, start)).values()) < tolerance
        assert eval_loss(record) == pytest.approx(eval_loss(reference), rel=1e-10)


def test_evaluation_is_smoothed_as_by_the_stock_trainer():
    """One document a batch, with equally many targets each, where the stock mean of batch means is exact."""
    documents = make_documents([9] * 4, masked=0.0)
    logits, smoother, model = [], LabelSmoother(SMOOTHING), make_model()
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        with torch.no_grad():
            logits.append(float(smoother({"logits": model(ids).logits}, ids, shift_labels=True)))
    for config in (REF, STOCK):
        trainer = make_trainer(
            make_model(), config, documents, eval_dataset=documents, label_smoothing_factor=SMOOTHING
        )
        assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(logits) / 4, rel=1e-6)


def sparse_documents() -> list[dict]:
    """6 rows of 16 tokens: rows 0, 2 and 3 have no target, row 1 has one only."""
    documents = make_documents([16] * 6)
    for number in (0, 2, 3):
        documents[number]["labels"] = [-100] * 16
    documents[1]["labels"] = [-100] * 5 + documents[1]["input_ids"][5:6] + [-100] * 10
    return documents


def train_sparse(config: ContextParallelConfig, accumulation: int, **settings) -> Record:
    return train(
        config,
        sparse_documents(),
        max_tokens=16,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        **settings,
    )


@pytest.mark.parametrize(
    ("world", "config", "accumulation"),
    [("world2", RING2, 2), ("world2", STOCK, 1), ("world4", RING2, 1)],
    ids=["ring2", "dp2", "dp2-ring2"],
)
def test_windows_without_targets(request, world, config, accumulation):
    """Rows {0, 1}, {2, 3}, {4, 5} are the windows: the second one has no target and changes nothing."""
    reference = train_sparse(REF, 2)
    one_process = [train_sparse(STOCK, 2)] if config is STOCK else []
    assert reference.losses[1] == 0.0 and not any(g.any() for g in reference.gradients[1].values())
    assert reference.losses[0] > 1 and reference.losses[2] > 1
    tolerance = 1e-10 if config.enabled else 1e-6
    for record in request.getfixturevalue(world).run(train_sparse, config, accumulation) + one_process:
        assert record.losses == pytest.approx(reference.losses, rel=tolerance)
        assert record.grad_norms == pytest.approx(reference.grad_norms, rel=tolerance)
        for name, parameter in reference.parameters.items():
            assert relative(record.parameters[name], parameter) < tolerance
        logged = [entry["loss"] for entry in record.log_history if "loss" in entry]
        assert logged == pytest.approx(reference.losses, rel=1e-6)  # the Trainer adds up in fp32


def tokens_seen(config: ContextParallelConfig, lengths: list[int], count: str, **settings) -> list[int]:
    """After every optimizer step of an epoch."""
    trainer = make_trainer(
        make_model(),
        config,
        make_documents(lengths),
        include_num_input_tokens_seen=count,
        train_sampling_strategy="sequential",
        **{"max_steps": -1, "num_train_epochs": 1, **settings},
    )
    trainer.train()
    return [entry["num_input_tokens_seen"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_token_is_counted_once(world2, world4):
    """37 tokens in rows of 11, 16 and 10; rows that fill up dp ranks and the padding of shards do not count."""
    lengths, settings = [11, 5, 11, 10], {"max_tokens": 16}
    rows = [11, 27, 37]
    assert tokens_seen(REF, lengths, "non_padding", **settings) == rows
    assert tokens_seen(STOCK, lengths, "non_padding", **settings) == rows
    for seen in world2.run(tokens_seen, RING2, lengths, "non_padding", **settings):
        assert seen == rows
    for world, config in ((world2, STOCK), (world4, RING2)):
        for seen in world.run(tokens_seen, config, lengths, "non_padding", **settings):
            assert seen == [27, 37]
    # "all" counts slots: 12 + 16 + 10
    assert world2.run(tokens_seen, RING2, lengths, "all", **settings) == [[12, 28, 38]] * 2
