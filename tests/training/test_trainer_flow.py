"""What a user of the Trainer sees: steps, epochs, rows, tokens, evaluation, saved adapters."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import apply_context_parallel, remove_context_parallel
from tests.training.tiny import (
    REF,
    STOCK,
    RecordingTrainer,
    make_documents,
    make_model,
    make_trainer,
    relative,
    train,
)

pytestmark = pytest.mark.distributed

RING2 = ContextParallelConfig(ring_degree=2)
SIXTEEN = [16] * 8


class _RowTrainer(RecordingTrainer):
    """Keeps the first token of every document that it sees, as (epoch, token)."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        is_first = (inputs["position_ids"] == 0) & (inputs["shift_labels"] != -100)
        self.firsts = getattr(self, "firsts", [])
        self.firsts += [(int(self.state.epoch), token) for token in inputs["input_ids"][is_first].tolist()]
        return super().training_step(model, inputs, num_items_in_batch)


def marked_documents(lengths: list[int]) -> list[dict]:
    """Each document begins with a token of its own."""
    documents = make_documents(lengths, masked=0.0)
    for number, document in enumerate(documents):
        document["input_ids"][0] = document["labels"][0] = number
    return documents


def run_epoch(config: ContextParallelConfig, max_tokens: int | None, **settings) -> dict:
    trainer = make_trainer(
        make_model(),
        config,
        marked_documents(SIXTEEN),
        max_tokens=max_tokens,
        trainer_class=_RowTrainer,
        **{"max_steps": -1, "num_train_epochs": 1, "include_num_input_tokens_seen": "all", **settings},
    )
    trainer.train()
    last = trainer.state.log_history[-1]
    return {
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "batch": trainer.get_total_train_batch_size(trainer.args),
        "tokens": trainer.state.num_input_tokens_seen,
        "samples": round(last["train_samples_per_second"] * last["train_runtime"], 0),
        "firsts": trainer.firsts,
    }


@pytest.mark.parametrize("max_tokens", [16, None])
def test_steps_epochs_and_rows(world4, max_tokens):
    """8 rows on dp 2 x cp 2."""
    cases = [
        ({}, 4, 1.0, 2, 8),
        ({"gradient_accumulation_steps": 2}, 2, 1.0, 4, 8),
        ({"max_steps": 3}, 3, 0.75, 2, 6),
    ]
    for settings, steps, epoch, batch, rows in cases:
        results = world4.run(run_epoch, RING2, max_tokens, **settings)
        for result in results:
            assert (result["steps"], result["epoch"], result["batch"]) == (steps, epoch, batch)
            assert result["tokens"] == rows * 16
            assert result["samples"] == pytest.approx(rows, abs=1)
        # the first token of a document is on one rank of its group: over all ranks each row once
        assert len([first for result in results for first in result["firsts"]]) == rows
        assert len({first for result in results for first in result["firsts"]}) == rows


