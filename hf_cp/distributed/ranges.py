"""Names for profilers: what attention and its transfers do, as ranges in a trace of torch.profiler or Nsight.

Without an active profiler a range costs one flag that is read: nothing is recorded and no object is made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def named_range(name: str) -> AbstractContextManager:
    """`with named_range("hf_cp/ring/step1"):` around the work that shall carry this name."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else _NOTHING
