"""Writes the recipes for GPUs that come with the package, from `hf-cp plan` and what is said here about each.

    python recipes/write_recipes.py

Of the recipes that are written by hand, the plans in their READMEs are made anew. The tests compare the folders with
what this gives: change a recipe here, then run it.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hf_cp.planning.model_names import loadable_name
from hf_cp.recipes.writer import README, Recipe, plan_output, recipe_files
from hf_cp.tools import plan as plan_command

ROOT = Path(__file__).resolve().parents[1]

BY_HAND = ("quickstart-cpu", "yarn-extension")
TESTED = (
    "Tested on four CPU processes, scaled down: a tiny model of the same family, {tested}, {started}. It has not been "
    "run on GPUs."
)


@dataclass(frozen=True)
class Shipped:
    """One recipe: the options of `hf-cp plan`, and the rest of its [`Recipe`]."""

    title: str
    plan: str
    tested: str
    notes: tuple[str, ...] = ()
    started: str = "with the variables that `accelerate launch` makes of these files"
    settings: dict[str, Any] = field(default_factory=dict)


SHIPPED = {
    "h100x8-zero2-lora-qwen2.5-7b-32k": Shipped(
        "Qwen2.5-7B, LoRA, rows of 32,768 tokens, one node, ZeRO-2",
        "qwen2.5-7b --seq-len 32768 --gpus 8 --cp 2 --zero 2 --lora 16",
        "Ulysses 2, two rows at a time",
        (
            "The model's own context is 131,072. Every GPU holds the whole model in bf16; only the adapters' "
            "gradients and optimizer states are sharded.",
        ),
    ),
    "h100x8-zero3-llama-3.1-8b-128k": Shipped(
        "Llama-3.1-8B, all weights, rows of 131,072 tokens, one node, ZeRO-3, Ulysses 8",
        "llama-3.1-8b --seq-len 131072 --gpus 8 --cp 8 --zero 3",
        "Ulysses 4",
        (
            "The 8 K/V heads divide over 8 Ulysses ranks, so no head is replicated and nothing but all-to-alls inside "
            "the node is needed. The output folder is a whole model. Set `gradient_accumulation_steps` to the rows "
            "that a step should see.",
        ),
    ),
    "h100x16-usp-lora-llama-3.1-8b-512k": Shipped(
        "Llama-3.1-8B, LoRA, rows of 524,288 tokens, two nodes, ring 2 x Ulysses 8",
        "llama-3.1-8b --seq-len 524288 --gpus 16 --cp 16 --zero 3 --lora 16 --mlp-chunk-tokens 8192",
        "ring 2 x Ulysses 2",
        (
            "All-to-alls stay inside a node; between nodes a ring of 2 sends K/V. The two nodes exchange them once "
            "per layer and pass.",
            "**Positions.** The model was trained for 131,072. Positions restart in every document of a packed row, "
            "so only *documents* longer than that need more. `rope_parameters` in `train.yaml` is for them: YaRN over "
            "the 8,192 positions from which the model's own scaling starts too, 64 x 8,192 = 524,288. Without such "
            "documents remove the key. What YaRN changes, and how the adapter is loaded afterwards: "
            "`hf-cp recipes show yarn-extension`.",
        ),
        settings={
            "training": {
                "rope_parameters": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8192}
            }
        },
        started="by the torchrun line below, with two launchers in place of two nodes",
    ),
    "h100x8-zero2-lora-mistral-7b-64k": Shipped(
        "Mistral-7B with its sliding window of 4,096, LoRA, rows of 65,536 tokens, one node, ZeRO-2",
        "mistral-7b --seq-len 65536 --gpus 8 --cp 4 --zero 2 --lora 16",
        "a window of 24 tokens, Ulysses 4",
        (
            "A token sees the last 4,096 tokens, so attention costs grow with the row, not with its square, and no "
            "distance is larger than those that the model was trained with. With a ring (`--ring_degree 2 "
            "--ulysses_degree 2`), `exchange` sends only the rows inside the window.",
        ),
    ),
    "h100x32-zero3-lora-llama-3.1-70b-128k": Shipped(
        "Llama-3.1-70B, LoRA, rows of 131,072 tokens, four nodes, ZeRO-3, ring 2 x Ulysses 8",
        "llama-3.1-70b --seq-len 131072 --gpus 32 --cp 16 --zero 3 --lora 16",
        "ring 2 x Ulysses 2",
        (
            "Two rows at a time, each on two nodes. ZeRO-3 gathers a layer's weights from all four nodes while the "
            "layer before it is computed; with `zero3_init_flag` no process ever holds the whole model.",
        ),
    ),
    "h100x8-fsdp2-lora-llama-3.1-8b-64k": Shipped(
        "Llama-3.1-8B, LoRA, rows of 65,536 tokens, one node, FSDP2",
        "llama-3.1-8b --seq-len 65536 --gpus 8 --cp 4 --zero 3 --lora 16",
        "Ulysses 4",
        (
            "FSDP2 in place of DeepSpeed; the plan counts it as ZeRO-3. hf_cp makes it add up gradients in fp32. "
            "accelerate runs FSDP on accelerators only, so the test tells it that its CPU processes are some.",
        ),
        settings={"backend": "fsdp2"},
    ),
}


@cache
def files(name: str) -> dict[str, str]:
    """Name and text of the files of a shipped recipe."""
    shipped = SHIPPED[name]
    args = plan_arguments(shipped.plan)
    recipe = Recipe(
        title=shipped.title,
        command=plan_command.command_line(args),
        model_name_or_path=loadable_name(args.model),
        script="examples/finetune.py",
        lora_r=args.lora,
        notes=(*shipped.notes, TESTED.format(tested=shipped.tested, started=shipped.started)),
        **shipped.settings,
    )
    return recipe_files(f"recipes/{name}", plan_command.make_plan(args), recipe)


def plan_arguments(options: str) -> argparse.Namespace:
    """What follows `hf-cp plan`, parsed."""
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    return parser.parse_args(shlex.split(options))


def with_new_plans(readme: str) -> str:
    """A README with the output of its `$ hf-cp plan` blocks made anew."""

    def output(found: re.Match) -> str:
        plan = plan_command.make_plan(plan_arguments(found[2]))
        return f"{found[1]}{plan_output(plan, plan.recommended)}\n```"

    return re.sub(r"(```\n\$ hf-cp plan (.*?)\n).*?```", output, readme, flags=re.DOTALL)


def main() -> None:
    for name in SHIPPED:
        folder = ROOT / "recipes" / name
        folder.mkdir(exist_ok=True)
        for file, text in files(name).items():
            (folder / file).write_text(text, encoding="utf-8")
        print(folder.relative_to(ROOT))
    for name in BY_HAND:
        readme = ROOT / "recipes" / name / README
        readme.write_text(with_new_plans(readme.read_text(encoding="utf-8")), encoding="utf-8")
        print(readme.relative_to(ROOT))


if __name__ == "__main__":
    main()
