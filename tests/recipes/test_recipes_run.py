"""Every recipe for GPUs runs on four CPU processes, scaled down: with its own files, as it is and with other degrees.

One launch for all of them, by two launchers in place of two nodes, with the torchrun line of recipes/README.md.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.examples.launch import ROOT, Finished, free_port, run_command
from tests.examples.scaled_recipes import HOSTS, NUM_LAYERS, PROCESSES, scaled_degrees, write_scaled
from tests.tools.recipe_files import write_model, write_recipe

TWO_NODES, YARN = "h100x16-usp-lora-llama-3.1-8b-512k", "yarn-extension"
COMPARED = {  # the others take the same paths
    TWO_NODES: ("split", "whole", "lower"),
    "h100x8-zero3-llama-3.1-8b-128k": ("split", "whole"),
    "h100x8-fsdp2-lora-llama-3.1-8b-64k": ("split", "whole"),
}
OTHERS = sorted(path.name for path in (ROOT / "recipes").glob("h100*") if path.name != TWO_NODES)
NAMES = [TWO_NODES, *OTHERS, YARN]

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(500, func_only=False)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, deepspeed_extension) -> tuple[Path, list[Finished]]:
    """The folder with what all recipes left, and the output of both launchers."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in NAMES:
        write_scaled(name, folder)
    write_model(folder / "doctor-model")
    processes = {"num_processes": PROCESSES, "num_machines": HOSTS}
    write_recipe(
        folder / "doctor", folder / "doctor-model", accelerate=processes, train={"expected_processes": PROCESSES}
    )
    line = torchrun_line(TWO_NODES, folder, [f"{name}:{','.join(COMPARED.get(name, ()))}" for name in NAMES])

    def launch(node: int) -> Finished:
        variables = {"NODE_RANK": str(node), "HEAD_NODE": "127.0.0.1"}
        return run_command(["bash", "-c", line], timeout=400, variables=variables)

    with ThreadPoolExecutor(HOSTS) as pool:
        return folder, list(pool.map(launch, range(HOSTS)))


def torchrun_line(name: str, folder: Path, cases: list[str]) -> str:
    """The README's line for two nodes, with fewer processes, a free port and the cases in place of `hf-cp train`."""
    readme = (ROOT / "recipes" / "README.md").read_text()
    (line,) = re.findall(r"^torchrun --nnodes (?:.*\\\n)+.*--deepspeed .*$", readme, flags=re.MULTILINE)
    run = " ".join(["-m tests.examples.recipe_cases", str(folder), *cases])
    for old, new in (
        ("--nproc_per_node 8", f"--nproc_per_node {PROCESSES // HOSTS}"),
        ("--master_port 29500", f"--master_port {free_port()}"),
        ("-m hf_cp train $R/train.yaml", run),
        ("$R/deepspeed.json", f"recipes/{name}/deepspeed.json"),
    ):
        assert line.count(old) == 1, line
        line = line.replace(old, new)
    return line


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
    assert (summary["processes"], summary["steps"]) == (PROCESSES, 2)
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
        assert len(weights) == NUM_LAYERS * 2 * 7  # A and B of 7 linear layers
    else:
        weights = load_file(out / "model.safetensors")
        assert (out / "config.json").exists() and (out / "tokenizer.json").exists()
        assert len(weights) == len(load_file(folder / name / "model" / "model.safetensors"))
    assert all(tensor.numel() and tensor.any() for tensor in weights.values())


def test_yarn_is_proven_on_documents_longer_than_the_context(runs):
    out = runs[0] / YARN / "out"
    summary, config = (json.loads((out / name).read_text()) for name in ("summary.json", "config.json"))
    context = config["rope_parameters"]["original_max_position_embeddings"]
    assert max(summary["proof"]["document_lengths"]) > 2 * context == config["max_position_embeddings"] / 2
    assert summary["loss_first_step_cpN"] == pytest.approx(summary["loss_first_step_cp1"], rel=1e-5)
    assert 0 < summary["worst_gradient_relative_error"] < 1e-4


@pytest.mark.parametrize(("name", "other"), [(name, c) for name, cs in COMPARED.items() for c in cs[1:]])
def test_degrees_do_not_change_losses(runs, name, other):
    """The fallback: the same recipe, degrees and all, with `--cp_size 1` or 2 and as many rows a step, in fp32."""
    folder, _ = runs
    found = json.loads((folder / name / "losses.json").read_text())
    assert found[f"{other} degrees"] == {"whole": [1, 1], "lower": [1, 2]}[other] != found["split degrees"]
    assert len(found["split"]) == len(found[other]) == 2
    for split, less in zip(found["split"], found[other], strict=True):
        assert split[0] == pytest.approx(less[0], rel=1e-5)
        assert split[1] == pytest.approx(less[1], rel=1e-4) and less[1] > 0


def test_the_doctor_looks_at_launched_processes(runs):
    """DeepSpeed on four processes: the engine's mean, the loader's samples, every collective."""
    folder, finished = runs
    assert all(f.status == 0 for f in finished), finished[0].output[-8000:]
    output = "".join(f.output for f in finished)
    assert output.count("PASSED: nothing stands against starting") == 1
    found = {check["name"]: check for check in json.loads((folder / "doctor" / "doctor.json").read_text())["checks"]}
    assert found["backend"]["detail"] == "DeepSpeed with ZeRO stage 2, bf16"
    average = found["average of gradients"]
    assert average["status"] == "ok" and "DeepSpeedEngine" in average["detail"] and "all 4" in average["detail"]
    assert "ring uneven exchange" in found["collectives"]["detail"] and "dp sum" in found["collectives"]["detail"]
    assert found["samples"]["status"] == "ok"
