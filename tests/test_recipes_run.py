"""Every recipe for GPUs runs on four CPU processes, scaled down: with its own files, as it is and against whole rows.

One launch for all of them, by two launchers in place of two nodes, with the options of the recipes' READMEs.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.examples.launch import ROOT, Finished, build_deepspeed_extension, free_port, run
from tests.examples.scaled_recipes import scaled_degrees, write_scaled

TWO_NODES = "h100x16-usp-lora-llama-3.1-8b-512k"
COMPARED = (TWO_NODES, "h100x8-zero3-llama-3.1-8b-128k", "h100x8-fsdp2-lora-llama-3.1-8b-64k")  # others: same paths
NAMES = [TWO_NODES, *sorted(path.name for path in (ROOT / "recipes").glob("h100*") if path.name != TWO_NODES)]

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(500, func_only=False)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[Finished]]:
    """The folder with what all recipes left, and the output of both launchers."""
    build_deepspeed_extension()
    folder = tmp_path_factory.mktemp("recipes")
    for name in NAMES:
        write_scaled(name, folder)
    port = str(free_port())

    def launch(node: int) -> Finished:
        head = ["--machine_rank", str(node), "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        config = ["--config_file", str(folder / TWO_NODES / "accelerate.yaml")]
        names = [name if name in COMPARED else f"{name}:once" for name in NAMES]
        cases = ["-m", "tests.examples.recipe_cases", str(folder), *names]
        return run(["-m", "accelerate.commands.launch", *config, *head, *cases], timeout=400)

    with ThreadPoolExecutor(2) as pool:
        return folder, list(pool.map(launch, (0, 1)))


@pytest.mark.parametrize("name", NAMES)
def test_recipe_runs_with_its_own_files(runs, name):
    folder, finished = runs
    output = "\n".join(f.output for f in finished)
    assert (folder / name / "losses.json").exists(), output[-8000:]
    settings = yaml.safe_load((ROOT / "recipes" / name / "train.yaml").read_text())
    degrees = scaled_degrees(settings)
    assert f"ring {degrees.ring} x Ulysses {degrees.ulysses}" in output
    summary = json.loads((folder / name / "out" / "summary.json").read_text())
    assert (summary["ring_degree"], summary["ulysses_degree"]) == (degrees.ring, degrees.ulysses)
    assert (summary["processes"], summary["steps"]) == (4, 2)
    assert summary["zero_stage"] == settings.get("expected_zero_stage")
    found = json.loads((folder / name / "losses.json").read_text())
    assert found["backend"] == ("FSDP" if "fsdp2" in name else "DEEPSPEED")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_leaves_what_was_trained(runs, name):
    folder, _ = runs
    settings = yaml.safe_load((ROOT / "recipes" / name / "train.yaml").read_text())
    out = folder / name / "out"
    if settings["lora_r"]:
        weights = load_file(out / "adapter_model.safetensors")
        assert len(weights) == 2 * 2 * 7  # A and B of 7 linear layers in 2 layers
    else:
        weights = load_file(out / "model.safetensors")
        assert (out / "config.json").exists() and (out / "tokenizer.json").exists()
        assert len(weights) == len(load_file(folder / name / "model" / "model.safetensors"))
    assert all(tensor.numel() and tensor.any() for tensor in weights.values())


@pytest.mark.parametrize("name", COMPARED)
def test_degrees_do_not_change_losses(runs, name):
    """The fallback: the same recipe with cp_size 1 and as many rows a step, in fp32."""
    folder, _ = runs
    found = json.loads((folder / name / "losses.json").read_text())
    assert len(found["split"]) == len(found["whole"]) == 2
    for split, whole in zip(found["split"], found["whole"], strict=True):
        assert split[0] == pytest.approx(whole[0], rel=1e-5)
        assert split[1] == pytest.approx(whole[1], rel=1e-4) and whole[1] > 0
