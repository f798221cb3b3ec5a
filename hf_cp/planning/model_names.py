"""Names of a model: those under which `hf-cp plan` has sizes, and those under which there are weights.

Invariant: every name that the planner knows has one hub name, from which weights and tokenizer can be loaded.

>>> loadable_name("llama-3.1-8b"), loadable_name("Qwen/Qwen2.5-7B")
('meta-llama/Llama-3.1-8B', 'Qwen/Qwen2.5-7B')
>>> name_of_sizes("meta-llama/Llama-3.1-8B")
'llama-3.1-8b'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = [
    "HUB_NAMES",
    "MODELS",
    "has_sizes_only",
    "is_same_model",
    "known_models",
    "load_config",
    "loadable_name",
    "missing_weights",
    "name_of_sizes",
]

MODELS = Path(__file__).resolve().parent / "models"  # configs, whose sizes come with the package
HUB_NAMES = {
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
WHOLE, PARTS = ("model.safetensors", "pytorch_model.bin"), ".index.json"  # files of weights, and lists of their parts


def known_models() -> list[str]:
    """Models whose sizes come with the package."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def load_config(model: str) -> Any:
    """The Hugging Face config of a known model, a config.json, or whatever `AutoConfig` finds under that name."""
    from transformers import AutoConfig  # seconds; only for those who load

    known = MODELS / f"{model.lower()}.json"
    return AutoConfig.from_pretrained(known if known.is_file() else model)


def has_sizes_only(model: str) -> bool:
    """Whether nothing can be loaded under this name: a name of the planner, or a config without its folder."""
    return (model.lower() in HUB_NAMES and not Path(model).is_dir()) or Path(model).is_file()


def loadable_name(model: str) -> str:
    """What a training script takes in place of a name for sizes; other names stay."""
    if not has_sizes_only(model):
        return model
    return Path(model).parent.as_posix() if Path(model).is_file() else HUB_NAMES[model.lower()]


def name_of_sizes(model: str) -> str:
    """The planner's name of a hub model, so that its config need not be downloaded; other names stay."""
    if Path(model).exists():
        return model
    return next((name for name, hub_name in HUB_NAMES.items() if hub_name == model), model)


def is_same_model(first: str, second: str) -> bool:
    """Whether both names lead to one folder or one hub model.

    >>> is_same_model("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")
    True
    """
    one, other = (Path(loadable_name(name)) for name in (first, second))
    return one.resolve() == other.resolve()


def missing_weights(folder: Path) -> list[str]:
    """Names of the files without which the weights of a model folder cannot be loaded; empty if all are there."""
    if any((folder / name).exists() for name in WHOLE):
        return []
    for name in WHOLE:
        if (folder / f"{name}{PARTS}").exists():
            parts = json.loads((folder / f"{name}{PARTS}").read_text(encoding="utf-8"))["weight_map"].values()
            return sorted(part for part in set(parts) if not (folder / part).exists())
    return [WHOLE[0]]
