"""`hf-cp recipes`, `hf-cp plan --write` and the document that strings them together: what they write is complete."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hf_cp.recipes.writer import write_files
from hf_cp.tools import recipes
from hf_cp.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
USP = "h100x16-usp-lora-llama-3.1-8b-512k"


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
    assert re.search(r"quickstart-cpu +LoRA on packed rows, two CPU processes, ZeRO-2\n", text)
    assert re.search(rf"{USP} +Llama-3.1-8B, LoRA, rows of 524,288 tokens", text)


def test_show_prints_a_file(capsys):
    assert main(["recipes", "show", USP]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / USP / "README.md").read_text()
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


@pytest.mark.parametrize("name", ["quickstart-cpu", USP])
def test_a_copy_leads_to_itself(name, elsewhere, capsys):
    assert main(["recipes", "copy", name, "my runs/first"]) == 0
    folder = elsewhere / "my runs" / "first"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts["finetune.py"] == (ROOT / "examples" / "finetune.py").read_text()
    assert ("prepare_quickstart.py" in texts) == (name == "quickstart-cpu")
    launch = load_config_from_file(str(folder / "accelerate.yaml"))
    assert (elsewhere / launch.deepspeed_config["deepspeed_config_file"]).samefile(folder / "deepspeed.json")
    for command in (texts["README.md"].partition("## The plan")[0], *slurm_scripts(texts["README.md"])):
        blocks_of_it = re.findall(r"^```\n(.*?)^```", command, flags=re.DOTALL | re.MULTILINE) or [command]
        assert all(subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0 for block in blocks_of_it)
    words = shlex.split(launch_line(texts["README.md"]))
    named = [word for word in words if word.endswith((".py", ".yaml"))]
    assert len(named) == 3 and all((elsewhere / path).is_file() for path in named)
    for file in ("accelerate.yaml", "train.yaml", "README.md"):
        assert f"recipes/{name}" not in texts[file] and "examples/" not in texts[file]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["recipes", "copy", name, "my runs/first"]) == 2
    assert "already. Give another folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def slurm_scripts(readme: str) -> list[str]:
    """What `srun ... bash -c` would run, unquoted by a shell."""
    found = re.findall(r"^srun .*? (bash -c '.*?')$", readme, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(command)[2] for command in found]


def launch_line(readme: str) -> str:
    """The first `accelerate launch` of a README."""
    text = readme.replace("\\\n", " ")
    return next(line for line in text.splitlines() if line.startswith("accelerate launch"))


def test_recipes_are_found_where_pip_has_put_them(tmp_path, monkeypatch):
    """An installed package: the module lies in a folder without recipes, the record of its files leads to them."""
    packages, share = tmp_path / "lib" / "site-packages", tmp_path / "share" / "hf_cp"
    (packages / "hf_cp" / "tools").mkdir(parents=True)
    (packages / "recipes").mkdir()  # somebody else's
    copied = ["recipes/quickstart-cpu/train.yaml", "recipes/quickstart-cpu/README.md"]
    for file in [*copied, *(f"examples/{script}" for script in recipes.SCRIPTS)]:
        (share / file).parent.mkdir(parents=True, exist_ok=True)
        (share / file).write_text((ROOT / file).read_text())
    info = packages / "hf_cp-0.dist-info"
    info.mkdir()
    record = ["hf_cp/tools/recipes.py,,", "../../share/hf_cp/recipes/quickstart-cpu/train.yaml,,"]
    (info / "RECORD").write_text("\n".join(record) + "\n")
    monkeypatch.setattr(recipes, "__file__", str(packages / "hf_cp" / "tools" / "recipes.py"))
    monkeypatch.setattr(recipes, "distribution", lambda name: PathDistribution(info))
    assert recipes.data_root() == share
    recipes.copy_recipe("quickstart-cpu", tmp_path / "copy")
    assert (tmp_path / "copy" / "finetune.py").exists()

    (info / "RECORD").write_text(record[0] + "\n")
    with pytest.raises(FileNotFoundError, match="(?s)not installed.*pip install"):
        recipes.data_root()


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
    names = {"README.md", "accelerate.yaml", "deepspeed.json", "train.yaml", "finetune.py"}
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
    assert "--machine_rank" in launch_line((folder / "README.md").read_text())
    # The command in the README gives the table in the README.
    readme = (folder / "README.md").read_text()
    command = next(line for line in readme.splitlines() if line.startswith("$ hf-cp plan"))
    assert main(shlex.split(command)[2:]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[-1] in readme and again == printed.replace(printed.splitlines()[-1] + "\n", "")
    assert main([*PLAN, "--write", "runs/new"]) == 2  # a folder in use
    assert training["model_name_or_path"] == "meta-llama/Llama-3.1-8B" and "Set `dataset`" in readme
    assert re.search(r"pack --data \S+ --tokenizer meta-llama/Llama-3.1-8B ", readme)


def test_a_written_plan_takes_your_model_and_documents(elsewhere, capsys):
    """A config.json stands for its folder; then there is nothing left to fill in."""
    (elsewhere / "my model").mkdir()
    config = elsewhere / "my model" / "config.json"
    config.write_text((ROOT / "hf_cp" / "planning" / "models" / "smollm2-135m.json").read_text())
    options = ["--seq-len", "8192", "--gpus", "16", "--cp", "16", "--write", "runs/mine", "--data", "my data.jsonl"]
    assert main(["plan", "my model/config.json", *options]) == 0
    training = yaml.safe_load(Path("runs/mine/train.yaml").read_text())
    assert (training["model_name_or_path"], training["dataset"]) == ("my model", "my data.jsonl")
    readme = Path("runs/mine/README.md").read_text()
    assert "Set `dataset`" not in readme and "first." not in capsys.readouterr().out.splitlines()[-1]
    lines = readme.replace("\\\n", " ").splitlines()
    verify = shlex.split(next(line for line in lines if "hf_cp verify" in line))
    assert verify[verify.index("--model") + 1] == "my model" and verify[verify.index("--data") + 1] == "my data.jsonl"
    assert verify[-2:] == ["--output", "runs/mine/verify.json"]
    assert main(["plan", "smollm2-135m", "--seq-len", "8192", "--gpus", "2", "--write", "it's"]) == 2
    assert "single quote" in capsys.readouterr().err and not Path("it's").exists()


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
