"""Gradients are reduced in fp32.

The ranks of one row hold parts of one gradient. Reducing them in 16 bits rounds every part and every partial sum, so
the error would grow with cp_size. ZeRO is told by its config (zero.py). FSDP is told here. DDP reduces in the type of
the weights: 16-bit trainable weights are refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def reduce_fsdp_in_fp32(fsdp_plugin: Any) -> list[str]:
    """Lets FSDP 1 or 2 sum gradients in fp32, and FSDP 2 hand out the loss in fp32; in place.

    accelerate makes the policy of a bf16 run reduce in bf16, and round what the model returns to bf16: the loss, and
    with it the factor that scales every gradient. Call it before the model is prepared. Without a policy FSDP reduces
    in the type of the weights, which [`check_gradient_precision`] looks at.

    Args:
        fsdp_plugin (`accelerate.FullyShardedDataParallelPlugin`): of the Accelerator's state.

    Returns:
        `list[str]`: the settings that were changed, as `key=value`.
    """
    policy, changes = fsdp_plugin.mixed_precision_policy, {}
    if policy is None:
        return []
    if (policy.reduce_dtype or policy.param_dtype) in SIXTEEN_BITS:
        changes["reduce_dtype"] = torch.float32
    if getattr(policy, "output_dtype", None) in SIXTEEN_BITS:
        changes["output_dtype"] = None  # as it was computed
    fsdp_plugin.mixed_precision_policy = dataclasses.replace(policy, **changes)
    return [f"{key}={value}" for key, value in changes.items()]


def sixteen_bit_weights(model: nn.Module | None) -> list[str]:
    """Names of the trainable parameters that are fp16 or bf16."""
    if model is None:
        return []
    return [name for name, p in model.named_parameters() if p.requires_grad and p.dtype in SIXTEEN_BITS]


def check_gradient_precision(model: nn.Module, accelerator: Accelerator, *, cp_size: int) -> None:
    """Refuses a run that would reduce parts of a gradient in 16 bits.

    Args:
        model (`nn.Module`): the trained model, wrapped or not.
        accelerator (`Accelerator`): that has prepared it.
        cp_size (`int`): processes that share one row; at 1 there are no parts, and nothing is refused.

    Raises:
        ValueError: DDP, or FSDP without mixed precision, with 16-bit trainable parameters.
    """
    if cp_size == 1 or accelerator.distributed_type in (DistributedType.NO, DistributedType.DEEPSPEED):
        return
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.mixed_precision_policy is not None:
        return
    names = sixteen_bit_weights(model)
    if names:
        raise ValueError(
            f"{len(names)} trainable parameters are in 16 bits (the first is {names[0]}), and "
            f"{accelerator.distributed_type.value} would add up their gradients in 16 bits over cp_size={cp_size} "
            "ranks, which hold parts of one gradient.\n"
            "  Keep trainable weights in fp32 and use mixed_precision='bf16' (bf16=True in TrainingArguments); frozen "
            "weights may stay in 16 bits."
        )


def check_comm_hook(accelerator: Accelerator, *, cp_size: int) -> None:
    """Raises ValueError if DDP is told to compress what it reduces."""
    handler = accelerator.ddp_handler
    if cp_size > 1 and handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"DistributedDataParallelKwargs has comm_hook={handler.comm_hook.value!r}, which rounds gradients before "
            f"they are added up; the cp_size={cp_size} ranks of a row hold parts of one gradient.\n"
            "  Leave comm_hook at its default."
        )
