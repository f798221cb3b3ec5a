"""`hf-cp verify` as a user calls it: options, files, exit statuses, baselines and what a replay names."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_cp.tools.cli import main
from hf_cp.verify import inputs as verify_inputs
from hf_cp.verify.baseline import NUM_PROJECTIONS, Baseline, Recipe, make_baseline, replay_baseline, summarise
from tests.examples.launch import ROOT, free_port, run
from tests.models.tiny import tiny_model
from tests.verify import verify_cases as cases
from tests.verify.verify_cases import RING2, documents, full_model


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
    """As a recipe starts: one table, from rank 0, and files with a time stamp. (It runs what torchrun runs.)"""
    config, port = ROOT / "recipes/quickstart-cpu/accelerate.yaml", str(free_port())
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", port]
    data = ["--model", str(model_folder), "--data", str(model_folder / "data.jsonl"), "--max-tokens", "40"]
    options = ["--ring-degree", "2", "--lora", "2", "--layers", "1", "--output", str(tmp_path / "verify.json")]
    finished = run([*launcher, "-m", "hf_cp", "verify", *data, *options], timeout=110)
    assert finished.status == 0, finished.output
    assert finished.output.count("PASSED: 2 processes compute what one process computes.") == 1
    assert "2 of 3 documents" in finished.output and "fit into 40 tokens" in finished.output
    saved = json.loads((tmp_path / "verify.json").read_text())
    assert saved["passed"] is True and saved["report"]["document_lengths"] == [20, 9]
    assert saved["report"]["num_parameters"] == 14 and saved["recipe"]["lora"] == 2
    assert saved["fingerprint"]["setup"]["torch"] == torch.__version__
    age = datetime.now(UTC) - datetime.fromisoformat(saved["created"])
    assert 0 <= age.total_seconds() < 200


def group_calls(*calls: tuple) -> list[tuple[int, str, str]]:
    return [call(*options) for options in calls]


def call_with_a_failing_rank(*options: object) -> tuple[int, str, str]:
    def broken(*args, **kwargs):
        raise OSError("the disk of rank 1")

    if dist.get_rank() == 0:
        return call(*options)
    with mock.patch.object(verify_inputs, "random_documents", broken):
        return call(*options)


@pytest.mark.distributed
def test_in_a_group(world2, model_folder, tmp_path):
    """An error of one process, replays of a baseline, JSON on standard output."""
    baseline, torn = tmp_path / "baseline.json", tmp_path / "torn.jsonl"
    torn.write_text('{"input_ids": [1, 2\n')
    model = ("--model", model_folder)
    assert call(*model, "--data", model_folder / "data.jsonl", "--save-baseline", baseline)[0] == 0
    answers = world2.run(
        group_calls,
        (*model, "--baseline", baseline, "--ulysses-degree", "2"),
        (*model, "--random-lengths", "9,4", "--ring-degree", "2", "--json", "-"),
        (*model, "--data", torn, "--ring-degree", "2"),
        (*model, "--random-lengths", "9,4", "--ring-degree", "3"),
        timeout=100,
    )
    one_failed = world2.run(call_with_a_failing_rank, *model, "--random-lengths", "9,4", "--ring-degree", "2")
    assert [status for status, _, _ in one_failed] == [2, 2]  # rank 0 does not wait for rank 1
    assert "rank 1: OSError: the disk of rank 1" in one_failed[0][2]
    assert [[status for status, _, _ in answer] for answer in answers] == [[0, 0, 2, 2]] * 2
    (replayed, printed, refused, impossible), others = answers
    assert "ulysses=2" in replayed[1] and "cp 2: logits" in replayed[1]
    assert json.loads(printed[1])["report"]["checks"][0]["name"] == "targets"
    assert "line 1 is not JSON" in refused[2] and refused[1] == ""
    assert "does not divide the 2 launched processes" in impossible[2]
    assert [out for _, out, _ in others] == [""] * 4  # rank 0 alone prints


def test_one_process_saves_replays_and_names_what_changed(model_folder, tmp_path):
    baseline = tmp_path / "baseline.json"
    model, config = ("--model", model_folder), ("--model", model_folder / "config.json")
    saving = ("--random-lengths", "9,4", "--dtype", "float64", "--save-baseline", baseline)
    status, out, _ = call(*model, *saving)
    assert status == 0 and "baseline of 21 gradients" in out
    assert baseline.stat().st_size < 20_000

    status, out, _ = call(*model, "--baseline", baseline, "--force")  # our code in one process
    assert status == 0 and "cp 1: logits" in out and "kernel none -> sdpa" in out

    status, out, _ = call(*config, "--baseline", baseline)  # random weights
    assert status == 1 and "weights" in out.splitlines()[-1] and "cannot be compared" in out

    status, _, err = call(*model, "--baseline", baseline, "--dtype", "float32")
    assert status == 2 and "--dtype float32 contradicts the baseline" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--random-lengths", "9,4"], "nothing is split"),
        ([], "there are no documents"),
        (["--random-lengths", "9", "--save-baseline", "x.json", "--force"], "what one process computes"),
        (["--random-lengths", "9", "--force", "--layers", "3"], "the model has 2"),
        (["--random-lengths", "9", "--force", "--ring-degree", "2"], "does not divide the 1 launched processes"),
        (["--data", "missing.jsonl", "--force"], "missing.jsonl"),
        (["--baseline", "{folder}/config.json"], "is no baseline"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refuses_what_does_not_fit(model_folder, options, words):
    status, out, err = call("--model", model_folder, *(text.format(folder=model_folder) for text in options))
    assert (status, out) == (2, "") and words in err.replace("\n", " ")


def test_a_random_model_and_its_truncation_are_the_same_everywhere(model_folder):
    config = str(model_folder / "config.json")
    first, second = (verify_inputs.make_model(config, Recipe("float64", layers=1), torch.device("cpu")) for _ in "ab")
    assert len(first.model.layers) == 1 and next(first.parameters()).dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    narrow = verify_inputs.make_model(config, Recipe("bfloat16", layers=1), torch.device("cpu"))
    assert torch.equal(narrow.lm_head.weight, first.lm_head.weight.bfloat16())


# Baselines


def baseline_of(dtype: torch.dtype = torch.float32) -> Baseline:
    recipe = Recipe(str(dtype).removeprefix("torch."))
    return make_baseline(tiny_model(dtype=dtype), documents(), recipe, created="2020-01-02")


def test_a_saved_baseline_is_the_same(tmp_path):
    baseline = baseline_of()
    baseline.save(tmp_path / "b.json")
    assert Baseline.load(tmp_path / "b.json") == baseline
    (tmp_path / "b.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        Baseline.load(tmp_path / "b.json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replay_says_whose_fault_it_is(dtype):
    baseline = baseline_of(dtype)
    assert replay_baseline(tiny_model(dtype=dtype), baseline).passed

    forced = dataclasses.replace(RING2, ring_degree=1, force=True)
    ours = full_model(forced, dtype)
    assert replay_baseline(ours, baseline).passed
    with cases.wrong_scale():  # only our code is wrong
        report = replay_baseline(ours, baseline)
    assert not report.passed and all(check.ok for check in report.untouched)
    assert "our code is not" in report.verdict.text and "kernel none ->" in report.verdict.text

    wrong = tiny_model(dtype=dtype)  # as if transformers computed something else: the weights stay
    wrong.lm_head.register_forward_hook(lambda module, args, output: output * 1.1)
    older = dataclasses.replace(baseline.fingerprint, setup=baseline.fingerprint.setup | {"torch": "1.0"})
    report = replay_baseline(wrong, dataclasses.replace(baseline, fingerprint=older))
    assert not report.passed and f"torch 1.0 -> {torch.__version__}" in report.verdict.text
    assert "the untouched model in one process is not what it was on 2020-01-02" in report.verdict.text


def test_a_replay_names_other_inputs():
    baseline = baseline_of()
    other = tiny_model(dtype=torch.float32, rms_norm_eps=1e-3)
    other.get_input_embeddings().weight.data[5] += 1e-3
    names = {change.name for change in replay_baseline(other, baseline).changed_inputs}
    assert names == {"model config", "weights"}


def word_tokenizer(*words: str, template: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), chat_template=template)


def test_a_replay_names_another_tokenizer_and_other_versions():
    model, recipe = tiny_model(dtype=torch.float32), Recipe("float32", steps=1)
    baseline = make_baseline(model, documents(), recipe, created="2020-01-02", tokenizer=word_tokenizer("a", "b"))
    for tokenizer in (word_tokenizer("a", "c"), word_tokenizer("a", "b", template="{{ x }}"), None):
        report = replay_baseline(model, baseline, tokenizer=tokenizer)
        assert [change.name for change in report.changed_inputs] == ["tokenizer"] and not report.passed
        assert all(check.ok for check in report.checks)  # equal numbers of ids that mean something else
        assert "(tokenizer " in report.verdict.text and "cannot be compared" in report.verdict.text

    older = dataclasses.replace(baseline.fingerprint, setup=baseline.fingerprint.setup | {"transformers": "4.0"})
    report = replay_baseline(
        model, dataclasses.replace(baseline, fingerprint=older), tokenizer=word_tokenizer("a", "b")
    )
    assert report.passed and f"Changed since: transformers 4.0 -> {transformers.__version__}." in report.verdict.text
    assert report.tables()[0].rows == [("transformers", "4.0", transformers.__version__)]


def test_projections_measure_a_difference():
    """Their root mean square is near the norm of the difference, of matrices and of vectors, in every position."""
    torch.manual_seed(0)
    for shape in ((40, 30), (50,), (1, 7)):
        tensor, difference = torch.randn(shape), torch.randn(shape) * 1e-3
        a, b = (torch.tensor(summarise("w", t.double())) for t in (tensor, tensor.double() + difference))
        estimate = float((b - a)[1:].square().mean().sqrt())
        assert len(a) == NUM_PROJECTIONS + 1 and 0.5 < estimate / float(difference.norm()) < 2.0
    assert summarise("w", tensor) != summarise("v", tensor)