def test_rows_are_permuted_by_epoch(world4):
    results = world4.run(run_epoch, RING2, 16, num_train_epochs=2)
    per_epoch = [sorted(t for r in results for e, t in r["firsts"] if e == epoch) for epoch in (0, 1)]
    assert per_epoch == [list(range(8))] * 2
    orders = [[t for e, t in results[0]["firsts"] + results[1]["firsts"] if e == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_seed_of_the_trainer_orders_the_rows(world2):
    orders = [world2.run(run_epoch, RING2, 16, seed=seed, data_seed=data)[0]["firsts"] for seed, data in SEEDS]
    assert orders[0] == orders[1] != orders[2] == orders[3]


SEEDS = [(1, None), (1, 1), (2, None), (3, 2)]


def evaluate(config: ContextParallelConfig, lengths: list[int], max_tokens: int | None, **settings) -> dict:
    documents = make_documents(lengths, masked=0.6)
    documents[0]["labels"] = [-100] * 14 + documents[0]["input_ids"][14:]
    trainer = make_trainer(make_model(), config, documents, max_tokens=max_tokens, eval_dataset=documents, **settings)
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == again["eval_loss"]
    rows = math.ceil(len(lengths) / settings.get("per_device_eval_batch_size", 1))
    steps = math.ceil(rows / trainer.cp_mesh.dp_size)
    # rates are printed with three digits
    assert first["eval_samples_per_second"] * first["eval_runtime"] == pytest.approx(len(lengths), rel=0.2)
    assert first["eval_steps_per_second"] * first["eval_runtime"] == pytest.approx(steps, rel=0.2)
    return first


@pytest.mark.parametrize("lengths", [SIXTEEN, [16] * 5], ids=["8 rows", "5 rows"])
def test_eval_loss(request, lengths):
    """The token mean over every document once: odd numbers of rows, and shards without a single target."""
    documents = make_documents(lengths, masked=0.6)
    documents[0]["labels"] = [-100] * 14 + documents[0]["input_ids"][14:]
    expected = token_mean(documents)
    assert evaluate(REF, lengths, 16)["eval_loss"] == pytest.approx(expected, rel=1e-12)
    assert evaluate(STOCK, lengths, 16)["eval_loss"] == pytest.approx(expected, rel=1e-6)
    worlds = [("world2", RING2), ("world4", ContextParallelConfig(ring_degree=4)), ("world4", RING2)]
    for world, config in worlds:
        results = request.getfixturevalue(world).run(evaluate, config, lengths, 16)
        assert {result["eval_loss"] for result in results} == {results[0]["eval_loss"]}
        assert results[0]["eval_loss"] == pytest.approx(expected, rel=1e-12)
    # rows of three whole documents, not packed
    for result in world_results(request, lengths):
        assert result["eval_loss"] == pytest.approx(expected, rel=1e-12)


def world_results(request, lengths):
    return request.getfixturevalue("world4").run(evaluate, RING2, lengths, None, per_device_eval_batch_size=3)


def token_mean(documents: list[dict]) -> float:
    """Every document by itself through the model, without any of our code, in fp64."""
    model, total, count = make_model().eval(), 0.0, 0
    for document in documents:
        ids, labels = torch.tensor([document["input_ids"]]), torch.tensor(document["labels"])
        with torch.no_grad():
            logits = model(ids).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum"))
        count += int((labels[1:] != -100).sum())
    return total / count


def test_own_evaluation_sets_are_packed_once():
    """By name, as an object and as the default it is one data set; a replaced one is packed anew."""
    documents = make_documents([16] * 5)
    trainer = make_trainer(make_model(), REF, documents, max_tokens=16, eval_dataset=documents)
    loader = trainer.get_eval_dataloader()
    with mock.patch.object(trainer._loaders, "in_order", side_effect=AssertionError("packed again")):
        trainer.evaluate()  # the Trainer passes the data set itself
        assert trainer.get_eval_dataloader(documents) is loader
    other = make_documents([16] * 3)
    assert len(trainer.get_eval_dataloader(other)) == 3  # a foreign one is not kept
    assert trainer.get_eval_dataloader(other) is not trainer.get_eval_dataloader(other)

    trainer.eval_dataset = {"a": documents, "b": other}
    first, second = trainer.get_eval_dataloader("a"), trainer.get_eval_dataloader("b")
    assert (len(first), len(second)) == (5, 3)
    assert trainer.get_eval_dataloader(other) is second
    trainer.eval_dataset = {"a": make_documents([16] * 2), "b": other}
    assert len(trainer.get_eval_dataloader("a")) == 2
    assert trainer.get_eval_dataloader("b") is second
    trainer.evaluate()
    assert len(trainer._loaders._evaluated) == 2  # what was replaced is let go


def test_own_numbers_are_logged_as_they_are():
    documents = make_documents([16] * 3)
    trainer = make_trainer(make_model(), REF, documents, max_tokens=16, eval_dataset=documents)
    trainer.log({"xyz_steps_per_second": 3.0, "eval_runtime_steps_per_second": 4.0, "eval_runtime": 1.0})
    logged = trainer.state.log_history[-1]
    assert (logged["xyz_steps_per_second"], logged["eval_runtime_steps_per_second"]) == (3.0, 4.0)


def train_and_evaluate_odd(drop_last: bool) -> tuple[int, list[float]]:
    documents = make_documents([16] * 5)
    trainer = make_trainer(
        make_model(),
        RING2,
        documents,
        max_tokens=16,
        eval_dataset={"a": documents, "b": documents[:1]},
        eval_strategy="epoch",
        eval_on_start=True,
        dataloader_drop_last=drop_last,
        max_steps=-1,
        num_train_epochs=2,
    )
    trainer.train()
    losses = [e for e in trainer.state.log_history if "eval_a_loss" in e]
    assert all(math.isfinite(entry["eval_a_loss"]) for entry in losses)
    return trainer.state.global_step, [entry["eval_a_loss"] for entry in losses]


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 6), (True, 4)])
def test_odd_data_set(world4, drop_last, steps):
    results = world4.run(train_and_evaluate_odd, drop_last)
    assert [result[0] for result in results] == [steps] * 4
    assert all(len(result[1]) == 3 and result[1] == results[0][1] for result in results)
    assert results[0][1][0] == pytest.approx(token_mean(make_documents([16] * 5)), rel=1e-12)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_checkpointing(world2, lora, reentrant):
    """Recomputation repeats the collectives; with frozen embeddings the reentrant kind needs inputs with a graph."""
    documents = make_documents([30, 21, 11])
    reference = train(REF, documents, lora=lora, max_steps=1)
    records = world2.run(
        train,
        RING2,
        documents,
        lora=lora,
        max_steps=1,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": reentrant},
        ddp_find_unused_parameters=False if reentrant else None,
    )
    for record in records:
        assert sorted(record.gradients[0]) == sorted(reference.gradients[0])
        for name, gradient in reference.gradients[0].items():
            assert gradient.abs().max() > 0
            assert relative(record.gradients[0][name], gradient) < 1e-10


