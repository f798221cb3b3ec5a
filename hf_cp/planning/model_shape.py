"""The sizes of a model that memory and time depend on, read from its Hugging Face config; no weights are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cp.config import head_counts, head_size


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only causal LM.

    Args:
        name (`str`): model type, for tables.
        num_layers, hidden_size, intermediate_size, vocab_size, num_heads, num_kv_heads, head_dim (`int`): as in the
            model's config.
        num_parameters (`int`): all, tied ones once.
        layer_parameters (`int`): of the largest layer.
        linear_parameters (`int`): in the linear layers of all layers, without the output head.
        num_adapted (`int`): sum of input and output sizes of these linear layers; LoRA has r parameters for each.
        num_linear (`int`): linear layers of one layer.
        has_qk_norm (`bool`): queries and keys are normalised per head (Qwen3).
        windows (`tuple[tuple[int | None, int], ...]`): sliding windows (`None`: full attention) and their numbers of
            layers.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    layer_parameters: int
    linear_parameters: int
    num_adapted: int
    num_linear: int
    has_qk_norm: bool
    windows: tuple[tuple[int | None, int], ...]

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Counts on the meta device: nothing is allocated.

        Args:
            config (`PretrainedConfig`): of a causal LM.

        Raises:
            ValueError: the model has experts, whose weights and activations do not follow from these sizes.
        """
        from transformers import AutoModelForCausalLM  # seconds; only for those who plan

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = model.get_decoder().layers
        num_experts = sum(hasattr(module, "experts") for module in layers.modules())
        if num_experts:
            raise ValueError(
                f"{config.model_type} has experts in {num_experts} of {len(layers)} layers; memory and time are known "
                "for dense models only.\n  Plan a dense model of about as many active parameters, or measure."
            )
        linear = [module for module in layers.modules() if isinstance(module, nn.Linear)]
        num_heads, num_kv_heads = head_counts(config)
        return cls(
            name=config.model_type,
            num_layers=len(layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_size(config),
            num_parameters=sum(p.numel() for p in model.parameters()),
            layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            linear_parameters=sum(module.weight.numel() for module in linear),
            num_adapted=sum(module.in_features + module.out_features for module in linear),
            num_linear=len(linear) // len(layers),
            has_qk_norm=hasattr(layers[0].self_attn, "q_norm"),
            windows=tuple(Counter(layer_windows(config)).items()),
        )


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of every layer; `None` where a layer sees the whole document.

    >>> from transformers import MistralConfig
    >>> layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=4096))
    [4096, 4096]
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    return [window if getattr(config, "use_sliding_window", True) else None] * config.num_hidden_layers
