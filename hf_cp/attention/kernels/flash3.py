"""FlashAttention-3 (arXiv:2407.08608) with variable lengths and windows, from the package `flash_attn_interface`.

The package has one operator for each direction, which its Python functions and PyTorch's own registration
(`torch.nn.attention.activate_flash_attention_impl("FA3")`) call too; so does this file. Windows, lse and the exact
part of a block of keys are as in FlashAttention-2. fp16 and bf16 on Hopper.

A build can leave parts out. One that has no backward pass, no windows or no variable lengths is refused before the
first step, not in its first backward pass.
"""

from __future__ import annotations

import importlib.util

import torch

from hf_cp.attention.kernels.base import BackwardInputs, TensorKind, TileGroup
from hf_cp.attention.kernels.flash import (
    FlashKernel,
    empty_gradients,
    heads_first_lse,
    tokens_first,
    window_bounds,
)

_HOPPER = 9  # compute capability
_NEEDED = {"BACKWARD": "a backward pass", "LOCAL": "windows", "VARLEN": "variable lengths"}
_HEAD_SIZES = (64, 96, 128, 192, 256)  # others are rounded up to one that is built


class FlashAttn3Kernel(FlashKernel):
    """`torch.ops.flash_attn_3`; its backward pass can be deterministic."""

    name = "flash_attn_3"

    def __init__(self):
        import flash_attn_interface  # noqa: F401 (registers the operators)

        self._forward, self._backward = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd

    @classmethod
    def refusal(cls, kind: TensorKind) -> str | None:
        if not flash_attn_3_is_installed():
            return (
                "needs FlashAttention-3 (the module flash_attn_interface, built from the `hopper` folder of "
                "flash-attention), which is not installed"
            )
        return super().refusal(kind) or _refusal_of_device(kind.device) or _refusal_of_build(kind.head_dim)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # one split: more would be added up in an order that depends on the longest sequence
        out, lse, *_ = self._forward(q, k, v, **_varlen(group), softmax_scale=scale, num_splits=1)
        return out, tokens_first(lse)

    def backward(
        self, inputs: BackwardInputs, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grads = empty_gradients(inputs)
        self._backward(
            *heads_first_lse(inputs), *grads, **_varlen(group), softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return grads


def flash_attn_3_is_installed() -> bool:
    """Whether `import flash_attn_interface` would find the module; does not import it."""
    return importlib.util.find_spec("flash_attn_interface") is not None


def _varlen(group: TileGroup) -> dict[str, torch.Tensor | int]:
    """What both operators take, under the names of their schemas."""
    left, right = window_bounds(group)
    return {**group.varlen._asdict(), "window_size_left": left, "window_size_right": right}


def _refusal_of_device(device: torch.device) -> str | None:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return f"runs on Hopper GPUs (compute capability 9), got {torch.cuda.get_device_name(device)}"
    return None


def _refusal_of_build(head_dim: int) -> str | None:
    """A build says what it leaves out in `flash_attn_config`; builds without this module are taken as complete."""
    if importlib.util.find_spec("flash_attn_config") is None:
        return None
    from flash_attn_config import CONFIG

    left_out = {name for name, is_out in CONFIG["build_flags"].items() if is_out}
    missing = [what for name, what in _NEEDED.items() if f"FLASHATTENTION_DISABLE_{name}" in left_out]
    sizes = [size for size in _HEAD_SIZES if f"FLASHATTENTION_DISABLE_HDIM{size}" not in left_out]
    if head_dim > max(sizes, default=0):
        missing.append(f"head size {head_dim}")
    return f"is installed, but built without {', '.join(missing)}" if missing else None
