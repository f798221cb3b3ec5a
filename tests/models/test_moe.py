"""Mixture-of-experts families: attention, routing and the load-balancing loss of the whole row."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_cp import ContextParallelConfig, apply_context_parallel
from hf_cp.models.patch import context_parallel_state, local_token_losses
from hf_cp.sequence.layout import SequenceLayout
from tests.attention.reference import relative_error
from tests.models.test_patch import LENGTHS, averaged_gradients, train_step
from tests.models.test_rope import check_against_untouched
from tests.models.tiny import MIXTURES, Row, tiny_model
from tests.training.tiny import REF, STOCK, Record, make_documents, make_model, train, worst_difference

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
SPLITS = ((4, 1), (2, 2), (1, 4))


def steps_of_families() -> list[tuple[str, float, float]]:
    """One split for each family and the load-balancing loss; LENGTHS leave padding in every split."""
    steps = []
    for family, (ring, ulysses) in zip(MIXTURES, SPLITS, strict=True):
        steps.append((family, *train_step(family, ring, ulysses, torch.float64, **BALANCED)))
        steps.append((family, *train_step(family, ring, ulysses, torch.float64)))
    # layers are recomputed, with the routing of the first pass
    steps.append(("checkpointed", *train_step("mixtral", 2, 1, torch.float64, checkpointing=False, **BALANCED)))
    return steps


@pytest.mark.distributed
def test_loss_and_every_gradient_are_exact(world4):
    assert sum(SequenceLayout(LENGTHS, ContextParallelConfig(4)).indices(rank).lt(0).sum() for rank in range(4)) > 0
    for steps in world4.run(steps_of_families):
        for family, loss_error, gradient_error in steps:
            assert loss_error < 1e-12 and gradient_error < 1e-10, family


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 4}


def untouched_families() -> None:
    """Against transformers' own loss and load-balancing loss; Qwen2-MoE puts its window into the mask only."""
    cases = {
        "mixtral": {"sliding_window": 4},
        "qwen2_moe": QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
        "qwen3_moe": QWEN_WINDOW,
    }
    for family, settings in [*cases.items(), ("qwen2_moe", {})]:
        check_against_untouched(family, settings | BALANCED, LENGTHS, ContextParallelConfig(ring_degree=2))


@pytest.mark.distributed
def test_it_equals_the_untouched_model(world2):
    world2.run(untouched_families)


def value_and_scale() -> None:
    """The load-balancing loss is on the output, equal on all ranks and that of transformers for the whole row."""
    config, row, untouched = ContextParallelConfig(ring_degree=2), Row([13, 6]), tiny_model("mixtral", **BALANCED)
    with torch.no_grad():
        router_logits = untouched(**row.whole_batch()).router_logits
        expected = load_balancing_loss_func(router_logits, 4, 2)
        model = apply_context_parallel(tiny_model("mixtral", **BALANCED), config)
        batch = row.local_batch(SequenceLayout([13, 6], config), dist.get_rank())
        balanced, plain = model(**batch), model(**batch, output_router_logits=False)
        parts = torch.stack([model(**batch, num_items_in_batch=3).loss, plain.token_losses.sum() / 3])
    assert relative_error(balanced.aux_loss, expected) < 1e-6 and plain.aux_loss is None
    assert abs(balanced.loss - plain.loss - 0.5 * expected) < 1e-6
    dist.all_reduce(parts)  # with num_items_in_batch the losses of the ranks add up to that of the row
    assert abs(parts[0] - parts[1] - 0.5 * expected) < 1e-6
    assert torch.equal(local_token_losses(model, batch), plain.token_losses)
    with pytest.raises(ValueError, match="without labels"):
        model(input_ids=batch["input_ids"], hf_cp_sample=batch["hf_cp_sample"], output_router_logits=True)
    with pytest.raises(ValueError, match="fused_lm_head.*that of a shard"):
        model(**batch, fused_lm_head=True)
    logits = model(input_ids=batch["input_ids"], hf_cp_sample=batch["hf_cp_sample"])
    assert logits.logits.shape == (1, 10, 64) and logits.aux_loss is None
    _refuse_reentrant_checkpointing(model, batch)
    row.shift_labels[:] = -100  # a row that trains nothing
    empty = model(**row.local_batch(batch["hf_cp_sample"].layout, dist.get_rank()))
    assert empty.loss == 0 and empty.aux_loss == 0


