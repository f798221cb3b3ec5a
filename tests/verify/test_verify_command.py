"""`hf-cp verify` as a user calls it: options, files, exit statuses."""

from __future__ import annotations

import contextlib
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_cp.tools.cli import main
from hf_cp.verify import inputs
from tests.examples.launch import ROOT, accelerate_forked
from tests.models.tiny import tiny_model
from tests.verify import verify_cases as cases
from tests.verify.verify_cases import documents


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A tiny model and, beside it, documents of its vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    lines = [json.dumps(document) for document in documents((20, 70, 9))]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def call(*options: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `hf-cp verify options` in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["verify", *map(str, options)])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.distributed
def test_launched_on_two_processes(model_folder, tmp_path):
    """As a recipe starts: one table, from rank 0, and files with a time stamp."""
    launcher = ["--config_file", str(ROOT / "recipes/quickstart-cpu/accelerate.yaml")]
    data = ["--model", str(model_folder), "--data", str(model_folder / "data.jsonl"), "--max-tokens", "40"]
    options = ["--ring-degree", "2", "--lora", "2", "--layers", "1", "--output", str(tmp_path / "verify.json")]
    words = ["-m", "hf_cp", "verify", *data, *options]
    finished = accelerate_forked(launcher, *words, processes=2, timeout=110)
    assert finished.status == 0, finished.output
    assert finished.output.count("PASSED: 2 processes compute what one process computes.") == 1
    assert "2 of 3 documents" in finished.output and "fit into 40 tokens" in finished.output
    saved = json.loads((tmp_path / "verify.json").read_text())
    assert saved["passed"] is True and saved["report"]["document_lengths"] == [20, 9]
    assert saved["report"]["num_parameters"] == 14 and saved["options"]["lora"] == 2
    assert saved["versions"]["torch"] == torch.__version__
    age = datetime.now(UTC) - datetime.fromisoformat(saved["created"])
    assert 0 <= age.total_seconds() < 200


def group_calls(*calls: tuple) -> list[tuple[int, str, str]]:
    return [call(*options) for options in calls]


def call_with_a_failing_rank(*options: object) -> tuple[int, str, str]:
    def broken(*args, **kwargs):
        raise OSError("the disk of rank 1")

    if dist.get_rank() == 0:
        return call(*options)
    with mock.patch.object(inputs, "random_documents", broken):
        return call(*options)


@pytest.mark.distributed
def test_in_a_group(world2, model_folder, tmp_path):
    """An error of one process, a comparison of Ulysses, JSON on standard output, refusals."""
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"input_ids": [1, 2\n')
    model = ("--model", model_folder)
    answers = world2.run(
        group_calls,
        (*model, "--data", model_folder / "data.jsonl", "--ulysses-degree", "2", "--steps", "1"),
        (*model, "--random-lengths", "9,4", "--ring-degree", "2", "--steps", "1", "--json", "-"),
        (*model, "--data", torn, "--ring-degree", "2"),
        (*model, "--random-lengths", "9,4", "--ring-degree", "3"),
        timeout=100,
    )
    one_failed = world2.run(call_with_a_failing_rank, *model, "--random-lengths", "9,4", "--ring-degree", "2")
    assert [status for status, _, _ in one_failed] == [2, 2]  # rank 0 does not wait for rank 1
    assert "rank 1: OSError: the disk of rank 1" in one_failed[0][2]
    assert [[status for status, _, _ in answer] for answer in answers] == [[0, 0, 2, 2]] * 2
    (compared, printed, refused, impossible), others = answers
    assert "3 documents, 99 tokens" in compared[1] and "ring 1 x Ulysses 2" in compared[1]
    assert json.loads(printed[1])["report"]["checks"][0]["name"] == "targets"
    assert "line 1 is not JSON" in refused[2] and refused[1] == ""
    assert "does not divide the 2 launched processes" in impossible[2]
    assert [out for _, out, _ in others] == [""] * 4  # rank 0 alone prints


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_one_process_fails_with_the_cause(model_folder, dtype):
    with cases.wrong_scale(None):
        status, out, _ = call("--model", model_folder, "--random-lengths", "9,4", "--force", "--dtype", dtype)
    assert status == 1 and f"13 tokens in one packed sample, {dtype}" in out
    assert out.splitlines()[-1].startswith("FAILED: ") and "look at the attention kernel" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--random-lengths", "9,4"], "nothing is split"),
        ([], "there are no documents"),
        (["--random-lengths", "9", "--force", "--layers", "3"], "the model has 2"),
        (["--random-lengths", "9", "--force", "--ring-degree", "2"], "does not divide the 1 launched processes"),
        (["--data", "missing.jsonl", "--force"], "missing.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refuses_what_does_not_fit(model_folder, options, words):
    status, out, err = call("--model", model_folder, *options)
    assert (status, out) == (2, "") and words in err.replace("\n", " ")


def test_a_random_model_and_its_truncation_are_the_same_everywhere(model_folder):
    config = str(model_folder / "config.json")
    first, second = (inputs.make_model(config, dtype="float64", layers=1) for _ in "ab")
    assert len(first.model.layers) == 1 and next(first.parameters()).dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    narrow = inputs.make_model(config, dtype="bfloat16", layers=1)
    assert torch.equal(narrow.lm_head.weight, first.lm_head.weight.bfloat16())
