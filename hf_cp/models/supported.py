"""Which models can be made context-parallel, and why others cannot."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_cp.config import ContextParallelConfig, check_heads, head_counts
from hf_cp.models.rope import BY_LENGTH, FIXED, rope_types

# A family is in this list once a test shows that patched it computes what the untouched model computes.
MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmo2",
    "phi3",
    "smollm3",
)
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_model(model: nn.Module, base: PreTrainedModel, config: ContextParallelConfig) -> None:
    """Raises ValueError, with the reason and the way out, if `base` (inside `model`) cannot be patched."""
    name, settings = type(base).__name__, base.config
    if settings.model_type not in MODEL_TYPES or base.get_output_embeddings() is None:
        raise ValueError(
            f"{name} (model_type {settings.model_type!r}) is not supported. Supported are causal LMs of the types "
            f"{', '.join(MODEL_TYPES)}."
        )
    check_heads(*head_counts(settings), config)
    if getattr(settings, "attention_dropout", 0.0):
        raise ValueError(
            f"{name} has attention_dropout={settings.attention_dropout}; its random mask would differ from that of "
            "one process. Set model.config.attention_dropout = 0.0 and that of every attention layer."
        )
    layer_types = set(getattr(settings, "layer_types", None) or ()) - _LAYER_TYPES
    if layer_types:
        raise ValueError(
            f"{name} has layers of the kind {', '.join(sorted(layer_types))}; only "
            f"{' and '.join(sorted(_LAYER_TYPES))} can be split along the sequence."
        )
    unknown = rope_types(settings) - {*FIXED, *BY_LENGTH}
    if unknown:
        raise ValueError(
            f"{name} uses the RoPE type {', '.join(map(repr, sorted(unknown)))}, and it is not known whether its "
            f"frequencies depend on what a rank sees. Use one of {', '.join((*FIXED, *BY_LENGTH))}."
        )
    if getattr(settings, "router_jitter_noise", 0.0):
        raise ValueError(
            f"{name} has router_jitter_noise={settings.router_jitter_noise}; its random factors would differ from "
            "those of one process. Set router_jitter_noise to 0.0 in the config that the model is made from."
        )
    _check_not_distributed(base, name)
    _check_adapters(model)


def _check_not_distributed(base: PreTrainedModel, name: str) -> None:
    """Refuses what `from_pretrained` has split by a `DistributedConfig` or `tp_plan`."""
    settings = getattr(base.config, "distributed_config", None)
    sizes = {axis: getattr(settings, axis, None) for axis in ("pp_size", "ep_size", "fsdp_size", "dp_replicate_size")}
    sizes["tp_size"] = getattr(base, "tp_size", None)
    split = [f"{axis}={size}" for axis, size in sizes.items() if size is not None and size > 1]
    if split:
        raise ValueError(
            f"{name} was split over processes when it was loaded ({', '.join(split)}), which is not supported yet.\n"
            "  Load it without distributed_config and tp_plan; let accelerate shard it (FSDP 2 or DeepSpeed ZeRO)."
        )


def _check_adapters(model: nn.Module) -> None:
    adapters = getattr(model, "peft_config", None)
    for name, adapter in adapters.items() if isinstance(adapters, dict) else ():
        if adapter.is_prompt_learning:
            raise ValueError(
                f"PEFT adapter {name!r} ({adapter.peft_type}) puts virtual tokens before the sample, which is sharded "
                "already. Use LoRA or another adapter that keeps the sequence length."
            )
        if getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(
                f"PEFT adapter {name!r} is an activated LoRA, which searches its tokens in the local shard only. "
                "Use plain LoRA."
            )
