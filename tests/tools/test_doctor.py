"""`hf-cp doctor`: every check passes on a good recipe and fails, with numbers, on the one that is wrong for it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from hf_cp import environment
from hf_cp.config import ContextParallelConfig
from hf_cp.data import collator as collator_module
from hf_cp.planning.model_names import HUB_NAMES, known_models
from hf_cp.recipes.settings import TrainSettings
from hf_cp.tools.cli import main
from hf_cp.tools.doctor.check import Check, Result, examine, judge, warn
from hf_cp.tools.doctor.data import position_of
from hf_cp.tools.doctor.subject import Subject, as_one_process
from hf_cp.training.checkpoint import CheckpointRecord
from hf_cp.training.deepspeed import GATHER_WEIGHTS
from tests.examples.launch import ROOT
from tests.tools.recipe_files import check, parse, write_model, write_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """TrainingArguments writes settings for accelerate into the environment."""
    monkeypatch.setattr("os.environ", os.environ.copy())


def call(*options: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `hf-cp doctor options` in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["doctor", *map(str, options)])
    return status, out.getvalue(), err.getvalue()


def test_a_good_recipe_passes_and_the_environment_stays(model, tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path / "recipe", model)
    monkeypatch.setenv("RANK", "0")  # of a launcher that has nothing to do with it
    monkeypatch.setenv("WORLD_SIZE", "7")
    before = dict(os.environ)
    status, out, err = call("--recipe", recipe, "--json", "-")
    found = json.loads(out)
    by_name = {result["name"]: result for result in found["checks"]}
    assert status == 0 and err == "" and dict(os.environ) == before
    assert {result["status"] for result in by_name.values()} == {"ok", "skip"}, found
    assert {name for name, result in by_name.items() if result["status"] == "skip"} == {
        "evaluation",
        "checkpoint",
        "proof",
    }
    assert "micro 1 x accumulation 2 x dp 1 = 2 of up to 128 tokens" in by_name["batch"]["detail"]
    assert "train_batch_size is 4" in by_name["batch"]["detail"]
    assert by_name["batches"]["detail"].startswith("tokens of 2 sample(s): ")
    assert "8 documents (345 tokens)" in by_name["documents"]["detail"]


def test_a_bad_recipe_fails_with_one_line_for_one_cause(model, tmp_path):
    recipe = write_recipe(tmp_path / "recipe", model, train={"ring_degree": 3, "bf16": "maybe"})
    status, out, _ = call("--recipe", recipe)
    assert status == 1
    assert out.splitlines()[-1].startswith("FAILED: not ready (")
    assert out.count("maybe") == 1 and "needs what failed above" in out
    assert "2 processes cannot be split into groups of cp_size=3" in out


WRONG = [
    ("processes", {"accelerate": {"num_processes": 3}, "train": {"expected_processes": 3}}, "fail", "cp_size=2"),
    ("processes", {"train": {"expected_processes": 4}}, "fail", "expected_processes=4"),
    ("processes", {"accelerate": {"num_machines": 3}}, "fail", "num_processes=2 over num_machines=3"),
    ("launcher", {"accelerate": {"distributed_type": "MULTI_CPU"}}, "fail", "starts one process"),
    ("launcher", {"accelerate": {"distributed_type": "NO"}}, "fail", "starts one process"),
    ("launcher", {"accelerate": {"distributed_type": "FSDP"}}, "fail", "GPUs only"),
    ("launcher", {"accelerate": {"distributed_type": "MEGATRON_LM"}}, "fail", "not supported"),
    ("launcher", {"accelerate": {"surprise": 1}}, "fail", "unknown keys"),
    (
        "accelerate's own parallelism",
        {"accelerate": {"parallelism_config": {"parallelism_config_sp_size": 2}}},
        "fail",
        "parallelism_config_sp_size in accelerate.yaml=2",
    ),
    ("DeepSpeed config", {"deepspeed": {"sequence_parallel_size": 2}}, "fail", "sequence_parallel_size=2"),
    ("DeepSpeed config", {"deepspeed": {"communication_data_type": "bf16"}}, "fail", "summed in fp32"),
    ("DeepSpeed config", {"deepspeed": {"train_batch_size": 2}}, "fail", "train_batch_size=2, but this run has 4"),
    ("DeepSpeed config", {"deepspeed": {"gradient_accumulation_steps": 4}}, "fail", "gradient_accumulation_steps=4"),
    ("DeepSpeed config", {"deepspeed": {"gradient_clipping": 0.5}}, "fail", "max_grad_norm=1.0"),
    ("DeepSpeed config", {"train": {"expected_zero_stage": 3}}, "fail", "expected_zero_stage=3"),
    ("DeepSpeed config", {"deepspeed": {"zero_optimization": {"stage": 3, GATHER_WEIGHTS: False}},
                          "train": {"expected_zero_stage": 3}}, "fail", "stage3_gather"),
    ("DeepSpeed config", {"accelerate": {"deepspeed_config": {"zero_stage": 3}}, "train": {"expected_zero_stage": 3}},
     "fail", "a model without weights"),
    ("DeepSpeed config", {"accelerate": {"deepspeed_config": {"deepspeed_config_file": "x.json"}}}, "fail", "x.json"),
    ("DeepSpeed config", {"accelerate": {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 8}}},
     "fail", "gradient_accumulation_steps=8"),
    ("precision", {"deepspeed": {"bf16": {"enabled": False}}}, "fail", "bf16.enabled=False, train.yaml asks for bf16"),
    ("precision", {"deepspeed": {"zero_optimization": {"stage": 0}}}, "fail", "zero_stage=0 with bf16"),
    ("precision", {"accelerate": {"mixed_precision": "fp16"}}, "fail", "accelerate.yaml has mixed_precision fp16"),
    ("sums of gradients", {"accelerate": {"distributed_type": "MULTI_GPU"}, "train": {"model_dtype": "bfloat16"}},
     "fail", "in 16 bits over cp_size=2"),
    ("placement", {"accelerate": {"num_machines": 2, "num_processes": 4},
                   "train": {"ulysses_degree": 4, "ring_degree": 1}}, "warn", "does not divide the 2 processes"),
    ("time limit", {"train": {"timeout_seconds": 7200}}, "warn", "timeout_seconds=7,200 s"),
    ("time limit", {"train": {"ddp_timeout": 10}}, "warn", "ddp_timeout=10 s"),
    ("time limit", {"train": {"timeout_seconds": 1800, "ddp_timeout": 7200}}, "warn", "ddp_timeout=7,200 s"),
    ("keys", {"train": {"learning_rat": 1.0, "own": 1}}, "fail", "unknown in train.yaml: learning_rat, own"),
    ("arguments", {"train": {"per_device_train_batch_size": 2}}, "fail", "per_device_train_batch_size=2: a"),
    ("arguments", {"train": {"use_liger_kernel": True, "batch_eval_metrics": True}}, "fail", "batch_eval_metrics"),
    ("arguments", {"train": {"average_tokens_across_devices": False}}, "fail", "average_tokens_across_devices=False"),
    ("arguments", {"train": {"learning_rate": "fast"}}, "fail", "'fast'"),
    ("evaluation", {"train": {"eval_strategy": "steps"}}, "fail", "eval_strategy=steps without eval_dataset"),
    ("evaluation", {"train": {"eval_dataset": "nowhere"}}, "warn", "nowhere"),
    ("seeds", {"train": {"data_seed": -1}}, "fail", "the samples' order is -1"),
    ("heads", {"train": {"ring_degree": 1, "ulysses_degree": 3}}, "fail", "does not divide the 4 query heads"),
    ("heads", {"train": {"ring_degree": 1, "ulysses_degree": 4}}, "warn", "K/V heads are replicated"),
    ("heads", {"train": {"cp_size": 4}}, "fail", "cp_size=4, but ring_degree=2"),
    ("weights", {"train": {"model_name_or_path": "Llama-3.1-8B"}}, "warn", "Llama-3.1-8B names sizes only"),
    ("weights", {"train": {"model_name_or_path": "hf_cp/planning/models/qwen3-8b.json"}}, "warn", "without weights"),
    ("weights", {"train": {"model_name_or_path": "docs"}}, "warn", "docs lacks model.safetensors"),
    ("weights", {"train": {"model_name_or_path": "outputs/no/model"}}, "warn", "not a folder here, nor a hub name"),
    ("weights", {"train": {"model_name_or_path": "meta-llama/Llama-3.1-8B"}}, "warn", "not in the cache"),
    ("attention kernel", {"train": {"kernel": "flash_attn"}}, "fail", "kernel='flash_attn'"),
    ("attention kernel", {"train": {"kernel": "eager"}}, "warn", "the slow reference"),
    ("positions", {"train": {"max_tokens": 512, "dataset": "nowhere"}}, "warn", "512 tokens, the model's context"),
    ("architecture", {"train": {"model_name_or_path": "nowhere"}}, "fail", "nowhere"),
    ("documents", {"train": {"max_tokens": 64}}, "fail", "Feature 0 has 70 tokens"),
    ("documents", {"train": {"max_tokens": 64, "overflow": "drop"}}, "warn", "2 dropped"),
    ("documents", {"train": {"dataset": "nowhere"}}, "warn", "made-up documents take their place"),
    ("documents", {"train": {"dataset": None}}, "skip", "made-up documents take their place"),
    ("checkpoint", {"train": {"output_dir": "nowhere"}}, "skip", "nowhere has none"),
    ("checkpoint", {"train": {"resume_from_checkpoint": "nowhere"}}, "fail", "nowhere is not a complete checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "status", "text"), WRONG)
def test_what_is_wrong_is_found(model, tmp_path, name, changes, status, text):
    result = check(name, "--recipe", write_recipe(tmp_path / "recipe", model, **changes))
    assert result.status == status and text in result.detail, result
    assert result.fix or status == "skip" or "Use " in result.detail or "remove" in result.detail  # what to change


@pytest.mark.parametrize("name", sorted({name for name, *_ in WRONG} - {"checkpoint", "evaluation"}))
def test_what_is_right_passes(model, tmp_path, name):
    assert check(name, "--recipe", write_recipe(tmp_path / "recipe", model)).status == "ok"


def test_what_a_start_needs_must_be_there_in_launched_processes(model, tmp_path, monkeypatch):
    """Elsewhere it is a warning, which the verdict names: the doctor may look at the recipe of another machine."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    absent = {"dataset": "nowhere", "eval_dataset": "nowhere", "model_name_or_path": "qwen2.5-1.5b"}
    recipe = write_recipe(tmp_path / "recipe", model, train=absent)
    for name in ("documents", "evaluation", "weights"):
        assert check(name, "--recipe", recipe).status == "warn"
        assert check(name, "--recipe", recipe, "--launch").status == "fail"
    assert "Qwen/Qwen2.5-1.5B-Instruct" in check("weights", "--recipe", recipe).fix
    status, out, _ = call("--recipe", recipe, "--ring-degree", "1")
    verdict = out.splitlines()[-1]
    assert status == 0 and verdict.startswith("PASSED: no check fails (") and "Not looked at: checkpoint" in verdict
    assert "Look first at: weights, documents" in verdict.replace("evaluation, ", "")


