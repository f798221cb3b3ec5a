"""FSDP 2 around the training steps: checkpoints, whole weights, evaluation, generation; fp64, against one process.

The steps themselves are compared in tests/equivalence/test_backends.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_cp.config import ContextParallelConfig
from hf_cp.models.patch import remove_context_parallel
from hf_cp.training.checkpoint import check_fsdp_form
from tests.models.test_generate import generate
from tests.training.fsdp2 import fsdp2_arguments, whole_parameters
from tests.training.test_predict import LENGTHS, accuracy, argmax
from tests.training.test_resume import END, LAYOUTS, SCHEDULE, STOP, StopAt
from tests.training.test_resume import documents as numbered_documents
from tests.training.tiny import REF, make_documents, make_model, make_trainer, relative

pytestmark = pytest.mark.distributed

RING2 = ContextParallelConfig(ring_degree=2)


# Checkpoints: 4 rows a step, saved by dp 2 x ring 2 after step 4 of 7, inside the second epoch


@dataclass(frozen=True)
class Run:
    """What a run computed; `losses` are of its own steps, `logged` and `grad_norms` of all since the first one."""

    losses: list[float]
    logged: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]


def run(
    config: ContextParallelConfig,
    accumulation: int,
    folder: str,
    *,
    lora: bool,
    form: str | None = None,
    steps: int = END,
    resume: str | None = None,
) -> Run:
    """With FSDP 2 and checkpoints of that `form`, or without any backend."""
    settings = SCHEDULE | {"gradient_accumulation_steps": accumulation, "output_dir": folder, "max_tokens": 16}
    if form is not None:
        settings |= {"arguments_from": fsdp2_arguments, "state_dict_type": form}
    model = make_model(lora=lora)
    trainer = make_trainer(model, config, numbered_documents(), callbacks=[StopAt(steps)], **settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    log, first = trainer.state.log_history, trainer.micro_losses[0][0]
    return Run(
        losses=trainer.step_losses()[first:],
        logged=[entry["loss"] for entry in log if "loss" in entry],
        grad_norms=[float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        parameters=whole_parameters(model),
    )


@cache
def uninterrupted(folder: str, lora: bool) -> Run:
    return run(REF, 4, folder, lora=lora)


def saved_weights(folder: Path, lora: bool) -> dict[str, torch.Tensor]:
    """By the names of the model's parameters."""
    if not lora:
        return load_file(folder / "model.safetensors")
    saved = load_file(folder / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): tensor for name, tensor in saved.items()}


@pytest.mark.parametrize(
    ("lora", "form", "layouts"),
    [
        (False, "FULL_STATE_DICT", ("W4-dp2-ring2", "W4-dp2-ring2", "W2-ring2")),
        (False, "SHARDED_STATE_DICT", ("W4-dp2-ring2", "W2-ring2")),
        (True, "FULL_STATE_DICT", ("W2-ring2", "W2-ring2", "W4-dp2-ring2")),
        (True, "SHARDED_STATE_DICT", ("W2-ring2", "W4-dp2-ring2")),
    ],
    ids=["full", "full, sharded", "lora", "lora, sharded"],
)
@pytest.mark.slow
def test_a_checkpoint_goes_on(request, tmp_path, lora, form, layouts):
    """Of the first layout in the others, on more or fewer processes; the model that is saved at the end is whole."""

    def run_in(layout: str, folder: str, **settings: Any) -> list[Run]:
        size, config, accumulation = LAYOUTS[layout]
        world, folder = request.getfixturevalue(f"world{size}"), str(tmp_path / folder)
        return world.run(run, config, accumulation, folder, lora=lora, form=form, **settings)

    whole = uninterrupted(str(tmp_path / "whole"), lora)
    run_in(layouts[0], "saved", steps=STOP)
    checkpoint = str(tmp_path / "saved" / f"checkpoint-{STOP}")
    results = [result for layout in layouts[1:] for result in run_in(layout, "resumed", resume=checkpoint)]
    start = make_model(lora=lora).state_dict()
    trained = [name for name in whole.parameters if not lora or "lora" in name]
    for result in results:
        assert result.losses == pytest.approx(whole.losses[STOP:], rel=1e-10)
        assert result.grad_norms == pytest.approx(whole.grad_norms, rel=1e-10)
        assert result.logged == pytest.approx(whole.losses, rel=1e-6)  # the Trainer adds up in fp32
        for name in trained:
            assert relative(result.parameters[name] - start[name], whole.parameters[name] - start[name]) < 1e-10, name
    saved = saved_weights(tmp_path / "resumed", lora)
    assert saved.keys() == set(trained)
    for name, tensor in saved.items():
        assert relative(tensor - start[name], whole.parameters[name] - start[name]) < 1e-10, name


