"""A Trainer that exists already becomes context-parallel: the same numbers as one that was built so, or no change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    default_data_collator,
)
from trl import DPOConfig, DPOTrainer, SFTTrainer

from hf_cp import attach_context_parallel
from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.models.patch import apply_context_parallel, context_parallel_state
from hf_cp.training import ContextParallelTrainer, ContextParallelTrainerMixin
from tests.models.tiny import tiny_model
from tests.training import sft
from tests.training.tiny import make_arguments, make_documents, make_model, relative

RING2 = ContextParallelConfig(ring_degree=2)
ONE = ContextParallelConfig(force=True)
END = 2  # the token that ends a document, and pads: as with tokenizer.pad_token = tokenizer.eos_token


class CountingTrainer(Trainer):
    """A user's own class, with methods that work on any batch."""

    micro_steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.micro_steps += 1
        return super().training_step(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """How the Trainer is built before it is attached to."""

    collator: str
    micro: int = 2
    max_tokens: int | None = None  # of a collator that is passed to attach
    trainer_class: type[Trainer] = Trainer


CASES = {
    "one document a batch": Case("default", micro=1),
    "end masked as padding": Case("language modeling"),
    "padded labels": Case("seq2seq", trainer_class=CountingTrainer),
    "packed": Case("default", micro=1, max_tokens=40),
}


def documents() -> list[dict[str, list[int]]]:
    found = make_documents((21, 9, 30, 14, 25, 11, 17, 8))
    for document in found:
        document["input_ids"][-1] = document["labels"][-1] = END
    return found


def theirs(name: str) -> Any:
    tokenizer = copy.deepcopy(sft.tokenizer())
    tokenizer.pad_token, tokenizer.mask_token = tokenizer.eos_token, "w3"
    return {
        "default": default_data_collator,
        "language modeling": DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "masked language modeling": DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.1),
        "seq2seq": DataCollatorForSeq2Seq(tokenizer),
        "padding": DataCollatorWithPadding(tokenizer),
        "flattening": DataCollatorWithFlattening(),
        "own": lambda features: default_data_collator(features),
    }[name]


