"""The two training examples run as their first lines say, and two processes print the losses of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.launch import Finished, accelerate_forked, forked, together

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.usefixtures("deepspeed_extension")]


def zero2(script: str) -> Finished:
    """The `accelerate launch` line of the examples."""
    options = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return accelerate_forked([*options, "--use_deepspeed", "--zero_stage", "2"], script, processes=2)


def numbers(finished: Finished, pattern: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, finished.output)]
    assert found, finished.output[-4000:]
    return found


@pytest.mark.fast  # the only one with DeepSpeed
def test_accelerate_loop():
    pattern = r"step \d+: loss (\d+\.\d+) over"
    one, finished = together(
        lambda: forked("accelerate_loop.py", "--ring_degree", "1"), lambda: zero2("accelerate_loop.py")
    )
    expected = numbers(one, pattern)
    assert len(expected) > 2 and expected[-1] < expected[0]
    assert numbers(finished, pattern) == pytest.approx(expected, abs=3e-5)
    assert "DEEPSPEED, ContextParallelMesh(dp=1 x ring=2 x ulysses=1" in finished.output


def test_trainer(tmp_path: Path):
    pattern = r"evaluation loss (\d+\.\d+) -> \d"
    last = r"evaluation loss \d+\.\d+ -> (\d+\.\d+)"
    options = ["--max_steps", "3", "--output_dir"]
    one, finished = together(
        lambda: forked("trainer.py", "--ring_degree", "1", *options, str(tmp_path / "one")),
        lambda: forked("trainer.py", *options, str(tmp_path / "two"), processes=2),
    )
    assert numbers(finished, pattern) == pytest.approx(numbers(one, pattern), abs=2e-4)
    assert numbers(finished, last) == pytest.approx(numbers(one, last), abs=2e-3)
    assert numbers(finished, last) < numbers(finished, pattern)
    assert "MULTI_CPU, ContextParallelMesh(dp=1 x ring=2 x ulysses=1" in finished.output
    for run_of, split in ((one, "dp 1 x ring 1"), (finished, "dp 1 x ring 2")):  # nobody has set a log level
        assert run_of.output.count("hf_cp: ") == run_of.output.count(f"hf_cp: {split} x ulysses 1 | layout ") == 1
    assert (tmp_path / "one" / "model.safetensors").exists() and (tmp_path / "two" / "model.safetensors").exists()