def test_weights(model, tmp_path):
    """A stand-in with sizes only does not hide what the run would load; of several files none may be absent."""
    recipe = write_recipe(tmp_path / "recipe", model)
    assert check("weights", "--recipe", recipe, "--model", "smollm2-135m").detail == f"weights are in {model}"
    assert check("weights", "--model", "smollm2-135m").status == "warn"
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "part-1.safetensors").write_text("")
    assert check("weights", "--model", tmp_path).detail == f"{tmp_path} lacks part-2.safetensors"
    (tmp_path / "part-2.safetensors").write_text("")
    assert check("weights", "--model", tmp_path).status == "ok"


def test_every_known_model_has_a_hub_name():
    assert sorted(HUB_NAMES) == known_models()
    assert check("heads", "--model", HUB_NAMES["smollm2-135m"]).detail.startswith("9 query and 3 K/V heads")


def test_a_stated_cp_size_shrinks_the_degrees(model, tmp_path):
    """As `hf-cp train` does it: `cp_size: 1` in a recipe with degrees is its fallback."""
    recipe = write_recipe(tmp_path / "recipe", model, train={"ring_degree": 2, "ulysses_degree": 1, "cp_size": 1})
    assert check("processes", "--recipe", recipe).detail.endswith("1 share a sample, dp 2")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"cp_size": 2}))
    options = ("--config", tmp_path / "train.yaml", "--model", "smollm2-135m")
    assert check("processes", *options).detail.endswith("2 share a sample, dp 1")


