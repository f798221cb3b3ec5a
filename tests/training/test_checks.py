"""The table of checks: every entry finds something in a subject that is wrong, and nothing in one that is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.training import ContextParallelTrainer
from hf_cp.training.checks import (
    CHECKS,
    Arguments,
    DataLoading,
    Documents,
    GradientSums,
    Launch,
    OtherParallelism,
    Pairing,
    PreparedLoader,
    TrainerClass,
    ZeroRun,
    first_problem,
    problems,
    refuse,
)
from tests.training.tiny import make_arguments, make_documents

TWO = ContextParallelConfig(ring_degree=2)
LAUNCH = Launch(2, launched=2, running=2, backend="MULTI_CPU", wants_deepspeed=False, wants_fsdp=False)
SUMS = GradientSums(2, "DDP", is_told=False)
ZERO = ZeroRun({}, 1, 2, world_size=2, mixed_precision="no", must_gather=True)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_documents([5]))


def preference() -> type:
    return type("DPOTrainer", (ContextParallelTrainer,), {"__module__": "trl.trainer"})


def arguments(**changes: Any) -> Arguments:
    others = {name: changes.pop(name) for name in ("compute_loss_func", "model_init") if name in changes}
    is_sft = "label_smoothing_factor" in changes
    return Arguments(make_arguments(**changes), is_packed=True, is_sft=is_sft, others=others)


def several_gpus() -> Arguments:
    subject = arguments()
    subject.args._n_gpu = 2
    return subject


def reentrant() -> Arguments:
    subject = arguments(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True})
    return replace(subject, args=type("World2", (), {**vars(subject.args), "world_size": 2, "n_gpu": 1}))


# name of a check -> a subject in which it, and no other check, finds something
WRONG = {
    "trainer class": lambda: TrainerClass(preference(), 2),
    "collator of the model": lambda: Pairing(len, TWO),
    "model of the collator": lambda: Pairing(DataCollatorForContextParallel(TWO), None),
    "configs": lambda: Pairing(DataCollatorForContextParallel(TWO), replace(TWO, force=True)),
    "per_device_train_batch_size": lambda: arguments(per_device_train_batch_size=2),
    "auto_find_batch_size": lambda: arguments(auto_find_batch_size=True),
    "train_sampling_strategy": lambda: arguments(train_sampling_strategy="batch_rebalance"),
    "n_gpu": several_gpus,
    "average_tokens_across_devices": lambda: arguments(average_tokens_across_devices=False),
    "neftune_noise_alpha": lambda: arguments(neftune_noise_alpha=5.0),
    "use_liger_kernel": lambda: arguments(use_liger_kernel=True),
    "fp16_full_eval": lambda: arguments(fp16_full_eval=True),
    "bf16_full_eval": lambda: arguments(bf16_full_eval=True),
    "label_smoothing_factor of TRL": lambda: arguments(label_smoothing_factor=0.1),
    "compute_loss_func": lambda: arguments(compute_loss_func=len),
    "batch_eval_metrics": lambda: arguments(batch_eval_metrics=True),
    "eval_do_concat_batches": lambda: arguments(eval_do_concat_batches=False),
    "model_init": lambda: arguments(model_init=len),
    "reentrant checkpointing": reentrant,
    "columns": lambda: Documents([{"chosen": [1], "rejected": [2]}]),
    "stream is read again": lambda: Documents((document for document in make_documents([5])), make_arguments()),
    "stream for evaluation": lambda: Documents(Stream()),
    "stream for training": lambda: Documents(Stream(), make_arguments(dataloader_num_workers=2)),
    "other parallelism": lambda: OtherParallelism({"tp_size": 2}),
    "data loading": lambda: DataLoading(split_batches=True, dispatch_batches=None),
    "own loader": lambda: PreparedLoader(DataLoader([], collate_fn=DataCollatorForContextParallel(TWO))),
    "processes": lambda: replace(LAUNCH, launched=4),
    "groups": lambda: replace(LAUNCH, cp_size=4),
    "DeepSpeed runs": lambda: replace(LAUNCH, wants_deepspeed=True),
    "FSDP runs": lambda: replace(LAUNCH, wants_fsdp=True),
    "mixed precision": lambda: replace(LAUNCH, wants_mixed_precision="bf16"),
    "gradient precision": lambda: replace(SUMS, sixteen_bit=("weight",)),
    "gradient hook": lambda: replace(SUMS, comm_hook="bf16"),
    "DeepSpeed: sequence parallelism": lambda: replace(ZERO, config={"sequence_parallel_size": 2}),
    "DeepSpeed: tensor parallelism": lambda: replace(ZERO, config={"tensor_parallel": {"autotp_size": 2}}),
    "DeepSpeed: gradient sums": lambda: replace(ZERO, config={"communication_data_type": "bf16"}),
    "DeepSpeed: batch sizes": lambda: replace(ZERO, config={"train_batch_size": 2}),
    "DeepSpeed: stage 0 in bf16": lambda: replace(ZERO, mixed_precision="bf16"),
    "DeepSpeed: saved weights": lambda: replace(
        ZERO, config={"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}}
    ),
}
RIGHT = (
    TrainerClass(ContextParallelTrainer, 2),
    Pairing(DataCollatorForContextParallel(TWO), TWO),
    OtherParallelism({"tp_size": 1}),
    DataLoading(None, None),
    PreparedLoader(DataLoader([])),
    LAUNCH,
    SUMS,
    replace(SUMS, sixteen_bit=("weight",), is_told=True),
    ZERO,
    Documents(None),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_finds_its_problem(check):
    subject = WRONG[check.name]()
    assert isinstance(subject, check.subject)
    found = check.find(subject)
    assert found is not None and found.what and found.fix
    assert problems(subject) == [found] and first_problem(subject) == found
    with pytest.raises(found.error) as raised:
        refuse(*RIGHT, subject)
    assert str(raised.value) == f"{found.what}\n  {found.fix}"


def test_names_are_told_apart():
    assert sorted(check.name for check in CHECKS) == sorted(WRONG)


def test_nothing_is_found_in_what_is_right():
    right = (*RIGHT, arguments(), Documents(make_documents([5]), make_arguments()))
    assert {check.subject for check in CHECKS} - {type(subject) for subject in right} == {ZeroRun.__base__}
    assert problems(*right) == [] and first_problem(*right) is None
    refuse(*right)


def test_all_problems_are_raised_at_once():
    with pytest.raises(
        RuntimeError, match=r"(?s)^2 settings.*launcher started 4.*\n    On CPU.*cp_size=4.*\n    Start a"
    ):
        refuse(replace(LAUNCH, launched=4, cp_size=4))