def trainable_names() -> tuple[list[str], list[str]]:
    model = make_model(lora=True)
    before = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trainer = make_trainer(model, RING2, make_documents([30]))
    trainer.train()
    wrapped = trainer.model_wrapped.module.named_parameters()
    return before, [name for name, parameter in wrapped if parameter.requires_grad]


def test_trainable_set(world2):
    for before, after in world2.run(trainable_names):
        assert before == after and len(before) == 28


def parameters_agree() -> bool:
    """After 3 Adam steps."""
    record = train(RING2, make_documents([30, 21, 11, 17]), optim="adamw_torch", learning_rate=1e-2)
    agree = []
    for parameter in record.parameters.values():
        gathered = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, parameter)
        agree += [torch.equal(gathered[0], other) for other in gathered]
    return all(agree)


def test_parameters_stay_equal(world4):
    assert world4.run(parameters_agree) == [True] * 4


def tokens_in_layer_0() -> set[int]:
    model = make_model()
    seen = set()
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[1]))
    make_trainer(model, RING2, make_documents([16])).train()
    return seen


def test_rows_are_cut_once(world2):
    assert world2.run(tokens_in_layer_0) == [{8}] * 2


def save_adapter(folder: str) -> torch.Tensor:
    """Trains, saves, and returns the logits of the trained model on a whole row."""
    model = make_model(lora=True)
    trainer = make_trainer(model, RING2, make_documents([30, 21, 11, 17]))
    trainer.train()
    trainer.save_model(folder)
    dist.barrier()
    with torch.no_grad():
        return remove_context_parallel(model)(input_ids=torch.arange(20)[None]).logits[0]


