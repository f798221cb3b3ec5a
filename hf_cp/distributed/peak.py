"""The most memory that this process has held."""

from __future__ import annotations

import resource
import sys

import torch

GIB = 1024**3


def peak_memory_bytes(device_type: str) -> int:
    """The peak so far, in bytes: of tensors on its GPU ("cuda"), or of the whole process elsewhere."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    # kilobytes everywhere but on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
