"""What test_recipes_run.py launches: one of four processes that run the recipes for GPUs, scaled down to CPU.

    torchrun ... -m tests.examples.recipe_cases FOLDER NAME:[COMPARISON,...] ... --deepspeed recipes/.../deepspeed.json

FOLDER/NAME has the tiny model, the documents, `options.json` and a scaled accelerate.yaml. Each recipe runs as it is,
with files written, then in fp32 once for every comparison: with its degrees ("split"), with `--cp_size 1` ("whole")
or 2 ("lower"). Rank 0 writes what these logged to FOLDER/NAME/losses.json.

The first recipe is started by the torchrun line of recipes/README.md. For the others the variables `accelerate launch`
would set are computed by its own functions. At the end come the launched checks of `hf-cp doctor`, on FOLDER/doctor.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_cp.recipes import train
from hf_cp.tools.cli import main as hf_cp
from tests.examples.launch import LAUNCHER_PREFIXES, ROOT, accelerate_variables

FP32 = ["--bf16", "false", "--model_dtype", "float32"]


def launcher_variables(config_file: Path) -> dict[str, str]:
    """What `accelerate launch --config_file` sets for its processes."""
    forget({})  # the launcher adds to the variables that it finds
    port = str(29700 + int(os.environ["RANK"]))
    return accelerate_variables(["--config_file", str(config_file), "--main_process_port", port])


def forget(variables: dict[str, str]) -> None:
    """A process as it starts: nothing of the run before, the variables of its own launcher."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for key in [key for key in os.environ if key.startswith(LAUNCHER_PREFIXES)]:
        del os.environ[key]
    os.environ.update(variables)


def let_fsdp_run() -> None:
    """accelerate runs FSDP on accelerators only: see tests/training/fsdp2.py."""
    parse = train.parse_settings

    def parse_and_claim(arguments):
        parsed = parse(arguments)
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            assert parsed[2].device.type == "cpu"  # this makes the state
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        return parsed

    train.parse_settings = parse_and_claim


def run_recipe(folder: Path, variables: dict[str, str], *, comparisons: list[str], more: list[str]) -> None:
    """As it is, and in fp32 for each of the `comparisons`; `more` options are those of a launch line."""
    given = json.loads((folder / "options.json").read_text())
    recipe = [str(ROOT / "recipes" / folder.name / "train.yaml"), *given["options"], *more]
    forget(variables)
    trainer, settings = train.set_up([*recipe, "--output_dir", str(folder / "out")])
    assert train.run(trainer, settings) == 0
    losses = {"backend": trainer.accelerator.distributed_type.value}
    for name in comparisons:
        forget(variables | {"ACCELERATE_MIXED_PRECISION": "no"})
        options = [*FP32, *given[name], "--output_dir", str(folder / name)]
        trainer, _ = train.set_up([*recipe, *options])
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        losses[name] = [[entry["loss"], entry["grad_norm"]] for entry in log]
        losses[f"{name} degrees"] = [trainer.cp_mesh.ring_size, trainer.cp_mesh.ulysses_size]
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def main() -> int:
    let_fsdp_run()
    deepspeed.init_distributed("gloo")  # transformers does it for --deepspeed, but not with use_cpu
    folder, *words = sys.argv[1:]
    names, more = words[: words.index("--deepspeed")], words[words.index("--deepspeed") :]
    for i, name in enumerate(names):
        name, _, comparisons = name.partition(":")
        case = Path(folder) / name
        variables = launcher_variables(case / "accelerate.yaml") if i else {}
        others = comparisons.split(",") if comparisons else []
        run_recipe(case, variables, comparisons=others, more=[] if i else more)
    case = Path(folder) / "doctor"
    forget(launcher_variables(case / "accelerate.yaml"))
    return hf_cp(["doctor", "--recipe", str(case), "--launch", "--json", str(case / "doctor.json")])  # ends the group


if __name__ == "__main__":
    sys.exit(main())
