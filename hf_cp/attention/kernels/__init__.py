"""Local attention kernels behind one interface, [`Kernel`]."""

from __future__ import annotations

import torch

from hf_cp.attention.kernels.base import BackwardInputs, Kernel, TensorKind, TileGroup, kernel_calls
from hf_cp.attention.kernels.cpu_flash import CpuFlashKernel
from hf_cp.attention.kernels.eager import EagerKernel
from hf_cp.attention.kernels.flash import AtenFlashKernel, FlashAttnKernel
from hf_cp.attention.kernels.flash3 import FlashAttn3Kernel

__all__ = [
    "AtenFlashKernel",
    "BackwardInputs",
    "CpuFlashKernel",
    "EagerKernel",
    "FlashAttn3Kernel",
    "FlashAttnKernel",
    "Kernel",
    "TensorKind",
    "TileGroup",
    "choose_kernel",
    "fast_kernels",
    "kernel_calls",
]

_ON_CUDA = (FlashAttn3Kernel, FlashAttnKernel, AtenFlashKernel)


def choose_kernel(name: str, q: torch.Tensor, v: torch.Tensor) -> Kernel:
    """The kernel called `name`, checked against dtype, device and head size of q and v.

    `auto` is the first of [`fast_kernels`]. It never falls back to the slow reference by itself. All kernels take
    causal documents, grouped heads, windows and any scale; none takes a softcap or sinks, which the attention function
    of a patched model refuses.

    Raises:
        ValueError: the kernel cannot run on these tensors, or is not installed; names the nearest one that can.
    """
    kind = TensorKind(q.device, q.dtype, q.shape[-1], v.shape[-1])
    able = fast_kernels(kind)
    if name == "auto":
        name = able[0].name if able else "sdpa"
    sdpa = AtenFlashKernel if q.is_cuda else CpuFlashKernel
    kernel = {kernel.name: kernel for kernel in (FlashAttn3Kernel, FlashAttnKernel, sdpa, EagerKernel)}[name]
    reason = kernel.refusal(kind)
    if reason is None:
        return kernel()
    raise ValueError(f"kernel={name!r} {reason}. {_way_out(kind, able)}")


def fast_kernels(kind: TensorKind) -> list[type[Kernel]]:
    """The kernels that can run on such tensors, the reference aside, fastest first."""
    kernels = _ON_CUDA if kind.device.type == "cuda" else (CpuFlashKernel,)
    return [kernel for kernel in kernels if kernel.refusal(kind) is None]


def _way_out(kind: TensorKind, able: list[type[Kernel]]) -> str:
    if able:
        return f"Use kernel={able[0].name!r}."
    cast = "bf16, or " if fast_kernels(kind._replace(dtype=torch.bfloat16)) else ""
    return f"Use {cast}kernel='eager' for short samples."
