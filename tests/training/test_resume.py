"""A run that was interrupted and goes on in another layout gives the weights of the run that was not.

fp64, Adam, a cosine schedule, shuffled rows, and a stop inside the second epoch: momentum, learning rate and rows must
all be found again. 11 rows, 4 a step: 3 steps an epoch, the last one short; stop after step 4, end after step 7.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_cp.config import ContextParallelConfig
from hf_cp.training.checkpoint import find_checkpoint
from tests.training.tiny import REF, STOCK, RecordingTrainer, make_documents, make_model, make_trainer, relative

pytestmark = pytest.mark.distributed

RING2, RING4 = ContextParallelConfig(ring_degree=2), ContextParallelConfig(ring_degree=4)
USP4 = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
LENGTHS = [16, 9, 14, 16, 11, 16, 5, 16, 12, 16, 13, 3, 16, 7, 2, 15]
ROWS, STOP, END = 11, 4, 7
SCHEDULE = {
    "max_tokens": 16,
    "max_steps": END,
    "save_strategy": "steps",
    "save_steps": STOP,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
}
# processes, config, accumulation steps: 4 rows a step each
LAYOUTS = {
    "W1": (1, REF, 4),
    "W2-ring2": (2, RING2, 4),
    "W4-ring4": (4, RING4, 4),
    "W4-usp": (4, USP4, 4),
    "W4-dp2-ring2": (4, RING2, 2),
    "W4-dp4": (4, REF, 1),
}


class RowTrainer(RecordingTrainer):
    """Notes the ids of each document that begins on this rank: which rows a step has seen."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen = getattr(self, "seen", [])
        starts = (inputs["position_ids"] == 0) & (inputs["labels"] != -100)
        self.seen += [(self.state.global_step, token) for token in inputs["input_ids"][starts].tolist()]
        return super().training_step(model, inputs, num_items_in_batch)


def documents() -> list[dict]:
    made = make_documents(LENGTHS, masked=0.2)
    for number, document in enumerate(made):  # the first token tells documents apart
        document["input_ids"][0] = document["labels"][0] = number
    return made


