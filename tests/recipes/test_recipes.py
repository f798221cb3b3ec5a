"""Every recipe is read by those who will read it; the quickstart runs, scaled down, with its own script and files."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from deepspeed.runtime import constants as deepspeed_keys
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_cp.config import ContextParallelConfig
from hf_cp.data.manifest import PackingManifest
from hf_cp.models.rope import set_rope_parameters
from hf_cp.planning.model_names import loadable_name
from hf_cp.recipes import train
from hf_cp.recipes.settings import parse_settings
from hf_cp.recipes.writer import recipe_files
from hf_cp.tools.cli import command_parser
from hf_cp.tools.cli import main as hf_cp
from hf_cp.tools.plan import command_line, make_plan
from hf_cp.training.deepspeed import ZERO_STAGES, complete_zero_config
from tests.examples.launch import ROOT, Finished, accelerate_launch
from tests.examples.tiny_quickstart import write_quickstart

RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/train.yaml"))
QUICKSTART = ROOT / "recipes" / "quickstart-cpu"
SUMMARY_KEYS = (
    "cp_size",
    "ring_degree",
    "ulysses_degree",
    "zero_stage",
    "tokens_per_row",
    "loss_first_step_cp1",
    "loss_first_step_cpN",
    "grad_norm_cp1",
    "grad_norm_cpN",
    "worst_gradient_relative_error",
    "eval_loss_before",
    "eval_loss_after",
    "eval_loss_drop_stderr",
    "seconds_per_step",
    "peak_memory_gib",
)

README = (ROOT / "recipes" / "README.md").read_text()
USP, FSDP2 = "h100x16-usp-lora-llama-3.1-8b-512k", "h100x8-fsdp2-lora-llama-3.1-8b-64k"
OWN_KEYS = {USP: {"rope_parameters"}, FSDP2: {"expected_zero_stage"}}  # written by hand, left out by hand
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """TrainingArguments writes settings for accelerate into the environment."""
    monkeypatch.setattr("os.environ", os.environ.copy())


def read_training(recipe: Path):
    """As on a machine without GPU, where transformers takes bf16 only with use_cpu."""
    return parse_settings([str(recipe / "train.yaml"), "--use_cpu", "true"])


# Each file is read by its reader


@every_recipe
def test_folder_is_complete(recipe):
    names = {path.name for path in recipe.iterdir()}
    is_fsdp = load_config_from_file(str(recipe / "accelerate.yaml")).fsdp_config
    expected = {"accelerate.yaml", "train.yaml"} | (set() if is_fsdp else {"deepspeed.json"})
    assert names - {"__pycache__"} == expected | ({"prepare.py"} if recipe == QUICKSTART else set())


@every_recipe
def test_accelerate_file(recipe):
    config = load_config_from_file(str(recipe / "accelerate.yaml"))  # refuses keys that accelerate does not know
    assert isinstance(config, ClusterConfig)
    if config.fsdp_config is None:  # paths are relative to the root of the clone
        named = config.deepspeed_config["deepspeed_config_file"]
        assert (ROOT / named).resolve() == (recipe / "deepspeed.json").resolve() and not Path(named).is_absolute()
    settings, degrees, _ = read_training(recipe)
    assert settings.expected_processes == config.num_processes
    assert config.num_processes % (settings.cp_size or degrees.cp_size) == 0


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "fsdp2" not in path.name], ids=lambda path: path.name)
def test_deepspeed_file(recipe):
    config = json.loads((recipe / "deepspeed.json").read_text())
    known = {value for value in vars(deepspeed_keys).values() if isinstance(value, str)}
    assert set(config) <= known | {"zero_optimization"}, "DeepSpeed ignores keys that it does not know"
    settings, _, args = read_training(recipe)
    assert config["zero_optimization"]["stage"] == settings.expected_zero_stage in ZERO_STAGES
    assert config["gradient_clipping"] == args.max_grad_norm
    assert config["communication_data_type"] == "fp32"
    clipping = config["gradient_clipping"]
    # Nothing is left to DeepSpeed's defaults: only the "auto" of the micro batch is filled in.
    added = complete_zero_config(config, micro_batch_size=1, gradient_clipping=clipping)
    assert added == ["train_micro_batch_size_per_gpu=1"]


@every_recipe
def test_training_file(recipe):
    settings, degrees, args = read_training(recipe)
    assert args.per_device_train_batch_size == 1
    assert settings.proof_tokens <= settings.max_tokens
    for key, value in yaml.safe_load((recipe / "train.yaml").read_text()).items():
        owner = next(group for group in (settings, degrees, args) if hasattr(group, key))
        found = getattr(owner, key)
        read_as = {"report_to": []}.get(key, value)  # "none"
        assert found == read_as or str(found) == str(read_as), key


@pytest.mark.parametrize("name", [path.name for path in RECIPES if path.name.startswith("h100")])
def test_gpu_recipes_are_what_their_plans_give(name):
    """The command in the second line gives these files, but for the keys and the launcher that are chosen by hand."""
    folder, own = ROOT / "recipes" / name, OWN_KEYS.get(name, set())
    found = {path.name: path.read_text() for path in folder.iterdir()}
    title, command = [line.removeprefix("# ") for line in found["train.yaml"].splitlines()[:2]]
    command = command.removeprefix("The first choice of: ")
    args = command_parser("plan").parse_args(shlex.split(command)[2:])
    names = {"model_name_or_path": loadable_name(args.model), "dataset": "data/train.jsonl"}
    plan = make_plan(args)
    written = recipe_files(Path("recipes") / name, plan, title=title, command=command_line(args), names=names)
    if name == FSDP2:
        written = {"train.yaml": written["train.yaml"]}
        del found["accelerate.yaml"]
    assert {file: without(own, text) for file, text in found.items()} == {
        file: without(own, text) for file, text in written.items()
    }
    assert own <= {line.partition(":")[0] for text in (found, written) for line in text["train.yaml"].splitlines()}


def without(keys: set[str], text: str) -> list[str]:
    return [line for line in text.splitlines() if line.partition(":")[0] not in keys]


# The README of all


@every_recipe
def test_the_table_has_the_numbers_of_every_recipe(recipe):
    (line,) = [
        line for line in README.splitlines() if line.startswith(f"| [`{recipe.name}`]({recipe.name}/train.yaml)")
    ]
    _, _, processes, shared, samples, trained, _ = [cell.strip() for cell in line.split("|")]
    settings, degrees, _ = read_training(recipe)
    machines = load_config_from_file(str(recipe / "accelerate.yaml")).num_machines
    assert int(processes.split()[0]) == settings.expected_processes
    assert (f"on {machines} nodes" in processes) == (machines > 1)
    cp_size = settings.cp_size or degrees.cp_size
    ring = f"ring {degrees.ring_degree} x " if degrees.ring_degree > 1 else ""
    assert shared.startswith(f"{cp_size}, by the heads") or shared == f"{ring}Ulysses {degrees.ulysses_degree}"
    assert int(samples) == settings.expected_processes // cp_size
    assert trained == ("adapters" if settings.lora_r else "all")


def shell_blocks() -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not language]


def test_lines_for_the_shell_can_be_read():
    """Also what a SLURM job runs inside quotes."""
    blocks = shell_blocks()
    inner = re.findall(r"bash -c '(.*?)'", README, flags=re.DOTALL)
    assert len(blocks) > 4 and len(inner) == 1
    for text in [*blocks, *inner]:
        read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (read.returncode, read.stderr) == (0, ""), text
    folders = re.findall(r"^export R=(\S+)", README, flags=re.MULTILINE)
    assert len(folders) == 3 and all((ROOT / folder / "train.yaml").exists() for folder in folders)


def test_commands_of_the_readme_are_understood():
    lines = [line.strip(" '") for block in shell_blocks() for line in block.replace("\\\n", " ").splitlines()]
    found = [re.match(r"hf-cp (.*)|(?:torchrun|accelerate launch) .* -m hf_cp (.*)", line) for line in lines]
    commands = [shlex.split(match[1] or match[2]) for match in found if match]
    assert {"doctor", "pack", "verify", "train"} == {words[0] for words in commands}
    for words in commands:
        command_parser(words[0]).parse_args(words[1:])


# Settings


def test_a_key_that_nobody_reads_is_refused(tmp_path):
    text = (QUICKSTART / "train.yaml").read_text().replace("max_tokens:", "max_token:")
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(ValueError, match="max_token"):
        read_training(tmp_path)


def test_command_line_wins():
    settings, degrees, args = parse_settings(
        [str(QUICKSTART / "train.yaml"), "--max_steps", "3", "--lora_r", "2", "--ring_degree", "2", "--bf16", "false"]
    )
    assert (settings.lora_r, degrees.ring_degree, args.max_steps, args.bf16) == (2, 2, 3, False)


def test_quickstart_keeps_the_settings_that_were_measured():
    settings, _, args = read_training(QUICKSTART)
    assert (settings.lora_r, settings.lora_alpha, settings.lora_dropout, settings.max_tokens) == (16, 32, 0.0, 4096)
    assert (args.learning_rate, args.max_steps, args.warmup_steps, args.bf16) == (2e-3, 8, 0, True)
    assert args.lr_scheduler_type == "linear" and args.gradient_accumulation_steps == 1
    assert settings.required_drop_stderr == 3.0


# YaRN, scaled down: settings of the recipe, a tiny model of its family, documents of twice its context


def yarn_model(folder: Path, *recipe: str) -> tuple[torch.nn.Module, AutoConfig]:
    """The model that the script builds from a saved one with a context of 64, and its config."""
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    settings, _, args = parse_settings([*recipe, "--use_cpu", "true", "--model_name_or_path", str(folder)])
    model_config = AutoConfig.from_pretrained(folder)
    if settings.rope_parameters is not None:
        set_rope_parameters(model_config, settings.rope_parameters)
    return train.build_model(settings, model_config, ContextParallelConfig(force=True), args), model_config


def test_yarn_reaches_the_model_and_is_saved_with_the_adapter(tmp_path):
    rope = '{"rope_type": "yarn", "factor": 4.0}'
    recipe = [str(ROOT / "recipes" / "yarn-extension" / "train.yaml"), "--model_dtype", "float32"]
    model, config = yarn_model(tmp_path / "base", *recipe, "--rope_parameters", rope)
    assert config.max_position_embeddings == 256
    assert config.rope_parameters == {
        "rope_theta": 1e6, "original_max_position_embeddings": 64, "rope_type": "yarn", "factor": 4.0
    }  # fmt: skip
    rotary = model.get_base_model().model.rotary_emb
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.equal(rotary.inv_freq, expected) and attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    plain = 1e6 ** -(torch.arange(0, 8, 2) / 8)
    assert rotary.inv_freq[0] == plain[0] and rotary.inv_freq[-1] == pytest.approx(float(plain[-1]) / 4)
    model.get_base_model().config.save_pretrained(tmp_path / "out")  # what the script leaves
    again = AutoConfig.from_pretrained(tmp_path / "out")
    assert again.rope_parameters == config.rope_parameters and again.max_position_embeddings == 256


def test_the_recipe_states_the_context_of_its_model():
    settings, _, _ = read_training(ROOT / "recipes" / "yarn-extension")
    rope = settings.rope_parameters
    assert rope["factor"] * rope["original_max_position_embeddings"] == settings.max_tokens == 131_072


@pytest.mark.parametrize(
    "rope", [{"factor": 4.0}, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 0.5}], ids=str
)
def test_incomplete_rope_parameters_are_refused(rope):
    with pytest.raises(ValueError, match="needs a rope_type and a factor"):
        set_rope_parameters(Qwen2Config(), rope)
    with pytest.raises(ValueError, match="low_freq_factor"):
        set_rope_parameters(Qwen2Config(), {"rope_type": "llama3", "factor": 2.0})


# The quickstart, scaled down


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory, deepspeed_extension) -> tuple[Path, list[str], Finished]:
    folder = tmp_path_factory.mktemp("quickstart")
    options = write_quickstart(folder)
    return folder, options, launch([*options, "--record_dir", str(folder / "record"), "--profile_steps", "2", "3"])


def launch(options: list[str]) -> Finished:
    """What `make quickstart` runs, with other options."""
    words = ("-m", "hf_cp", "train", str(QUICKSTART / "train.yaml"), *options)
    return accelerate_launch(QUICKSTART / "accelerate.yaml", *words, timeout=500)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600, func_only=False)
def test_quickstart_runs(quickstart):
    folder, _, finished = quickstart
    assert finished.status == 0, finished.output
    assert finished.output.count("PASSED") == 2  # the proof and the result
    started = "2 processes (DEEPSPEED ZeRO-2), 2 share a sample of up to 256 tokens: ring 2 x Ulysses 1"
    assert started in finished.output
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert set(SUMMARY_KEYS) <= set(summary)
    assert (summary["cp_size"], summary["ring_degree"], summary["ulysses_degree"]) == (2, 2, 1)
    assert (summary["zero_stage"], summary["tokens_per_row"], summary["processes"]) == (2, 256, 2)
    assert summary["loss_first_step_cpN"] == pytest.approx(summary["loss_first_step_cp1"], rel=1e-5)
    assert summary["grad_norm_cpN"] == pytest.approx(summary["grad_norm_cp1"], rel=1e-4)
    assert 0 < summary["worst_gradient_relative_error"] < 1e-4
    assert summary["proof"]["num_parameters"] == 28 and len(summary["proof"]["document_lengths"]) > 1
    drop = summary["eval_loss_before"] - summary["eval_loss_after"]
    assert drop >= 3 * summary["eval_loss_drop_stderr"] > 0
    assert abs(summary["eval_loss_before"] - math.log(257)) < 0.5  # an untrained model's loss
    assert len(summary["peak_memory_gib"]) == 2 and all(0.1 < gib < 4 for gib in summary["peak_memory_gib"])
    assert summary["steps"] == 6 and 0 < summary["seconds_per_step"] < 60


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600, func_only=False)
def test_quickstart_leaves_complete_files(quickstart):
    folder, _, finished = quickstart
    assert finished.status == 0, finished.output
    out = folder / "out"
    adapter = load_file(out / "adapter_model.safetensors")
    assert len(adapter) == 28 and all(tensor.numel() and tensor.any() for tensor in adapter.values())
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    manifest = PackingManifest.load(out / "packing_manifest.json")
    assert len(manifest.lengths) == 16 and max(manifest.sample_tokens) <= 256
    assert (out / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("*.tmp")) and not list(out.glob("checkpoint-*"))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600, func_only=False)
def test_quickstart_records_for_the_report(quickstart, capsys):
    folder, _, finished = quickstart
    assert finished.status == 0, finished.output
    assert hf_cp(["report", str(folder / "record"), "--no-plot", "--json", "-"]) in (0, 1)  # 1: a rank was slow
    found = json.loads(capsys.readouterr().out)
    assert (len(found["ranks"]), found["first_step"], found["last_step"]) == (2, 2, 6)
    assert found["tokens_per_second"] > 0 and "ring 2" in found["run"]
    assert sorted(path.name for path in (folder / "record").glob("trace*")) == [
        "trace_step2_rank0.json",
        "trace_step2_rank1.json",
    ]


@pytest.fixture
def small(tmp_path, monkeypatch) -> list[str]:
    """The scaled quickstart for one process in here, which is not the launch that the recipe expects."""
    monkeypatch.setattr(train, "check_processes", lambda *args: None)
    return [str(QUICKSTART / "train.yaml"), *write_quickstart(tmp_path)]


def test_a_result_that_is_not_reached_fails(small, tmp_path, capsys):
    small += "--cp_size 1 --learning_rate 0 --bf16 false --use_cpu true --save_strategy steps --save_steps 1".split()
    trainer, settings = train.set_up([*small, "--max_steps", "1"])
    assert train.run(trainer, settings) == 1
    printed = capsys.readouterr().out
    assert "FAILED: held-out loss" in printed and "Proof: left out" in printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_loss_before"] == summary["eval_loss_after"] and summary["loss_first_step_cp1"] is None
    # and it goes on from its last checkpoint if asked to
    trainer, settings = train.set_up([*small, "--max_steps", "2", "--resume_from_checkpoint", "true"])
    assert train.run(trainer, settings) == 1
    printed = capsys.readouterr().out
    assert "step 1: loss" in printed and "step 2: loss" in printed and "step 0: loss" not in printed


def test_ulysses_2_is_refused_with_the_reason_and_nothing_is_written(small, tmp_path):
    with pytest.raises(ValueError, match=r"ulysses_degree=2 does not divide the 3 query heads \(K/V heads: 1\)"):
        train.set_up([*small, "--ulysses_degree", "2"])
    assert not (tmp_path / "out").exists()
