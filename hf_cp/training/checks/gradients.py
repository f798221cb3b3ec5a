"""Gradients are added up in fp32.

The ranks of one sample hold parts of one gradient. Adding them up in 16 bits rounds every part and every partial sum,
so the error would grow with cp_size. ZeRO and FSDP are told to use fp32 (backend.py). DDP adds up in the type of the
weights, and so does FSDP in a run without mixed precision: there 16-bit trainable weights are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainingArguments

from hf_cp.training.checks.launch import is_asked_for
from hf_cp.training.checks.table import Check

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def sixteen_bit_weights(model: nn.Module | None) -> tuple[str, ...]:
    """Names of the trainable parameters that are fp16 or bf16."""
    parameters = () if model is None else model.named_parameters()
    return tuple(name for name, p in parameters if p.requires_grad and p.dtype in SIXTEEN_BITS)


@dataclass(frozen=True)
class GradientSums:
    """Who adds up the gradients, and what of.

    Args:
        cp_size (`int`): processes that share one sample; at 1 there are no parts, and nothing is refused.
        backend (`str`): the name of what adds up.
        is_told (`bool`): it adds up in fp32 whatever the weights are (ZeRO, FSDP with mixed precision).
        sixteen_bit (`tuple[str, ...]`): trainable parameters in 16 bits.
        comm_hook (`str`): what DDP does to gradients on the way.
    """

    cp_size: int
    backend: str
    is_told: bool
    sixteen_bit: tuple[str, ...] = ()
    comm_hook: str = "no"

    @property
    def num_sixteen_bit(self) -> int:
        return len(self.sixteen_bit)

    @classmethod
    def of_arguments(cls, args: TrainingArguments, model: Any, *, cp_size: int) -> GradientSums:
        """Of a run that is asked for."""
        uses_fsdp = args.fsdp_plugin_args is not None or is_asked_for("FSDP")
        is_told = args.deepspeed_plugin is not None or (uses_fsdp and (args.bf16 or args.fp16))
        return cls(cp_size, "FSDP" if uses_fsdp else "DDP", bool(is_told), sixteen_bit_weights(model))

    @classmethod
    def of_accelerator(cls, accelerator: Accelerator, model: nn.Module | None = None, *, cp_size: int) -> GradientSums:
        """Of an Accelerator as it was built, and of the model that it has prepared."""
        kind, handler = accelerator.distributed_type, accelerator.ddp_handler
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        is_told = fsdp is not None and fsdp.mixed_precision_policy is not None
        return cls(
            cp_size,
            kind.value,
            is_told or kind in (DistributedType.NO, DistributedType.DEEPSPEED),
            sixteen_bit_weights(model),
            "no" if handler is None else handler.comm_hook.value,
        )


CHECKS = (
    Check(
        "gradient precision",
        GradientSums,
        lambda s: s.sixteen_bit if s.cp_size > 1 and not s.is_told else (),
        "{s.num_sixteen_bit} trainable parameters are in 16 bits (the first is {found[0]}), and {s.backend} would add "
        "up their gradients in 16 bits over cp_size={s.cp_size} ranks, which hold parts of one gradient.",
        "Keep trainable weights in fp32 and set bf16=True (for an Accelerator mixed_precision='bf16'); frozen weights "
        "may stay in 16 bits.",
    ),
    Check(
        "gradient hook",
        GradientSums,
        lambda s: s.cp_size > 1 and s.comm_hook != "no",
        "DistributedDataParallelKwargs has comm_hook={s.comm_hook!r}, which rounds gradients before they are added "
        "up; the cp_size={s.cp_size} ranks of a sample hold parts of one gradient.",
        "Leave comm_hook at its default.",
    ),
)