def build(case: Case, *, model: Any = None, **arguments: Any) -> Trainer:
    settings = {"per_device_train_batch_size": case.micro, "gradient_accumulation_steps": 2, "max_steps": 2}
    args = make_arguments(train_sampling_strategy="sequential", **(settings | arguments))
    dataset = documents()
    if case.collator == "language modeling":  # it makes the labels
        dataset = [{"input_ids": document["input_ids"]} for document in dataset]
    model = make_model() if model is None else model
    return case.trainer_class(model=model, args=args, train_dataset=dataset, data_collator=theirs(case.collator))


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def train_stock(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        trainer = build(CASES[name])
        trainer.train()
        found[name] = parameters(trainer)
    return found


def train_attached(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Each case attached; what is packed also built with the mixin, which must give the same bits."""
    found = {}
    for name in names:
        case = CASES[name]
        collator = case.max_tokens and DataCollatorForContextParallel(RING2, max_tokens=case.max_tokens)
        trainer = build(case)
        assert attach_context_parallel(trainer, RING2, data_collator=collator or None) is trainer
        assert isinstance(trainer, ContextParallelTrainerMixin) and isinstance(trainer, case.trainer_class)
        trainer.train()
        found[name] = parameters(trainer)
        if case.trainer_class is CountingTrainer:
            assert trainer.micro_steps == 4
        if collator:
            built = ContextParallelTrainer(
                model=apply_context_parallel(make_model(), RING2),
                args=trainer.args,
                train_dataset=documents(),
                data_collator=collator,
            )
            built.train()
            assert all(torch.equal(value, found[name][key]) for key, value in parameters(built).items())
            timings = ("cp/tokens_per_second", "cp/flight", "cp/exposed", "cp/wait", "cp/slowest", "cp/peak")
            first, second = (
                {name: value for name, value in t.state.log_history[0].items() if not name.startswith(timings)}
                for t in (built, trainer)
            )
            assert first == second and first["cp/tokens"] > 0
    return found


@pytest.mark.distributed
def test_two_processes_compute_what_the_stock_trainer_does(world1, world2):
    whole = [name for name, case in CASES.items() if case.max_tokens is None]
    (expected,) = world1.run(train_stock, whole)
    start = dict(make_model().named_parameters())
    for found in world2.run(train_attached, list(CASES), timeout=200):
        assert list(found) == list(CASES)
        for name in whole:
            for key, value in expected[name].items():
                # transformers computes this loss in fp32
                assert relative(found[name][key] - start[key], value - start[key]) < 1e-5, (name, key)


def attach_to_sft(lora: bool) -> tuple[list, list]:
    """A stock SFTTrainer that packs, attached, and the same one built with the mixin."""
    results = []
    for attaches in (True, False):
        model = tiny_model(dtype=torch.float64)
        args = sft.make_arguments(packing=True, per_device_train_batch_size=1, eval_strategy="no")
        shared = {
            "args": args,
            "train_dataset": sft.make_dataset("completion", (30, 9, 21, 14, 33, 12)),
            "processing_class": sft.tokenizer(),
            "peft_config": sft.adapter() if lora else None,
        }
        if attaches:
            trainer = attach_context_parallel(SFTTrainer(model=model, **shared), RING2)
        else:
            model = apply_context_parallel(model, RING2)
            collator = DataCollatorForContextParallel(RING2)
            trainer = sft.ContextParallelSFTTrainer(model=model, data_collator=collator, **shared)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((losses, parameters(trainer)))
    return results


@pytest.mark.distributed
@pytest.mark.timeout(400)  # each process imports TRL once
@pytest.mark.parametrize("lora", [False, True])
def test_sft_trainer(world2, lora):
    """Bit for bit what the mixin gives, which test_trl.py compares with one process."""
    for (losses, attached), (expected_losses, built) in world2.run(attach_to_sft, lora, timeout=200):
        assert losses == expected_losses and len(losses) == 2
        assert attached.keys() == built.keys()
        assert all(torch.equal(attached[name], value) for name, value in built.items())


def test_config_that_splits_nothing():
    trainer = build(CASES["one document a batch"])
    assert type(attach_context_parallel(trainer, ContextParallelConfig())) is Trainer
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=40)
    attach_context_parallel(trainer, data_collator=collator)  # it packs, in one process
    assert trainer.get_train_dataloader().manifest.max_tokens == 40


def test_patched_model_and_its_config():
    """The model has been patched by hand: its config is taken, its processes are used."""
    trainer = build(CASES["one document a batch"], model=apply_context_parallel(make_model(), ONE))
    attach_context_parallel(trainer)
    assert trainer.data_collator.config == ONE
    assert trainer.cp_mesh is context_parallel_state(trainer.model).mesh


@pytest.mark.parametrize("name", ["padding", "flattening"])
def test_collators_that_read_as_ours(name):
    trainer = attach_context_parallel(build(Case(name)), ONE)
    assert type(trainer.data_collator) is DataCollatorForContextParallel
    assert trainer.data_collator.pad_token_id == 0  # no tokenizer was given to the Trainer


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnLoader(CountingTrainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


def trained() -> Trainer:
    trainer = build(CASES["one document a batch"])
    trainer.train()
    return trainer


def evaluated() -> Trainer:
    trainer = build(CASES["one document a batch"])
    trainer.evaluate(documents()[:2])
    return trainer


def with_own_method() -> Trainer:
    trainer = build(CASES["one document a batch"])
    trainer.evaluation_loop = trainer.evaluation_loop
    return trainer


def dpo() -> Trainer:
    from datasets import Dataset

    pairs = Dataset.from_list([{"prompt": "w5 w6", "chosen": "w7", "rejected": "w8"}])
    args = DPOConfig("unused", use_cpu=True, bf16=False, report_to="none")
    models = {"model": tiny_model(), "ref_model": tiny_model()}
    return DPOTrainer(**models, args=args, train_dataset=pairs, processing_class=sft.tokenizer())


REFUSED = {
    "trained": (trained, r"has begun \(step 2 of 2"),
    "evaluated": (evaluated, r"has begun \(step 0 of 0; model prepared"),
    "own loss": (lambda: build(Case("default", 1, None, OwnLoss)), "OwnLoss has its own compute_loss"),
    "own loader": (lambda: build(Case("default", 1, None, OwnLoader)), "has its own get_train_dataloader"),
    "own method": (with_own_method, "has its own evaluation_loop"),
    "own collator": (lambda: build(Case("own")), "makes its batches with <lambda>"),
    "masked language modeling": (lambda: build(Case("masked language modeling")), "ForLanguageModeling, and what"),
    "setting": (lambda: build(CASES["padded labels"], neftune_noise_alpha=5.0), r"neftune_noise_alpha=5\.0"),
    "model": (lambda: build(CASES["padded labels"], model=make_model(attention_dropout=0.1)), "attention_dropout"),
    "preference pairs": (dpo, "DPOTrainer is TRL's DPOTrainer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_attached_to_stays_as_it_was(name):
    make, message = REFUSED[name]
    trainer = make()
    before, keeps_columns = dict(vars(trainer)), trainer.args.remove_unused_columns
    own_class, forward = type(trainer), vars(trainer.model).get("forward")
    with pytest.raises(ValueError, match=message):
        attach_context_parallel(trainer, ONE)
    assert type(trainer) is own_class and vars(trainer) == before
    assert trainer.args.remove_unused_columns == keeps_columns
    assert context_parallel_state(trainer.model) is None and vars(trainer.model).get("forward") == forward


def test_misuse():
    with pytest.raises(TypeError, match="takes a transformers.Trainer instance"):
        attach_context_parallel(make_model(), ONE)
    trainer = build(CASES["one document a batch"])
    with pytest.raises(ValueError, match="no config was given, its model is not patched, and its collator is default"):
        attach_context_parallel(trainer)
    attach_context_parallel(trainer, ONE)
    with pytest.raises(ValueError, match="is context-parallel already"):
        attach_context_parallel(trainer, ONE)
    with pytest.raises(ValueError, match="different configs"):
        attach_context_parallel(
            build(CASES["packed"]), ONE, data_collator=DataCollatorForContextParallel(RING2, max_tokens=40)
        )