def _refuse_reentrant_checkpointing(model, batch) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="None of the 2 router logits has a gradient"):
        model(**batch)
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()


@pytest.mark.distributed
def test_value_scale_and_refusals(world2):
    world2.run(value_and_scale)


def expert_adapters() -> float:
    """LoRA on the fused expert weights: the worst relative error of an adapter's gradient."""
    from peft import LoraConfig, get_peft_model

    def make(config: ContextParallelConfig):
        torch.manual_seed(1)
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, task_type="CAUSAL_LM")
        model = get_peft_model(tiny_model("qwen3_moe", **BALANCED), lora)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return apply_context_parallel(model, config)

    config, row = ContextParallelConfig(ring_degree=2), Row(LENGTHS)
    one, two = make(ContextParallelConfig(force=True)), make(config)
    one(**row.local_batch(SequenceLayout(LENGTHS, ContextParallelConfig()), 0)).loss.backward()
    two(**row.local_batch(SequenceLayout(LENGTHS, config), dist.get_rank())).loss.backward()
    expected = {name: p.grad for name, p in one.named_parameters() if p.requires_grad}
    assert sum("experts" in name for name in expected) == 8  # A and B of two weights in two layers
    for parameter in two.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    trained = torch.nn.ParameterDict({n.replace(".", "/"): p for n, p in two.named_parameters() if p.requires_grad})
    found = averaged_gradients(trained, context_parallel_state(two).mesh)
    return max(relative_error(found[name.replace(".", "/")], gradient) for name, gradient in expected.items())


@pytest.mark.distributed
def test_adapters_on_expert_weights_are_exact(world2):
    assert max(world2.run(expert_adapters)) < 1e-10


# Through the Trainer: 5 rows, so that the second pair of ranks ends with a row without targets

TRAINED = {"family": "mixtral", "model_changes": BALANCED, "gradient_accumulation_steps": 2, "max_steps": 2}
ROWS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)


@cache
def trained(config: ContextParallelConfig, accumulation: int = 2) -> Record:
    documents, settings = make_documents(ROWS), TRAINED | {"gradient_accumulation_steps": accumulation}
    return train(config, documents, eval_dataset=documents[:3], eval_on_start=True, **settings)


def eval_loss(record: Record) -> float:
    (loss,) = [entry["eval_loss"] for entry in record.log_history if "eval_loss" in entry]
    return loss


def mean_token_loss(documents: list[dict]) -> float:
    """Of the untouched model, document by document."""
    model, total, count = make_model("mixtral"), 0.0, 0
    for document in documents:
        ids, labels = (torch.tensor([document[name]]) for name in ("input_ids", "labels"))
        num_targets = int((labels[:, 1:] != -100).sum())
        total += float(model(ids, labels=labels, use_cache=False).loss.detach()) * num_targets
        count += num_targets
    return total / count


def check(record: Record, reference: Record, limit: float) -> None:
    start = dict(make_model("mixtral", **BALANCED).named_parameters())
    found = worst_difference(record, reference, start)
    assert max(found.loss, found.grad_norm, found.gradient, found.update) < limit, found


@pytest.mark.distributed
def test_the_trainer_is_exact(world4):
    """dp 2 x ring 2 with 2 accumulation steps against one process with 4; and against the stock Trainer."""
    reference = trained(REF, accumulation=4)
    for record in world4.run(trained, ContextParallelConfig(ring_degree=2)):
        check(record, reference, 1e-10)
        assert eval_loss(record) == pytest.approx(eval_loss(reference), rel=1e-10)
    stock = trained(STOCK, accumulation=4)
    check(reference, stock, 1e-6)
    # the evaluation loss is that of the tokens alone, also of the untouched model
    assert eval_loss(stock) == pytest.approx(eval_loss(reference), rel=1e-6)
    assert eval_loss(reference) == pytest.approx(mean_token_loss(make_documents(ROWS)[:3]), rel=1e-6)


def test_jitter_is_refused():
    with pytest.raises(ValueError, match="router_jitter_noise=0.1"):
        apply_context_parallel(tiny_model("mixtral", router_jitter_noise=0.1), ContextParallelConfig(force=True))