def test_keys_are_those_of_the_training_command(model, tmp_path):
    written = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
    given = {key: value for key, value in written.items() if isinstance(value, int | float | str)}
    assert check("keys", "--recipe", write_recipe(tmp_path / "all", model, train=given)).status == "ok"
    folder = write_recipe(tmp_path / "recipe", model, train={"learning_rat": 1.0, "own": 1})
    result = check("keys", "--config", folder / "train.yaml")  # it may be of a script with own arguments
    assert result.status == "warn" and result.detail == "unknown in train.yaml: learning_rat"


def test_the_environment_can_be_wrong(model, tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path / "recipe", model)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert "switches DeepSpeed off" in check("launcher", "--recipe", recipe).detail
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert "PARALLELISM_CONFIG_CP_SIZE=2" in check("accelerate's own parallelism", "--recipe", recipe).detail


def test_models(model, tmp_path):
    dropout = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(dropout))
    options = ("--model", tmp_path / "config.json", "--ring-degree", "2")
    assert check("attention dropout", *options).status == "fail"
    assert check("architecture", *options).status == "ok"  # one cause, one line
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}')
    found = check("architecture", "--model", tmp_path / "gpt2")
    assert found.status == "fail" and "'gpt2') is not supported" in found.detail
    assert "9 query and 3 K/V heads" in check("heads", "--model", "smollm2-135m").detail


