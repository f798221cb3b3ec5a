"""Tiny models of every supported family, and whole-row batches in Hugging Face's own form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from hf_cp.sequence.sample import PackedSample

VOCAB_SIZE = 64
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
MIXTURES = {"mixtral": MixtralConfig, "qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig}
OTHERS = {"olmo2": Olmo2Config, "phi3": Phi3Config, "smollm3": SmolLM3Config}
# 4 experts, 2 for a token; "eager" since the default, grouped matrix products, has no fp64
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
QWEN_EXPERTS = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24}
MORE_SETTINGS = {
    "mistral": {"sliding_window": None},
    "mixtral": EXPERTS | {"num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": QWEN_EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": QWEN_EXPERTS,
    "smollm3": {"no_rope_layer_interval": 2},  # the second layer has no RoPE
}


def tiny_model(family: str = "llama", *, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """Two layers, 4 heads over 2 K/V heads of size 8, random weights that are the same in every process."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16 if family == "qwen3" else 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "attn_implementation": "sdpa",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings |= MORE_SETTINGS.get(family, {}) | overrides
    config: AutoConfig = (FAMILIES | MIXTURES | OTHERS)[family](**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # norm weights and biases too
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


class Row:
    """A packed row: ids, positions and next-token targets of its documents, with some targets masked out."""

    def __init__(self, doc_lengths: Sequence[int], *, seed: int = 0, masked: float = 0.25):
        generator = torch.Generator().manual_seed(seed)
        self.doc_lengths = tuple(doc_lengths)
        num_tokens = sum(self.doc_lengths)
        self.input_ids = torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator)
        self.labels = self.input_ids.masked_fill(torch.rand(num_tokens, generator=generator) < masked, -100)
        self.position_ids = torch.cat([torch.arange(length) for length in self.doc_lengths])
        per_document = self.labels.split(self.doc_lengths)
        self.shift_labels = torch.cat([torch.cat([x[1:], x.new_tensor([-100])]) for x in per_document])

    @property
    def num_targets(self) -> int:
        return int((self.shift_labels != -100).sum())

    def whole_batch(self) -> dict[str, Any]:
        """For an untouched model: transformers reads the documents from the restarting positions."""
        names = ("input_ids", "position_ids", "labels", "shift_labels")
        # with a cache transformers would not look for documents
        return {name: getattr(self, name).unsqueeze(0) for name in names} | {"use_cache": False}

    def local_batch(self, layout, cp_rank: int) -> dict[str, Any]:
        """This rank's shard, in the form that the collator gives it."""
        batch = {}
        for name, pad in (("input_ids", 0), ("position_ids", 0), ("labels", -100), ("shift_labels", -100)):
            batch[name] = layout.shard(getattr(self, name), cp_rank, pad_value=pad).unsqueeze(0)
        return batch | {"hf_cp_sample": PackedSample(layout)}
