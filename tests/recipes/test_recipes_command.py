"""`hf-cp recipes`, `hf-cp plan --write` and the document that strings them together: what they write is complete."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hf_cp.recipes import collection
from hf_cp.recipes.collection import write_files
from hf_cp.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
USP, FSDP2 = "h100x16-usp-lora-llama-3.1-8b-512k", "h100x8-fsdp2-lora-llama-3.1-8b-64k"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A user's folder, which is no clone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_names_every_folder_with_its_title(capsys):
    assert main(["recipes", "list"]) == 0
    text = capsys.readouterr().out
    assert main(["recipes", "ls"]) == 0 and capsys.readouterr().out == text
    folders = {path.name for path in (ROOT / "recipes").iterdir() if (path / "train.yaml").exists()}
    *lines, verdict = text.splitlines()
    assert {line.split()[0] for line in lines[2:]} == folders >= {"quickstart-cpu", USP}
    assert verdict.startswith(f"PASSED: {len(folders)} recipes")
    assert re.search(r"quickstart-cpu +LoRA on packed samples, two CPU processes, ZeRO-2\n", text)
    assert re.search(rf"{USP} +Llama-3.1-8B, LoRA, samples of 524,288 tokens", text)


def test_show_prints_a_file(capsys):
    assert main(["recipes", "show"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "README.md").read_text()
    assert main(["recipes", "show", USP]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / USP / "train.yaml").read_text()
    assert main(["recipes", "show", USP, "deepspeed.json"]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing"], r"There is no recipe 'nothing'. Choose one of .*quickstart-cpu"),
        (["copy", "../recipes", "new"], "There is no recipe"),
        (["show", USP, "../../setup.cfg"], r"has no file .* Choose one of .*train.yaml"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(words, message, capsys, elsewhere):
    assert main(["recipes", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["quickstart-cpu", USP, FSDP2])
def test_a_copy_leads_to_itself(name, elsewhere, capsys):
    assert main(["recipes", "copy", name, "my runs/first"]) == 0
    folder, start = elsewhere / "my runs" / "first", capsys.readouterr().out.splitlines()[-1].partition("then: ")[2]
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    for file, text in texts.items():
        assert file == "accelerate.yaml" or text == (ROOT / "recipes" / name / file).read_text()
    launch = load_config_from_file(str(folder / "accelerate.yaml"))
    shipped = load_config_from_file(str(ROOT / "recipes" / name / "accelerate.yaml"))
    if name != FSDP2:
        named = launch.deepspeed_config.pop("deepspeed_config_file")
        assert (elsewhere / named).samefile(folder / "deepspeed.json")
        del shipped.deepspeed_config["deepspeed_config_file"]
    assert launch.to_dict() == shipped.to_dict()
    assert subprocess.run(["bash", "-n"], input=start, text=True).returncode == 0
    words = shlex.split(start)
    assert ("--machine_rank" in words) == (name == USP) and words[-4:-1] == ["-m", "hf_cp", "train"]
    assert [(elsewhere / word).parent for word in words if word.endswith(".yaml")] == [folder, folder]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["recipes", "copy", name, "my runs/first"]) == 2
    assert "already. Give another folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_package_that_was_copied_by_hand_says_so(tmp_path, monkeypatch):
    (tmp_path / "hf_cp").mkdir()
    monkeypatch.setattr(collection, "files", lambda name: tmp_path / name)
    with pytest.raises(FileNotFoundError, match="(?s)not installed.*pip install"):
        collection.list_recipes()


def test_a_folder_that_is_in_use_is_left_alone(tmp_path):
    (tmp_path / "train.yaml").write_text("mine")
    with pytest.raises(FileExistsError, match=r"has train.yaml already"):
        write_files(tmp_path, {"a.yaml": "new", "train.yaml": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["train.yaml"]
    assert (tmp_path / "train.yaml").read_text() == "mine"


# hf-cp plan --write


PLAN = ["plan", "llama-3.1-8b", "--seq-len", "65536", "--gpus", "16", "--cp", "16", "--gpus-per-node", "4"]


def test_a_written_plan_is_a_complete_recipe(elsewhere, capsys):
    options = ["--lora", "8", "--optimizer-offload", "--checkpointing", "offload", "--mlp-chunk-tokens", "4096"]
    assert main([*PLAN, *options, "--write", "runs/new"]) == 0
    printed, folder = capsys.readouterr().out, elsewhere / "runs" / "new"
    names = {"accelerate.yaml", "deepspeed.json", "train.yaml"}
    assert {path.name for path in folder.iterdir()} == names
    training = yaml.safe_load((folder / "train.yaml").read_text())
    found = re.search(r"ring_degree=(\d+), ulysses_degree=(\d+)", printed)
    assert (training["ring_degree"], training["ulysses_degree"]) == tuple(int(n) for n in found.groups()) == (4, 4)
    assert (training["lora_r"], training["mlp_chunk_tokens"], training["max_tokens"]) == (8, 4096, 65_536)
    assert training["activation_checkpointing_kwargs"] == {"use_reentrant": False, "offload": True}
    zero = json.loads((folder / "deepspeed.json").read_text())["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_optimizer"]["device"] == "cpu"
    launch = load_config_from_file(str(folder / "accelerate.yaml"))
    assert (launch.num_machines, launch.num_processes) == (4, 16)
    start = shlex.split(printed.splitlines()[-1].partition("Start: ")[2])
    assert "--machine_rank" in start and start[-1] == "runs/new/train.yaml"
    assert launch.deepspeed_config["deepspeed_config_file"] == "runs/new/deepspeed.json"
    # The command in train.yaml gives the same plan.
    text = (folder / "train.yaml").read_text()
    command = next(line for line in text.splitlines() if "hf-cp plan" in line).partition("hf-cp ")[2]
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed.replace(printed.splitlines()[-1] + "\n", "")
    assert main([*PLAN, "--write", "runs/new"]) == 2  # a folder in use
    assert training["model_name_or_path"] == "meta-llama/Llama-3.1-8B" and "Set dataset in its train.yaml" in printed


def test_a_written_plan_takes_your_model_and_documents(elsewhere, capsys):
    """A config.json stands for its folder; then there is nothing left to fill in."""
    (elsewhere / "my model").mkdir()
    config = elsewhere / "my model" / "config.json"
    config.write_text((ROOT / "hf_cp" / "planning" / "models" / "smollm2-135m.json").read_text())
    options = ["--seq-len", "8192", "--gpus", "16", "--cp", "16", "--write", "runs/mine", "--data", "my data.jsonl"]
    assert main(["plan", "my model/config.json", *options]) == 0
    training = yaml.safe_load(Path("runs/mine/train.yaml").read_text())
    assert (training["model_name_or_path"], training["dataset"]) == ("my model", "my data.jsonl")
    assert "Set dataset" not in capsys.readouterr().out.splitlines()[-1]


def test_nothing_is_written_where_nothing_fits(elsewhere, capsys):
    assert main(["plan", "llama-3.1-70b", "--seq-len", "8192", "--gpus", "1", "--write", "new"]) == 1
    assert "nothing fits" in capsys.readouterr().out and not (elsewhere / "new").exists()


# The document


def blocks(text: str) -> list[tuple[str, str]]:
    """Command and output of every block that starts with `$ `."""
    found = re.findall(r"```\n\$ (.*?)\n(.*?)```", text, flags=re.DOTALL)
    return [(command, output) for command, output in found]


def test_the_first_recipe_in_five_commands(elsewhere, capsys):
    """Each command of docs/first-recipe.md, in another folder: it works, and prints what the document shows."""
    commands = blocks((ROOT / "docs" / "first-recipe.md").read_text())
    assert len(commands) == 5 and commands[0][0].startswith("pip install")
    for command, output in commands[1:]:
        program, *words = shlex.split(command)
        assert program == "hf-cp" and main(words) == 0
        printed = capsys.readouterr().out
        if words[0] == "doctor":  # it looks at the machine
            assert "PASSED: no check fails (" in printed and "weights, documents" in printed.splitlines()[-1]
        else:
            assert printed == output
    assert (elsewhere / "runs" / "llama-128k" / "train.yaml").exists()