def test_versions_are_compared_with_the_floors(model, tmp_path, monkeypatch):
    recipe, real = write_recipe(tmp_path / "recipe", model), metadata.version
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.13", 'deepspeed>=99.1; extra == "deepspeed"'])
    assert check("versions", "--recipe", recipe).fix == "pip install 'deepspeed>=99.1'"

    def version(name: str) -> str:
        if name == "deepspeed":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = check("versions", "--recipe", recipe)
    assert found.status == "fail" and "deepspeed missing" in found.detail


@pytest.mark.parametrize("wrong", ["lost target", "swapped tokens"])
def test_batches_that_are_not_the_sample_are_found(model, tmp_path, monkeypatch, wrong):
    original = collator_module.WholeSample.local_batch

    def broken(self, cp_rank, **kwargs):
        batch = original(self, cp_rank, **kwargs)
        if cp_rank == 1 and wrong == "lost target":
            batch["shift_labels"][0, int((batch["shift_labels"][0] >= 0).nonzero()[0])] = -100
        elif cp_rank == 1:
            batch["input_ids"] = batch["input_ids"].flip(1)
        return batch

    monkeypatch.setattr(collator_module.WholeSample, "local_batch", broken)
    found = check("batches", "--recipe", write_recipe(tmp_path / "recipe", model))
    assert found.status == "fail" and ("targets" if wrong == "lost target" else "input_ids") in found.detail


def write_checkpoint(folder: Path, **changes) -> Path:
    """As a run of the recipe would write it, with changes."""
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    config = dataclasses.asdict(ContextParallelConfig(ring_degree=2))
    fields = {"config": config, "world_size": 2, "dp_size": 1, "backend": "DEEPSPEED", "zero_stage": 2}
    fields |= {"samples_per_step": 2, "position": None, "versions": environment.versions()}
    CheckpointRecord(**fields | changes).save(folder)
    return folder


