"""Local attention kernels behind one interface, [`Kernel`]."""

from __future__ import annotations

import torch

from hf_cp.attention.kernels.base import Kernel, TileGroup, plan_calls
from hf_cp.attention.kernels.cpu_flash import CpuFlashKernel
from hf_cp.attention.kernels.eager import EagerKernel
from hf_cp.attention.kernels.flash import AtenFlashKernel, FlashAttnKernel, flash_attn_is_installed

__all__ = [
    "AtenFlashKernel",
    "CpuFlashKernel",
    "EagerKernel",
    "FlashAttnKernel",
    "Kernel",
    "TileGroup",
    "choose_kernel",
    "plan_calls",
]


def choose_kernel(name: str, q: torch.Tensor, v: torch.Tensor) -> Kernel:
    """The kernel called `name`, checked against dtype, device and head size of q and v.

    `auto` is `flash_attn` on CUDA where the package is installed, else `sdpa` (PyTorch's own flash attention). It
    never falls back to the slow reference by itself.

    Raises:
        ValueError: the kernel cannot run on these tensors, or is not installed.
    """
    device = q.device.type
    if device not in ("cpu", "cuda") and name != "eager":
        raise ValueError(f"kernel={name!r} runs on cpu and cuda, got {device}. Use kernel='eager' for short rows.")
    if name == "auto":
        name = "flash_attn" if device == "cuda" and flash_attn_is_installed() else "sdpa"
    by_name = {
        "eager": EagerKernel,
        "flash_attn": FlashAttnKernel,
        "sdpa": CpuFlashKernel if device == "cpu" else AtenFlashKernel,
    }
    kernel = by_name[name]()
    kernel.check(q, v)
    return kernel
