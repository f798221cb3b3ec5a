"""A recipe for GPUs, scaled down to four CPU processes: its files, a tiny model of its family, short documents."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from hf_cp.config import ContextParallelConfig
from hf_cp.planning.model_names import load_config, name_of_sizes
from tests.examples.launch import ROOT
from tests.examples.tiny_quickstart import make_tokenizer

PROCESSES, HOSTS = 4, 2
TOKENS = 96
CONTEXT = 24  # of the model whose RoPE is extended by 4
HEAD_DIM, NUM_LAYERS = 4, 1


@dataclass(frozen=True)
class Degrees:
    """How four processes share rows."""

    ring: int
    ulysses: int

    @property
    def rows(self) -> int:
        """At the same time."""
        return PROCESSES // (self.ring * self.ulysses)


def scaled_degrees(settings: dict[str, Any]) -> Degrees:
    """The recipe's degrees where four processes are enough, else smaller ones; a ring stays a ring."""
    if "cp_size" in settings:
        model = load_config(name_of_sizes(settings["model_name_or_path"]))
        config = ContextParallelConfig.auto(settings["cp_size"], model, PROCESSES // HOSTS)
        return Degrees(config.ring_degree, config.ulysses_degree)
    ring = min(settings["ring_degree"], 2)
    return Degrees(ring, min(settings["ulysses_degree"], PROCESSES // ring))


def write_scaled(name: str, folder: Path) -> Path:
    """Writes FOLDER/NAME; returns it."""
    target, recipe = folder / name, ROOT / "recipes" / name
    target.mkdir(parents=True)
    settings = yaml.safe_load((recipe / "train.yaml").read_text())
    write_model(settings, target / "model")
    write_documents(target / "train.jsonl")
    (target / "accelerate.yaml").write_text(scaled_launch(recipe / "accelerate.yaml"))
    degrees = scaled_degrees(settings)
    given = {
        "options": options(scaled_settings(settings, degrees, target)),
        # four rows a step both times
        "split": options({"gradient_accumulation_steps": PROCESSES // degrees.rows}),
        "whole": options({"cp_size": 1, "gradient_accumulation_steps": 1}),
        "lower": options({"cp_size": 2, "gradient_accumulation_steps": 2}),
    }
    (target / "options.json").write_text(json.dumps(given))
    return target


def scaled_launch(path: Path) -> str:
    """The recipe's own file with four processes, on two hosts at most."""
    launch = yaml.safe_load(path.read_text())
    launch |= {"num_machines": min(launch["num_machines"], HOSTS), "num_processes": PROCESSES}
    return yaml.safe_dump(launch)


def scaled_settings(settings: dict[str, Any], degrees: Degrees, target: Path) -> dict[str, Any]:
    """What must differ from the recipe on four CPU processes."""
    chunked = "mlp_chunk_tokens" in settings
    proves = "proof_tokens" in settings
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
    return {
        "model_name_or_path": target / "model",
        "dataset": target / "train.jsonl",
        "max_tokens": TOKENS,
        **({} if "cp_size" in settings else {"ring_degree": degrees.ring, "ulysses_degree": degrees.ulysses}),
        **({"eval_dataset": target / "train.jsonl", "proof_tokens": TOKENS, "eval_every": 0} if proves else {}),
        **({"rope_parameters": json.dumps(rope)} if is_extended(settings) else {}),
        "expected_processes": PROCESSES,
        "loss_chunk_tokens": 16,
        **({"mlp_chunk_tokens": 16} if chunked else {}),
        "max_steps": 2,
        "warmup_steps": 0,
        "learning_rate": 0.02,
        "save_strategy": "no",
        "use_cpu": "true",
        "disable_tqdm": "true",
    }


def is_extended(settings: dict[str, Any]) -> bool:
    """Whether the model gets positions for longer documents than it was made for."""
    return "rope_parameters" in settings and "proof_tokens" in settings


def options(settings: dict[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def write_model(settings: dict[str, Any], folder: Path) -> None:
    """The real config with all heads, but narrow ones, one layer, and the byte tokenizer's vocabulary."""
    tokenizer = make_tokenizer()
    config = load_config(name_of_sizes(settings["model_name_or_path"]))
    config.update(
        {
            "hidden_size": HEAD_DIM * config.num_attention_heads,
            "head_dim": HEAD_DIM,
            "intermediate_size": 64,
            "num_hidden_layers": NUM_LAYERS,
            "vocab_size": len(tokenizer),
            **({"max_position_embeddings": CONTEXT} if is_extended(settings) else {}),
        }
    )
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:NUM_LAYERS]
    if getattr(config, "sliding_window", None):
        config.sliding_window = 24
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_documents(path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=4)) for _ in range(6)]
    texts = [" ".join(rng.choices(words, k=rng.randint(2, 18))) for _ in range(24)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