def test_checkpoints(model, tmp_path):
    recipe = write_recipe(tmp_path / "recipe", model)

    def found(folder: Path) -> Result:
        return check("checkpoint", "--recipe", recipe, "--checkpoint", folder)

    good = write_checkpoint(tmp_path / "run" / "checkpoint-4")
    assert found(good).status == "ok" and found(good.parent).status == "ok"
    other_world = found(write_checkpoint(tmp_path / "a" / "checkpoint-1", world_size=4, dp_size=2))
    assert other_world.status == "fail" and "4 parts, this run has 2" in other_world.detail
    assert "hf-cp universal" in other_world.fix
    other_rows = found(write_checkpoint(tmp_path / "b" / "checkpoint-1", samples_per_step=8))
    assert other_rows.status == "fail" and "had 8 samples, here it has 2" in other_rows.detail
    stage = found(write_checkpoint(tmp_path / "c" / "checkpoint-1", zero_stage=3))
    assert stage.status == "fail" and "ZeRO stage 3" in stage.detail
    train = yaml.safe_load((recipe / "train.yaml").read_text())
    for folder, status in ((good.parent, "ok"), (tmp_path / "a", "warn")):  # without a word, the one in output_dir
        (recipe / "train.yaml").write_text(yaml.safe_dump(train | {"output_dir": str(folder)}))
        unasked = check("checkpoint", "--recipe", recipe)
        assert unasked.status == status and str(folder) in unasked.detail + unasked.fix
    (recipe / "train.yaml").write_text(yaml.safe_dump(train))
    (good / "trainer_state.json").unlink()
    assert "complete" in found(good).detail

    subject = Subject(parse("--recipe", recipe))
    with as_one_process():
        position = position_of(subject)
    same = write_checkpoint(tmp_path / "d" / "checkpoint-1", position=position)
    assert "documents compared" in found(same).detail
    others = dataclasses.replace(position, data_digest="0" * 32)
    changed = found(write_checkpoint(tmp_path / "e" / "checkpoint-1", position=others))
    assert changed.status == "fail" and "data_digest was 000" in changed.detail


def test_proofs(model, tmp_path):
    recipe, path = write_recipe(tmp_path / "recipe", model), tmp_path / "verify.json"
    versions = metadata.version("torch")

    def found(
        *, days: float = 0, passed: bool = True, ring: int = 2, version: str = versions, of: str = str(model)
    ) -> Result:
        content = {"command": "verify", "model": of, "verdict": "V", "passed": passed}
        content["created"] = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
        content["report"] = {"ring_degree": ring, "ulysses_degree": 1}
        content["versions"] = {"torch": version}
        path.write_text(json.dumps(content))
        return check("proof", "--recipe", recipe, "--verify-report", path)

    assert (found(version=versions, days=3).status, "3 days old" in found(version=versions, days=3).detail) == (
        "ok",
        True,
    )
    assert found(version=versions, days=31).status == "warn"
    assert found(version=versions, passed=False).status == "fail"
    assert "ring_degree 4 -> 2" in found(version=versions, ring=4).detail
    assert "torch 1.0 ->" in found(version="1.0").detail
    other = found(of="other/model")
    assert other.status == "warn" and f"model other/model -> {model}" in other.detail
    assert found(of=str(model / "config.json")).status == "ok"
    path.rename(recipe / "verify.json")  # where it is found without a word
    assert check("proof", "--recipe", recipe).status == "ok"
    path.write_text("[]")
    assert check("proof", "--recipe", recipe, "--verify-report", path).status == "fail"


def test_verdicts_and_a_check_that_breaks():
    def broken(subject):
        raise KeyError("surprise")

    checks = [Check("G", "a", broken), Check("G", "b", lambda subject: warn("w", "f"))]
    results = examine(checks, None)
    assert results[0].status == "fail" and "KeyError: 'surprise'" in results[0].detail
    assert judge(results).status == 1 and "Fix first: a." in judge(results).text
    assert judge(results[1:]).status == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "nothing to look at"),
        (("--recipe", "nowhere"), "--recipe nowhere does not exist"),
        (("--recipe", "docs"), "no accelerate.yaml"),
        (("--model", "smollm2-135m", "--launch"), "--launch needs the processes of a launcher"),
        (("--model", "smollm2-135m", "--time-limit", "0"), "not a time"),
    ],
)
def test_wrong_use(options, text, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    status, out, err = call(*options)
    assert status == 2 and out == "" and text in err


RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/accelerate.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_of_the_package_have_no_fault(recipe, tmp_path, monkeypatch):
    """With the sizes of their models, which come with the package; made-up documents. The verdict says so."""
    monkeypatch.chdir(tmp_path)  # where none of the documents are
    options = ("--model", "smollm2-135m") if recipe.name == "quickstart-cpu" else ()  # its model is still to be made
    status, out, _ = call("--recipe", recipe, *options)
    assert status == 0 and " 0 fail)" in out and "needs what failed above" not in out, out
    assert re.search(r"Look first at: .*weights, .*documents", out.splitlines()[-1])
