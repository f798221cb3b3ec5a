"""The model and the documents of `hf-cp verify`: from folders and files, or random.

Invariant: every process makes the same model and the same documents, from files and seeds alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, set_seed

from hf_cp.config import IGNORE_INDEX
from hf_cp.data.documents import prepare_documents

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def make_model(
    source: str, *, dtype: str, layers: int | None = None, lora: int | None = None, seed: int = 0
) -> torch.nn.Module:
    """The model on the CPU, truncated and with adapters as asked for; not patched.

    Args:
        source (`str`): folder (or hub name) with config and weights, or a `config.json` for random weights.
        dtype (`str`): of the weights.
        layers (`int`, *optional*): keep only the first ones.
        lora (`int`, *optional*): rank of adapters on all linear layers.
        seed (`int`): of random weights and adapters.

    Raises:
        ValueError: the model has fewer layers than asked for.
        ImportError: adapters are asked for, but peft is not installed.
    """
    config = AutoConfig.from_pretrained(source)
    _truncate(config, layers)
    kind = getattr(torch, dtype)
    set_seed(seed)
    if Path(source).is_file():
        # random weights in the default type first: their values do not depend on the type that is compared
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(kind)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=kind)
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters, autocast_adapter_dtype=kind in (torch.bfloat16, torch.float16))


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By name; there are some, and they are whole."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(
            "The model has no trainable parameter (0 with requires_grad). Add adapters or unfreeze a part first."
        )
    for name, p in parameters.items():
        if p.numel() == 0 or hasattr(p, "ds_id"):
            raise ValueError(
                f"{name} is sharded ({p.numel()} elements here): one process does not hold the model.\n"
                "  Compare before DeepSpeed or FSDP wraps it, without zero.Init."
            )
    return parameters


def load_tokenizer(source: str) -> Any:
    """The tokenizer beside the model, or None if there is none."""
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(str(folder))


def first_documents(
    features: Iterable[Any], *, tokenizer: Any, max_tokens: int
) -> tuple[list[dict[str, list[int]]], str]:
    """The first documents that fit into `max_tokens`, and a line that says what was taken.

    A document that does not fit is skipped, unless none fits: then the first one is truncated.

    Raises:
        ValueError: a feature is not a document.
    """
    documents = prepare_documents(features, tokenizer=tokenizer).documents
    chosen, room = [], max_tokens
    for document in documents:
        if len(document) <= room:
            chosen.append(document)
            room -= len(document)
    what = f"{len(chosen)} of {len(documents)} documents fit into {max_tokens:,} tokens"
    if not chosen:
        chosen = [documents[0].cut(0, max_tokens)]
        what = f"No document has at most {max_tokens:,} tokens: the first one ({len(documents[0]):,}) is cut"
    return [{"input_ids": d.input_ids.tolist(), "labels": d.labels.tolist()} for d in chosen], what


def random_documents(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Documents of random tokens, every token a target."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(vocab_size, (n,), generator=generator).tolist()} for n in lengths]


def whole_sample(documents: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """All documents one after the other, int64 [1, num_tokens]; positions restart, targets never cross a border.

    >>> batch = whole_sample([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["position_ids"].tolist(), batch["shift_labels"].tolist()
    ([[0, 1, 2, 0, 1]], [[6, 7, -100, 9, -100]])
    """
    columns: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "labels": [], "shift_labels": []}
    for document in documents:
        ids = [int(token) for token in document["input_ids"]]
        labels = [int(label) for label in document.get("labels", ids)]
        columns["input_ids"] += ids
        columns["position_ids"] += range(len(ids))
        columns["labels"] += labels
        columns["shift_labels"] += [*labels[1:], IGNORE_INDEX]
    return {name: torch.tensor([values], dtype=torch.int64) for name, values in columns.items()}


def count_targets(batch: Mapping[str, Any]) -> torch.Tensor:
    """Targets of a batch, int64 []."""
    return (batch["shift_labels"] != IGNORE_INDEX).sum()


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on `device`; the layout stays on the host."""
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}


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
