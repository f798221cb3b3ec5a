"""The model and the documents of `hf-cp verify`: from folders and files, or random.

Invariant: every process makes the same model and the same documents, from files and seeds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, set_seed

from hf_cp.data.documents import prepare_documents
from hf_cp.data.files import load_features
from hf_cp.verify.baseline import Recipe

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def make_model(source: str, recipe: Recipe, device: torch.device) -> torch.nn.Module:
    """The model, truncated and with adapters as the recipe says; not patched.

    Args:
        source (`str`): folder (or hub name) with config and weights, or a `config.json` for random weights.
        recipe (`Recipe`): its seed makes random weights and adapters.

    Raises:
        ValueError: the model has fewer layers than asked for.
        ImportError: adapters are asked for, but peft is not installed.
    """
    config = AutoConfig.from_pretrained(source)
    _truncate(config, recipe.layers)
    dtype = getattr(torch, recipe.dtype)
    set_seed(recipe.seed)
    if Path(source).is_file():
        # random weights in the default type first: their values do not depend on the type that is compared
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
    model = model.to(device)
    if recipe.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=recipe.lora, lora_alpha=2 * recipe.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=dtype == torch.bfloat16 or dtype == torch.float16)


def load_tokenizer(source: str) -> Any:
    """The tokenizer beside the model, or None if there is none."""
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(str(folder))


def read_documents(path: str, *, tokenizer: Any, max_tokens: int) -> tuple[list[dict[str, list[int]]], str]:
    """The first documents of a file or folder that fit into `max_tokens`, and a line that says what was taken.

    A document that does not fit is skipped, unless none fits: then the first one is truncated.

    Raises:
        ValueError: there are no documents, or a line is not JSON or not a document.
    """
    documents = prepare_documents(load_features(path), tokenizer=tokenizer).documents
    chosen, room = [], max_tokens
    for document in documents:
        if len(document) <= room:
            chosen.append(document)
            room -= len(document)
    what = f"{len(chosen)} of {len(documents)} documents of {path} fit into {max_tokens:,} tokens"
    if not chosen:
        chosen = [documents[0].cut(0, max_tokens)]
        what = f"No document of {path} has at most {max_tokens:,} tokens: the first one ({len(documents[0]):,}) is cut"
    return [{"input_ids": d.input_ids.tolist(), "labels": d.labels.tolist()} for d in chosen], what


def random_documents(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Documents of random tokens, every token a target."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(vocab_size, (n,), generator=generator).tolist()} for n in lengths]


def _truncate(config: PreTrainedConfig, layers: int | None) -> None:
    """Keeps the first `layers` layers; lists with an entry for each layer are cut too."""
    if layers is None:
        return
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(
            f"--layers {layers} is not possible: the model has {config.num_hidden_layers}. "
            f"Use 1 to {config.num_hidden_layers}."
        )
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
