"""Every command takes `--json -`: standard output is then one JSON document alone; otherwise there is one verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cp.tools import universal
from hf_cp.tools.cli import COMMANDS, main
from tests.tools.recipe_files import write_model
from tests.tools.test_run_report import run_of, step, write_run

ROOT = Path(__file__).resolve().parents[2]
PROOF = "--random-lengths 20,9 --force --steps 1"
CASES = {
    "bench": ["bench --quick --rows single --seq-lens 64 --rounds 1"],
    "doctor": ["doctor --model model"],
    "env": ["env"],
    "pack": ["pack --data model/train.jsonl --max-tokens 128 --cp 2"],
    "plan": ["plan smollm2-135m --seq-len 4096 --gpus 2", "plan smollm2-135m --seq-len 4096 --gpus 2 --write new"],
    "recipes": ["recipes list", "recipes show quickstart-cpu", "recipes copy quickstart-cpu new"],
    "report": ["report run --no-plot"],
    "universal": ["universal checkpoint"],
    "verify": [f"verify --model model {PROOF}"],
}
LINES = [line for lines in CASES.values() for line in lines]


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> Path:
    """A model, documents, a recorded run, and a conversion of checkpoints that prints to standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", os.environ.copy())
    write_model(tmp_path / "model")
    write_run(tmp_path / "run", run_of(step()))
    monkeypatch.setattr(universal, "make_universal", lambda *args, **kwargs: print("Converting") or Path("converted"))
    return tmp_path


def test_every_command_has_a_case():
    assert set(CASES) == set(COMMANDS) - {"train"}  # it leaves a summary.json


@pytest.mark.parametrize("line", LINES)
def test_json_has_standard_output_to_itself(line, inputs, capsys):
    status = main([*line.split(), "--json", "-"])
    document = json.loads(capsys.readouterr().out)
    assert status in (0, 1) and isinstance(document, dict) and document


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[0] in ("env", "recipes", "universal")])
def test_json_goes_to_a_file_and_one_verdict_is_printed(line, inputs, capsys):
    assert main([*line.split(), "--json", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())
    printed = capsys.readouterr()
    shown = printed.err if "show" in line or line == "env" else printed.out  # else standard output is one file
    assert shown.count("PASSED: ") == 1
    assert main(["recipes", "show", "nothing"]) == 2 and "REFUSED: " in capsys.readouterr().err


def test_a_reader_that_has_enough_is_not_an_error():
    """`hf-cp recipes list | head -0`: no traceback. The reader is gone before the first line is written."""
    command = ["bash", "-c", f"{sys.executable} -m hf_cp recipes list | true"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in ended.stderr and "BrokenPipe" not in ended.stderr, ended.stderr