def run(
    config, accumulation, folder, *, steps=END, resume=False, data=None, lora=False, dropout=0.0, **settings
) -> dict:
    model = make_model(lora=lora, dropout=dropout)
    trainer = make_trainer(
        model,
        config,
        documents() if data is None else data,
        trainer_class=RowTrainer,
        **SCHEDULE | {"gradient_accumulation_steps": accumulation, "output_dir": folder, **settings},
        callbacks=[StopAt(steps)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "rates": [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e],
        "seen": trainer.seen,
        "epoch": trainer.state.epoch,
    }


class StopAt(TrainerCallback):
    """Ends a run early, with the schedule of the whole one."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def run_in(request, layout: str, *args, **settings) -> list[dict]:
    processes, config, accumulation = LAYOUTS[layout]
    if processes == 1:
        return [run(config, accumulation, *args, **settings)]
    return request.getfixturevalue(f"world{processes}").run(run, config, accumulation, *args, **settings)


def rows_of_steps(results: list[dict]) -> dict[int, list[int]]:
    """Documents (by first token) of each step, over all ranks."""
    steps: dict[int, list[int]] = {}
    for result in results:
        for step, token in result["seen"]:
            steps.setdefault(step, []).append(token)
    return {step: sorted(tokens) for step, tokens in steps.items()}


@cache
def uninterrupted(folder: str, lora: bool = False) -> dict:
    return run(REF, 4, folder, save_strategy="no", lora=lora)


@pytest.fixture(scope="module")
def checkpoints(request, tmp_path_factory) -> dict[str, Path]:
    """Of step 4, written by three layouts."""
    folders = {}
    for layout in ("W1", "W4-dp2-ring2", "W4-ring4"):
        folder = tmp_path_factory.mktemp(layout)
        run_in(request, layout, str(folder), steps=STOP)
        folders[layout] = folder / f"checkpoint-{STOP}"
    return folders


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("W4-dp2-ring2", "W4-ring4"),
        ("W4-dp2-ring2", "W4-dp4"),
        ("W4-dp2-ring2", "W2-ring2"),
        ("W4-ring4", "W1"),
        ("W1", "W4-usp"),
    ],
)
def test_another_layout_goes_on(request, checkpoints, tmp_path, saved_by, resumed_by):
    whole = uninterrupted(str(tmp_path / "whole"))
    results = run_in(request, resumed_by, str(tmp_path / "resumed"), resume=str(checkpoints[saved_by]))
    check_same(results, whole, first_step=STOP)


def check_same(results: list[dict], whole: dict, *, first_step: int) -> None:
    """Rows, learning rates and weights are those of the run that was not interrupted."""
    expected = {step: tokens for step, tokens in rows_of_steps([whole]).items() if step >= first_step}
    assert rows_of_steps(results) == expected
    for result in results:
        assert result["rates"] == pytest.approx(whole["rates"], rel=1e-12)  # the saved log, then this run's
        assert result["epoch"] == pytest.approx(whole["epoch"])
        start = make_model().state_dict()
        for name, parameter in whole["parameters"].items():
            assert relative(result["parameters"][name] - start[name], parameter - start[name]) < 1e-10


def test_the_end_of_an_epoch(world4, tmp_path):
    """Another layout goes on with the first rows of the next one."""
    whole = uninterrupted(str(tmp_path / "whole"))
    world4.run(run, RING2, 2, str(tmp_path / "a"), steps=3, save_steps=3)
    results = world4.run(run, RING4, 4, str(tmp_path / "b"), resume=str(tmp_path / "a" / "checkpoint-3"))
    check_same(results, whole, first_step=3)


def test_dropout_goes_on(world2, tmp_path):
    """In the same layout the masks after step 4 are those of the run that saved it and went on: not a bit differs."""
    settings = {"lora": True, "dropout": 0.3}
    whole = world2.run(run, RING2, 4, str(tmp_path), **settings)
    checkpoint = str(tmp_path / f"checkpoint-{STOP}")
    resumed = world2.run(run, RING2, 4, str(tmp_path / "resumed"), resume=checkpoint, **settings)
    for expected, found in zip(whole, resumed, strict=True):
        assert all(torch.equal(found["parameters"][name], x) for name, x in expected["parameters"].items())


def test_every_document_once_an_epoch(tmp_path):
    steps = rows_of_steps([uninterrupted(str(tmp_path))])
    for epoch in (0, 1):
        assert sorted(sum((steps[3 * epoch + i] for i in range(3)), [])) == list(range(len(LENGTHS)))
    assert [steps[i] for i in range(3)] != [steps[3 + i] for i in range(3)]


def test_adapters_go_on(request, world4, tmp_path):
    """LoRA, saved on dp 2 x ring 2, resumed in one process."""
    whole = uninterrupted(str(tmp_path / "whole"), lora=True)
    world4.run(run, RING2, 2, str(tmp_path / "a"), steps=STOP, lora=True)
    result = run(REF, 4, str(tmp_path / "b"), resume=str(tmp_path / "a" / f"checkpoint-{STOP}"), lora=True)
    start = make_model(lora=True).state_dict()
    for name, parameter in whole["parameters"].items():
        if "lora" in name:
            assert relative(result["parameters"][name] - start[name], parameter - start[name]) < 1e-10


def refuse(folder: str, cases: list[dict]) -> list[str]:
    """Messages of several attempts to resume on this rank."""
    messages = []
    for case in cases:
        try:
            run(RING2, **{"accumulation": 2, "folder": folder, "resume": folder, **case})
            messages.append("nothing was raised")
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_refusals(world4, checkpoints, tmp_path):
    """Both layouts by name, on every rank, before a step is made."""
    folder = tmp_path / f"checkpoint-{STOP}"
    shutil.copytree(checkpoints["W4-dp2-ring2"], folder)
    broken = tmp_path / "checkpoint-9"
    shutil.copytree(folder, broken)
    (broken / "trainer_state.json").unlink()
    foreign = tmp_path / "foreign"
    shutil.copytree(folder, foreign)
    (foreign / "hf_cp.json").unlink()
    newer = tmp_path / "newer"
    shutil.copytree(folder, newer)
    (newer / "hf_cp.json").write_text('{"format": 99, "versions": {"hf-cp": "9.0"}}')
    other = documents()
    other[3]["input_ids"][5] = other[3]["input_ids"][5] ^ 1
    cases = {
        "rows per step": ({"accumulation": 3}, ("had 4 samples, here it has 6", "gradient_accumulation_steps=2")),
        "documents": ({"data": other}, ("data_digest was",)),
        "row size": ({"max_tokens": 17}, ("data_digest was",)),
        "seed": ({"seed": 3}, ("seed was 42, here it is 3",)),
        "order": ({"train_sampling_strategy": "sequential"}, ("shuffle was True, here it is False",)),
        "incomplete": (
            {"resume": str(broken)},
            (
                "checkpoint-9 is not a complete checkpoint",
                "trainer_state.json",
                "beside it: checkpoint-4)",
            ),
        ),
        "all are incomplete": (
            {"resume": True, "folder": str(tmp_path / "cut off")},
            ("no checkpoint in", "checkpoint-9 is incomplete"),
        ),
        "foreign": ({"resume": str(foreign)}, ("foreign has no hf_cp.json", "ignore_data_skip=True")),
        "newer": ({"resume": str(newer)}, ("has format 99", "9.0")),
        "none": ({"resume": True, "folder": str(tmp_path / "empty")}, ("no checkpoint in",)),
    }
    (tmp_path / "empty").mkdir()
    shutil.copytree(broken, tmp_path / "cut off" / broken.name)
    for messages in world4.run(refuse, str(folder), [case for case, _ in cases.values()], timeout=120):
        for message, (name, (_, words)) in zip(messages, cases.items(), strict=True):
            assert message.startswith("ValueError"), (name, message)
            assert all(word in message for word in words), (name, message)
    assert not any(path.name.startswith("checkpoint") for path in (tmp_path / "empty").iterdir())
    layouts = world4.run(refuse, str(folder), [{"accumulation": 3}])[0][0]
    assert layouts.count("dp_size=2") == 2 and "saved:" in layouts and "here:" in layouts


def test_the_last_complete_checkpoint_is_taken(tmp_path, caplog):
    """A job that was killed while it saved goes on when it is started again."""
    for name, is_complete in (("checkpoint-9", True), ("checkpoint-10", True), ("checkpoint-11", False)):
        (tmp_path / name).mkdir()
        if is_complete:
            (tmp_path / name / "trainer_state.json").write_text("{}")
    assert find_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-11 was not written to its end; going on from" in caplog.text


def test_begin_the_epoch_anew(checkpoints, tmp_path):
    """With ignore_data_skip, other documents and other steps are the user's choice."""
    resumed = run(
        REF,
        4,
        str(tmp_path),
        resume=str(checkpoints["W1"]),
        data=documents()[:8],
        ignore_data_skip=True,
        steps=STOP + 1,
    )
    assert {token for step, token in resumed["seen"] if step == STOP} <= set(range(8))


def differ_by_host(folder: str) -> None:
    import os

    rank = os.environ["RANK"]
    run(RING2, 2, f"{folder}/{rank}", resume=True)


def test_hosts_with_different_last_checkpoints(world4, checkpoints, tmp_path):
    for rank in range(4):
        shutil.copytree(checkpoints["W4-dp2-ring2"], tmp_path / str(rank) / f"checkpoint-{STOP}")
    shutil.move(tmp_path / "2" / f"checkpoint-{STOP}", tmp_path / "2" / "checkpoint-3")
    for error in world4.run(differ_by_host, str(tmp_path), expect_error=True):
        assert error.type_name == "RuntimeError"
        assert "disagrees on its checkpoint" in error.message and "rank 2" in error.message


def test_stock_order_is_another_one(checkpoints, tmp_path):
    """cp_size 1 without packing runs the stock Trainer, which deals features in its own order."""
    with pytest.raises(ValueError, match="was written on packed or shared samples"):
        run(STOCK, 4, str(tmp_path), resume=str(checkpoints["W1"]), max_tokens=None)


def next_draw(config: ContextParallelConfig, accumulation: int, folder: str, resume: bool) -> float:
    """A number of the random state that dropout would use in the first step after the checkpoint."""

    class Draw(TrainerCallback):
        value = 0.0

        def on_step_end(self, args, state, control, **kwargs):
            self.value = float(torch.rand(()))
            control.should_training_stop = True

    draw = Draw()
    trainer = make_trainer(
        make_model(),
        config,
        documents(),
        max_tokens=16,
        callbacks=[draw],
        output_dir=folder,
        max_steps=END,
        gradient_accumulation_steps=accumulation,
        optim="adamw_torch",
    )
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{STOP}")
    return draw.value


def test_ranks_of_a_new_row_draw_other_dropout_masks(world4, checkpoints):
    """Ranks 0 and 2 had one state while each was the first of a row; on ring 4 they share one."""
    folder = str(checkpoints["W4-dp2-ring2"].parent)
    same = world4.run(next_draw, RING2, 2, folder, True)
    assert (same[0], same[1]) == (same[2], same[3]) and same[0] != same[1]
    assert len(set(world4.run(next_draw, RING4, 4, folder, True))) == 4


class Streamed(IterableDataset):
    """The documents, to be read forwards only."""

    def __iter__(self):
        return iter(documents())


def test_stream_goes_on_in_another_layout(request, world4, tmp_path):
    """16 documents, read twice in 7 steps; saved on dp 2 x ring 2, resumed on ring 4 and in one process."""
    whole = run(REF, 4, str(tmp_path / "whole"), data=Streamed(), save_strategy="no")
    seen = rows_of_steps([whole])
    assert sorted(seen) == list(range(END)) and len(set(sum(seen.values(), []))) == len(LENGTHS)
    world4.run(run, RING2, 2, str(tmp_path / "a"), steps=STOP, data=Streamed())
    resume = str(tmp_path / "a" / f"checkpoint-{STOP}")
    single = run(REF, 4, str(tmp_path / "b"), resume=resume, data=Streamed())
    shared = world4.run(run, RING4, 4, str(tmp_path / "c"), resume=resume, data=Streamed())
    expected = {step: tokens for step, tokens in seen.items() if step >= STOP}
    assert rows_of_steps([single]) == rows_of_steps(shared) == expected
    start = make_model().state_dict()
    for result in (single, *shared):
        for name, parameter in whole["parameters"].items():
            assert relative(result["parameters"][name] - start[name], parameter - start[name]) < 1e-10
