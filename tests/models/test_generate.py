"""generate() on a patched model: every rank holds the whole text and runs the original attention, with a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_cp.config import ContextParallelConfig
from hf_cp.models.patch import ATTENTION_NAME, apply_context_parallel, base_causal_lm, remove_context_parallel
from tests.models.tiny import tiny_model
from tests.training.tiny import make_documents, make_model, make_trainer

RING2 = ContextParallelConfig(ring_degree=2)
PROMPTS = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])  # the first one has two tokens of padding
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def generate(model: PreTrainedModel, **settings) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().generate(input_ids=PROMPTS, attention_mask=(PROMPTS != 0).long(), **GREEDY | settings)


def generate_patched(lora: bool, settings: dict) -> torch.Tensor:
    return generate(apply_context_parallel(make_model(lora=lora), RING2), **settings)


@pytest.mark.distributed
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_patched_model_generates_what_the_untouched_one_does(world2, lora, settings):
    expected = generate(make_model(lora=lora), **settings)
    assert expected.shape[1] > PROMPTS.shape[1] + 2
    for found in world2.run(generate_patched, lora, settings):
        assert torch.equal(found, expected)


def generate_between_steps(lora: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Trains, generates from the wrapped and the plain model, trains on; then the same without the patch."""
    model = make_model(lora=lora)
    trainer = make_trainer(model, RING2, make_documents([30, 21, 11, 17]))
    trainer.train()
    texts = [generate(model), generate(trainer.accelerator.unwrap_model(trainer.model_wrapped))]
    assert base_causal_lm(model).config._attn_implementation == ATTENTION_NAME
    copy = make_model(lora=lora)
    copy.load_state_dict(model.state_dict())
    untouched = [generate(copy), generate(make_model(lora=lora))]
    trainer.train()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    remove_context_parallel(model)
    return texts, untouched, parameters


def train_twice(lora: bool) -> dict[str, torch.Tensor]:
    model = make_model(lora=lora)
    trainer = make_trainer(model, RING2, make_documents([30, 21, 11, 17]))
    trainer.train()
    trainer.train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_generation_in_the_middle_of_training(world2, lora):
    """It uses the trained weights, and training goes on as if nothing had been generated."""
    plain = world2.run(train_twice, lora)
    for (texts, (trained, first), parameters), expected in zip(
        world2.run(generate_between_steps, lora), plain, strict=True
    ):
        assert all(torch.equal(text, trained) for text in texts)
        assert not torch.equal(trained, first)
        assert all(torch.equal(parameters[name], parameter) for name, parameter in expected.items())


def test_generation_without_a_cache_is_refused():
    """It would run attention over whole texts with no layout."""
    model = apply_context_parallel(tiny_model(), ContextParallelConfig(force=True))
    with pytest.raises(ValueError, match=r"generate\(\) needs use_cache=True"):
        generate(model, use_cache=False)
