"""The scale of loss and gradients: unequal targets per rank and per micro-step, counted once."""

from __future__ import annotations

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.models.patch import apply_context_parallel
from tests.training.fixed_loss import LOSS_2, LOSS_4, make_document, make_fixed_loss_model
from tests.training.tiny import REF, RecordingTrainer, make_documents, make_model, make_trainer, relative, train

pytestmark = pytest.mark.distributed

RING2_CONTIGUOUS = ContextParallelConfig(ring_degree=2, layout="contiguous")


def unequal_document() -> dict[str, list[int]]:
    """Cut in two halves of 8: 6 targets of loss 2 on the first, 2 targets of loss 4 on the second."""
    return make_document([LOSS_2] * 8 + [LOSS_4] * 8, [True] * 6 + [False] * 2 + [True] * 2 + [False] * 6)


def model_losses() -> tuple[float, float]:
    """The model's own loss, and the number of targets that this rank has."""
    model = apply_context_parallel(make_fixed_loss_model(), RING2_CONTIGUOUS)
    batch = DataCollatorForContextParallel(RING2_CONTIGUOUS)([unequal_document()])
    return float(model(**batch).loss.detach()), int((batch["shift_labels"] != -100).sum())


def test_unequal_targets_per_rank(world2):
    """The token mean is 2.5; the mean of the two ranks' means would be 3.0."""
    (loss0, targets0), (loss1, targets1) = world2.run(model_losses)
    assert (targets0, targets1) == (6, 2)
    assert loss0 == pytest.approx(2.5, rel=1e-12) and loss1 == pytest.approx(2.5, rel=1e-12)


def train_two_documents(config: ContextParallelConfig, accumulation: int, features: int) -> tuple[dict, torch.Tensor]:
    """One step over a document with 6 targets of loss 2 and one with 2 targets of loss 4."""
    documents = [
        make_document([LOSS_2] * 16, [True] * 6 + [False] * 10),
        make_document([LOSS_4] * 16, [True] * 2 + [False] * 14),
    ]
    model = make_fixed_loss_model()
    trainer = make_trainer(
        model,
        config,
        documents,
        max_tokens=None,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=features,
        max_steps=1,
    )
    trainer.train()
    return trainer.state.log_history[0], model.lm_head.weight.detach().clone()


def test_unequal_micro_steps(world2):
    """Two micro-steps follow the same loss, 2.5, and take the same step as one row with both documents."""
    expected_log, expected_weight = train_two_documents(REF, 1, 2)
    start = make_fixed_loss_model().lm_head.weight
    assert expected_log["loss"] == pytest.approx(2.5, rel=1e-6)
    for accumulation, features in ((2, 1), (1, 2)):
        results = world2.run(train_two_documents, ContextParallelConfig(ring_degree=2), accumulation, features)
        for log, weight in results:
            assert log["loss"] == pytest.approx(2.5, rel=1e-6)
            assert log["loss"] == results[0][0]["loss"]
            assert relative(weight - start, expected_weight - start) < 1e-10


def masked_half() -> list[dict]:
    """Contiguous halves of 8: all targets (4) are on the second rank."""
    (document,) = make_documents([16], masked=0.0)
    document["labels"] = [-100 if not 9 <= i < 13 else label for i, label in enumerate(document["labels"])]
    return [document]


def train_masked_half(config: ContextParallelConfig) -> tuple[list[float], float, torch.Tensor, bool]:
    documents = masked_half()
    model = make_model()
    trainer = make_trainer(model, config, documents, max_tokens=16, eval_dataset=documents, max_steps=1)
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    batch = DataCollatorForContextParallel(config)(documents)
    has_graph = model(**batch, num_items_in_batch=1).loss.requires_grad
    return trainer.step_losses(), eval_loss, model.lm_head.weight.detach().clone(), has_graph


def test_rank_without_targets(world2):
    losses, eval_loss, weight, _ = train_masked_half(REF)
    for rank_losses, rank_eval_loss, rank_weight, has_graph in world2.run(train_masked_half, RING2_CONTIGUOUS):
        assert rank_losses == pytest.approx(losses, rel=1e-10)
        assert rank_eval_loss == pytest.approx(eval_loss, rel=1e-10)
        assert relative(rank_weight, weight) < 1e-12
        assert has_graph


class _CountingTrainer(RecordingTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.counts = [*getattr(self, "counts", []), int(num_items_in_batch)]
        return super().training_step(model, inputs, num_items_in_batch)


def count_targets(config: ContextParallelConfig) -> list[int]:
    """Rows of 8 tokens with 7, 5, 3 and 1 targets; the first label of a document is no target."""
    documents = make_documents([8] * 4, masked=0.0)
    for document, count in zip(documents, (7, 5, 3, 1), strict=True):
        document["labels"] = [label if i <= count else -100 for i, label in enumerate(document["labels"])]
    trainer = make_trainer(
        make_model(),
        config,
        documents,
        max_tokens=None,
        trainer_class=_CountingTrainer,
        gradient_accumulation_steps=2,
        max_steps=1,
    )
    trainer.train()
    return trainer.counts


def test_targets_are_counted_once(world4):
    """dp 2 x cp 2, 2 micro-steps: 7 + 5 + 3 + 1 on every rank, not twice that and not half of it."""
    assert world4.run(count_targets, ContextParallelConfig(ring_degree=2)) == [[16, 16]] * 4


def train_clipped(config: ContextParallelConfig, accumulation: int):
    documents = make_documents([30, 21, 11, 17])
    return train(config, documents, max_grad_norm=0.1, gradient_accumulation_steps=accumulation, max_steps=2)


def test_clipping(world4):
    """The norm before clipping and the clipped step are those of one process."""
    reference = train_clipped(REF, 2)
    assert min(reference.grad_norms) > 0.2  # it does clip
    for record in world4.run(train_clipped, ContextParallelConfig(ring_degree=2), 1):
        assert record.grad_norms == pytest.approx(reference.grad_norms, rel=1e-10)
        for name, parameter in reference.parameters.items():
            assert relative(record.parameters[name], parameter) < 1e-12


def test_final_loss_is_the_mean_over_ranks(world2):
    """With a log every second step the last one is not logged: train_loss must still be the mean over all ranks."""
    documents = make_documents([30, 21, 11, 17, 14, 9])
    reference = train(REF, documents, logging_steps=2)
    records = world2.run(train, ContextParallelConfig(ring_degree=2), documents, logging_steps=2)
    expected = sum(reference.losses) / 3
    for record in records:
        assert record.metrics["train_loss"] == records[0].metrics["train_loss"]
        assert record.metrics["train_loss"] == pytest.approx(expected, rel=1e-6)