def merged_logits(folder: str, config: ContextParallelConfig) -> torch.Tensor:
    """The saved adapter, merged into the base model: logits of a row of 20 tokens, whole."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(make_model(), folder).merge_and_unload().to(torch.float64)
    model = apply_context_parallel(model, config)
    row = [{"input_ids": list(range(20)), "labels": list(range(20))}]
    batch = DataCollatorForContextParallel(config)(row)
    if not config.enabled:
        with torch.no_grad():
            return model(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    layout = batch.pop("hf_cp_sample").layout
    with torch.no_grad():
        local = model(batch["input_ids"], position_ids=batch["position_ids"], hf_cp_layout=layout).logits[0]
    shards = [torch.empty_like(local) for _ in range(config.cp_size)]
    dist.all_gather(shards, local.contiguous(), group=ContextParallelMesh(config).cp_group)
    return layout.unshard(shards)


def test_adapter_round_trip(world2, world4, tmp_path: Path):
    """One complete adapter, written once; merged, it gives the trained model's logits with cp 1 and cp 4."""
    from safetensors.torch import load_file

    trained = world2.run(save_adapter, str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 28 and all(tensor.numel() > 0 for tensor in tensors.values())
    assert sorted(p.name for p in tmp_path.glob("adapter*")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not list(tmp_path.glob("model*"))
    assert relative(merged_logits(str(tmp_path), STOCK), trained[0]) < 1e-10
    for logits in world4.run(merged_logits, str(tmp_path), ContextParallelConfig(ring_degree=4)):
        assert relative(logits, trained[0]) < 1e-10


def dropout_draws(config: ContextParallelConfig) -> float:
    """A number of the random state that dropout would use in the first step."""
    from transformers import TrainerCallback

    class Draw(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.value = float(torch.rand(()))

    callback = Draw()
    make_trainer(make_model(), config, make_documents([30]), callbacks=[callback], max_steps=1).train()
    return callback.value


def test_ranks_of_a_row_draw_other_dropout_masks(world4):
    first, second, third, fourth = world4.run(dropout_draws, RING2)
    assert first != second and (first, second) == (third, fourth)


def resume(folder: str, steps: int, resumed: bool) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Trains to `steps` of 6, in two epochs of three; maybe from the checkpoint of step 2."""
    model = make_model()
    trainer = make_trainer(
        model,
        RING2,
        make_documents([16] * 5),
        max_tokens=16,
        max_steps=steps,
        output_dir=folder,
        save_strategy="steps",
        save_steps=2,
        optim="adamw_torch",
        gradient_accumulation_steps=2,
    )
    trainer.train(resume_from_checkpoint=resumed)
    log = [{k: v for k, v in e.items() if k in ("loss", "step", "epoch")} for e in trainer.state.log_history]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, log


def test_resume_in_the_middle_of_an_epoch(world2, tmp_path: Path):
    """The rows that are left, and the numbers of the run that was not interrupted (one layout, ring 2)."""
    expected, log = world2.run(resume, str(tmp_path / "a"), 5, False)[0]
    world2.run(resume, str(tmp_path / "b"), 2, False)
    for parameters, resumed_log in world2.run(resume, str(tmp_path / "b"), 5, True):
        assert [e for e in resumed_log if "loss" in e] == [e for e in log if "loss" in e]
        assert all(torch.equal(parameters[name], parameter) for name, parameter in expected.items())


def test_bf16_autocast(world2):
    """bf16=True keeps fp32 weights and autocasts: the error is that of the stock model, not more."""
    documents = make_documents([30, 21, 11, 17, 14, 9])
    exact = train(REF, documents, max_steps=1).gradients[0]
    settings = {"dtype": torch.float32, "bf16": True, "max_steps": 1}

    def error(record) -> float:
        gradients = record.gradients[0]
        distance = sum(float((gradients[name].double() - exact[name]).square().sum()) for name in exact)
        return (distance / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5

    stock = error(train(STOCK, documents, **settings))
    assert 1e-4 < stock < 0.1
    for record in world2.run(train, RING2, documents, **settings):
        assert error(record) < 2 * stock
