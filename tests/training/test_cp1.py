"""cp_size 1 is the stock Trainer, bit for bit, and adds no communication; packing works there too."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.training import ContextParallelTrainer
from tests.training.tiny import REF, STOCK, make_arguments, make_documents, make_model, relative, train

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "isend",
    "new_group",
    "new_subgroups_by_enumeration",
    "reduce_scatter_tensor",
)


def run_trainer(trainer_class: type[Trainer]) -> tuple[dict[str, torch.Tensor], list[dict], collections.Counter]:
    """Trains and evaluates in fp32 with Adam, clipping and a short last window; counts collectives."""
    calls: collections.Counter = collections.Counter()

    def counted(name, function):
        def wrapper(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return wrapper

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    documents = make_documents([16, 9, 12, 5, 14, 3, 8])
    model = make_model(dtype=torch.float32)
    try:
        for name, function in originals.items():
            setattr(dist, name, counted(name, function))
        trainer = trainer_class(
            model=model,
            args=make_arguments(
                optim="adamw_torch",
                learning_rate=1e-3,
                max_grad_norm=1.0,
                max_steps=-1,
                num_train_epochs=2,
                per_device_train_batch_size=2,
                per_device_eval_batch_size=2,
                gradient_accumulation_steps=2,
                eval_strategy="epoch",
            ),
            train_dataset=documents,
            eval_dataset=documents[:5],
            data_collator=DataCollatorForContextParallel(ContextParallelConfig()),
        )
        trainer.train()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    timings = ("runtime", "per_second")
    log = [{k: v for k, v in entry.items() if not k.endswith(timings)} for entry in trainer.state.log_history]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, log, calls


def assert_same(ours, stock) -> None:
    assert ours[1] == stock[1] and len(ours[1]) > 4
    assert ours[2] == stock[2]
    assert all(torch.equal(ours[0][name], parameter) for name, parameter in stock[0].items())


def test_one_process_is_the_stock_trainer():
    assert_same(run_trainer(ContextParallelTrainer), run_trainer(Trainer))


@pytest.mark.distributed
def test_two_processes_are_the_stock_trainer(world2):
    stock = world2.run(run_trainer, Trainer)
    for ours, expected in zip(world2.run(run_trainer, ContextParallelTrainer), stock, strict=True):
        assert_same(ours, expected)
    assert sum(stock[0][2].values()) > 0  # the counting does count


@pytest.mark.distributed
def test_packed_rows_with_the_untouched_model(world2):
    """max_tokens at cp 1: packed rows over dp 2 give the step of one process with twice the accumulation."""
    documents = make_documents([30, 21, 11, 17, 14, 9, 20, 3])
    reference = train(REF, documents, gradient_accumulation_steps=2)
    for record in world2.run(train, STOCK, documents):
        assert record.losses == pytest.approx(reference.losses, rel=1e-6)
        for name, parameter in reference.parameters.items():
            assert relative(record.parameters[name], parameter) < 1e-6


def test_columns_that_no_model_takes():
    """`seq_lengths` cuts a feature into documents; the stock Trainer would drop the column."""
    joined = [
        {name: first[name] + second[name] for name in first}
        | {"seq_lengths": [len(d["labels"]) for d in (first, second)]}
        for first, second in zip(make_documents([7, 5]), make_documents([9, 4], seed=1), strict=True)
    ]
    reference = train(REF, joined, max_tokens=None, max_steps=1)
    record = train(STOCK, joined, max_tokens=None, max_steps=1)
    assert record.losses == pytest.approx(reference.losses, rel=1e-6)
