"""Local attention kernels behind one interface, [`Kernel`]."""

from __future__ import annotations

import torch

from hf_cp.attention.kernels.base import Kernel
from hf_cp.attention.kernels.eager import EagerKernel
from hf_cp.attention.kernels.sdpa import SdpaKernel

__all__ = ["EagerKernel", "Kernel", "SdpaKernel", "choose_kernel"]


def choose_kernel(name: str, q: torch.Tensor, v: torch.Tensor) -> Kernel:
    """The kernel called `name`, checked against dtype, device and head size of q and v.

    `auto` is `sdpa`: it never falls back to the slow reference by itself.

    Raises:
        ValueError: the kernel cannot run on these tensors.
    """
    kernel = EagerKernel() if name == "eager" else SdpaKernel()
    kernel.check(q, v)
    return kernel
