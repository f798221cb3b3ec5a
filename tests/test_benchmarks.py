"""The benchmarks run: tiny sizes, no numbers are judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_gpu_check_on_the_cpu(tmp_path):
    output = tmp_path / "check.json"
    arguments = (
        "--device",
        "cpu",
        "--tokens",
        "128",
        "--time-tokens",
        "128",
        "--repeats",
        "1",
        "--output",
        str(output),
    )
    assert "144 of 144 checks passed." in run("gpu_check.py", *arguments)
    found = json.loads(output.read_text())
    assert len(found["checks"]) == 144 and found["times"]


@pytest.mark.distributed
def test_attention_benchmark(tmp_path):
    output = tmp_path / "attention"
    stdout = run("attention.py", "--tokens", "256", "--rounds", "2", "--output", str(output))
    assert "torch ring" in stdout
    assert json.loads(output.with_suffix(".json").read_text())["rows"]
    assert output.with_suffix(".png").stat().st_size > 1000
