"""What cannot be exact is refused on every rank, with the numbers, before anything is communicated or written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from accelerate.utils import ParallelismConfig
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelPlugin, ContextParallelTrainer
from tests.training.tiny import REF, STOCK, make_arguments, make_documents, make_model, make_trainer

RING2 = ContextParallelConfig(ring_degree=2)

ARGUMENTS = {
    "per_device_train_batch_size": 8,
    "average_tokens_across_devices": False,
    "batch_eval_metrics": True,
    "eval_do_concat_batches": False,
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "bf16_full_eval": True,
    "train_sampling_strategy": "batch_rebalance",
    "accelerator_config": {"dispatch_batches": True},
    "parallelism_config": ParallelismConfig(cp_size=2),
}


def build(tmp_path: Path, config=REF, *, arguments=None, max_tokens=32, **others) -> ContextParallelTrainer:
    args = make_arguments(output_dir=str(tmp_path / "out"), **(arguments or {}))
    settings = {
        "model": apply_context_parallel(make_model(), config),
        "data_collator": DataCollatorForContextParallel(config, max_tokens=max_tokens),
        "train_dataset": make_documents([30, 21]),
        **others,
    }
    return ContextParallelTrainer(args=args, **settings)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(tmp_path, name):
    shown = {"accelerator_config": "dispatch_batches=True", "parallelism_config": "cp_size=2"}.get(name, name)
    with pytest.raises(ValueError, match=shown):
        build(tmp_path, arguments={name: ARGUMENTS[name]})
    assert not (tmp_path / "out").exists()


def test_several_settings_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)per_device_train_batch_size=8.*neftune_noise_alpha=5"):
        build(tmp_path, arguments={"per_device_train_batch_size": 8, "neftune_noise_alpha": 5})


@pytest.mark.parametrize("name", ["compute_loss_func", "model_init"])
def test_callables(tmp_path, name):
    others = {name: lambda *args: None, **({"model": None} if name == "model_init" else {})}
    with pytest.raises(ValueError, match=name):
        build(tmp_path, **others)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_documents([5]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_dataset": (document for document in make_documents([5]))}, "generator is a stream that can be read"),
        ({"eval_dataset": Stream()}, "Stream is a stream: it has no length, so an evaluation"),
        ({"arguments": {"dataloader_num_workers": 2}}, "dataloader_num_workers=2 does not work with Stream"),
        ({"arguments": {"train_sampling_strategy": "group_by_length"}}, "'group_by_length' does not work with Stream"),
        ({"arguments": {"max_steps": -1}}, "max_steps"),
    ],
)
def test_stream(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **{"train_dataset": Stream(), **settings})


def test_foreign_collator_on_a_patched_model(tmp_path):
    """Trainers for preference pairs bring collators of their own."""
    with pytest.raises(ValueError, match=r"(?s)ring_degree=1.*function.*remove_context_parallel"):
        build(tmp_path, data_collator=default_data_collator)


def test_collator_shards_for_an_unpatched_model(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)cp_size=2.*not patched.*apply_context_parallel"):
        build(tmp_path, model=make_model(), data_collator=DataCollatorForContextParallel(RING2))


def test_collator_and_model_differ(tmp_path):
    other = ContextParallelConfig(force=True, layout="contiguous")
    with pytest.raises(ValueError, match=r"layout: collator 'contiguous', model 'auto'"):
        build(tmp_path, data_collator=DataCollatorForContextParallel(other))


def test_empty_evaluation(tmp_path):
    documents = make_documents([9, 5], masked=1.0)
    trainer = build(tmp_path, eval_dataset=documents)
    with pytest.raises(ValueError, match="no targets"):
        trainer.evaluate()


def test_missing_data_sets(tmp_path):
    trainer = build(tmp_path, train_dataset=None)
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.evaluate()


def test_nothing_is_refused_without_context_parallelism(tmp_path):
    """cp 1 without packing is the stock Trainer: it takes what the stock Trainer takes, compute_metrics too."""
    trainer = build(
        tmp_path,
        STOCK,
        max_tokens=None,
        arguments={"per_device_train_batch_size": 2, "label_smoothing_factor": 0.1},
        eval_dataset=make_documents([7, 7]),
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions)},
    )
    trainer.train()
    assert trainer.evaluate()["eval_rows"] == 2


def fails_within_five_seconds(kind: str, ring: int, ulysses: int) -> None:
    began = time.monotonic()
    try:
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        if kind == "plugin":
            ContextParallelPlugin(config).accelerator(cpu=True)
        else:
            make_trainer(make_model(hidden_size=48, num_attention_heads=6), config, make_documents([9]))
    finally:
        assert time.monotonic() - began < 5


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plugin", "trainer"])
def test_impossible_sizes(world4, kind):
    for ring, ulysses, shown in ((3, 1, "3"), (8, 1, "8"), (3, 2, "6"), (0, 1, "0")):
        errors = world4.run(fails_within_five_seconds, kind, ring, ulysses, expect_error=True)
        assert [error.type_name for error in errors] == ["ValueError"] * 4
        assert all(shown in error.message for error in errors)


def reentrant_lora() -> None:
    make_trainer(
        make_model(lora=True),
        RING2,
        make_documents([9]),
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
    )


@pytest.mark.distributed
def test_reentrant_checkpointing_of_adapters_under_ddp(world2):
    for error in world2.run(reentrant_lora, expect_error=True):
        assert error.type_name == "ValueError" and "ddp_find_unused_parameters=False" in error.message


def train_16_bit_weights(config: ContextParallelConfig) -> None:
    make_trainer(make_model(dtype=torch.bfloat16), config, make_documents([9]), max_steps=1).train()


@pytest.mark.distributed
def test_16_bit_trainable_weights_under_ddp(world2):
    """DDP would add up parts of one gradient in 16 bits; with whole rows on each rank they are no parts."""
    for error in world2.run(train_16_bit_weights, RING2, expect_error=True):
        assert error.type_name == "ValueError" and "trainable parameters are in 16 bits" in error.message
        assert "cp_size=2" in error.message and "bf16=True" in error.message
    assert world2.run(train_16_bit_weights, STOCK) == [None, None]


def fsdp_on_cpu() -> None:
    try:
        make_trainer(make_model(), RING2, make_documents([9]), fsdp=True)
    finally:
        for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
            del os.environ[name]


@pytest.mark.distributed
def test_fsdp_that_is_silently_off(world2):
    for error in world2.run(fsdp_on_cpu, expect_error=True):
        assert error.type_name == "RuntimeError" and "FSDP was asked for, but" in error.message


def double_setup() -> None:
    ContextParallelPlugin(RING2).accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))


@pytest.mark.distributed
def test_double_setup(world2):
    for error in world2.run(double_setup, expect_error=True):
        assert error.type_name == "ValueError" and "cp_size=2" in error.message


def test_fewer_processes_than_launched(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="launcher started 4 processes, but accelerate runs 1"):
        ContextParallelPlugin(STOCK).accelerator()