def test_a_checkpoint_in_another_form(world2, tmp_path):
    """It is refused on every rank, before accelerate would look for a file that is not there."""
    world2.run(run, RING2, 4, str(tmp_path), lora=False, form="FULL_STATE_DICT", steps=STOP)
    folder = str(tmp_path / f"checkpoint-{STOP}")
    attempts = {
        "SHARDED_STATE_DICT": ("holds FULL_STATE_DICT of FSDP", "Set state_dict_type to FULL_STATE_DICT"),
        None: ("(FSDP) than this run's (whole)", "saved: 2 processes", "here:  2 processes"),
    }
    for form, words in attempts.items():
        for error in world2.run(run, RING2, 4, folder, lora=False, form=form, resume=folder, expect_error=True):
            assert error.type_name == "ValueError" and all(word in error.message for word in words), error
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no state of FSDP, this run reads FULL.*\n.*without save_only_model"):
        check_fsdp_form(tmp_path / "empty", "FULL_STATE_DICT")


# Evaluation and generation


@dataclass(frozen=True)
class Evaluated:
    """Losses and metrics at the start, after every step and after training; predictions; a generated text."""

    metrics: list[dict[str, float]]
    predictions: np.ndarray
    label_ids: np.ndarray
    text: torch.Tensor


def evaluate(config: ContextParallelConfig, accumulation: int, *, lora: bool, fsdp: bool) -> Evaluated:
    """Trains two steps, evaluating all the time."""
    model, documents = make_model(lora=lora), make_documents(LENGTHS)
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    settings |= {"gradient_accumulation_steps": accumulation, "eval_dataset": documents}
    if fsdp:
        settings["arguments_from"] = fsdp2_arguments
    trainer = make_trainer(model, config, documents, **settings)
    trainer.compute_metrics, trainer.preprocess_logits_for_metrics = accuracy, argmax
    if fsdp:
        with pytest.raises(RuntimeError, match=r"with FSDP 2.*\n.*Set eval_on_start=True"):
            trainer.evaluate()
    trainer.train()
    metrics = [entry for entry in trainer.state.log_history if "eval_loss" in entry] + [trainer.evaluate()]
    output = trainer.predict(documents)
    if not fsdp:
        remove_context_parallel(model)  # the text is that of the untouched model
    return Evaluated([*metrics, output.metrics], output.predictions, output.label_ids, generate(trainer.model))


def scores(metrics: list[dict[str, Any]]) -> list[list[float]]:
    """Without what is timed."""
    kept = ("loss", "accuracy", "eval_targets")
    return [[value for name, value in entry.items() if name.endswith(kept)] for entry in metrics]


@pytest.mark.parametrize(("world", "accumulation", "lora"), [("world4", 2, False), ("world2", 4, True)])
def test_evaluation_and_generation(request, world, accumulation, lora):
    """An odd number of rows; dp 2 x ring 2, and ring 2. Before train() it is refused, and the run goes on unharmed."""
    expected = evaluate(REF, 4, lora=lora, fsdp=False)
    assert len(expected.metrics) == 5 and all(len(values) == 3 for values in scores(expected.metrics))
    assert len({entry["eval_loss"] for entry in expected.metrics[:3]}) == 3
    for found in request.getfixturevalue(world).run(evaluate, RING2, accumulation, lora=lora, fsdp=True):
        for values, others in zip(scores(found.metrics), scores(expected.metrics), strict=True):
            assert values == pytest.approx(others, rel=1e-10)
        np.testing.assert_array_equal(found.predictions, expected.predictions)
        np.testing.assert_array_equal(found.label_ids, expected.label_ids)
        assert torch.equal(found.text, expected.text)
