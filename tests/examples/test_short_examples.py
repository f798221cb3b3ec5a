"""The short examples run as their docstrings say, and show what they claim."""

from __future__ import annotations

import json
import re

import pytest
from safetensors.torch import load_file

from tests.examples.launch import EXAMPLES, forked, together

LOSS = re.compile(r"step \d+: loss ([\d.]+)")
SHORT = ("lora_merge.py", "one_line_patch.py")


@pytest.mark.parametrize("script", SHORT)
def test_is_short(script):
    assert len((EXAMPLES / script).read_text().splitlines()) < 120


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_line_patch_prints_the_losses_of_one_process():
    finished = together(
        lambda: forked("one_line_patch.py", "--ring_degree", "1"),
        lambda: forked("one_line_patch.py", processes=2),
    )
    assert [f.status for f in finished] == [0, 0], [f.output for f in finished]
    one, split = [[float(loss) for loss in LOSS.findall(f.output)] for f in finished]
    assert len(one) == 5 and one[-1] < one[0] - 0.1
    assert split == pytest.approx(one, abs=5e-6)  # six printed decimals


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lora_merge(tmp_path):
    finished = forked("lora_merge.py", "--output_dir", str(tmp_path), processes=2)
    assert finished.status == 0, finished.output
    difference = float(re.search(r"differ from the adapter's by (\S+)", finished.output).group(1))
    change = float(re.search(r"adapter changes logits by up to (\S+)", finished.output).group(1))
    assert difference < 1e-5 and change > 0.1  # the merge is the adapter, and the adapter is not nothing
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 28 and all(tensor.numel() and tensor.any() for tensor in adapter.values())
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert (tmp_path / "merged" / "model.safetensors").exists()
