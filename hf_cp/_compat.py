"""Every private name of another library that this package reaches for: one function each, and a test each.

`tests/test_compat.py` runs every one on the installed versions; setup.cfg's upper bounds are those for which it has
passed, and are raised when it passes on newer ones. Libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

# torch ------------------------------------------------------------------------------------------------------------


def group_time_limit(group: Any, device_type: str) -> timedelta:
    """The time limit of a process group's collectives; torch has no public reader."""
    import torch

    return group._get_backend(torch.device(device_type)).options._timeout


def is_profiling() -> bool:
    """Whether a profiler records in this thread; the public `record_function` costs microseconds without one too."""
    import torch

    return torch.autograd._profiler_enabled()


def parameters_of(module: Any) -> dict[str, Any]:
    """The dict in which a module's own parameters stand, to put non-leaf tensors there while its forward runs."""
    return module._parameters


class ForwardBackward(NamedTuple):
    """The two operators of a kernel."""

    forward: Callable
    backward: Callable


def aten_cpu_flash() -> ForwardBackward:
    """Flash attention on the CPU, below `scaled_dot_product_attention`, which hides the log-sum-exp."""
    import torch

    name = "_scaled_dot_product_flash_attention_for_cpu"
    return ForwardBackward(getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward"))


def aten_flash() -> ForwardBackward:
    """FlashAttention-2 as built into PyTorch for CUDA, with variable lengths and log-sum-exp."""
    import torch

    return ForwardBackward(torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)


def storage_key(tensor: Any) -> int:
    """What is equal for tensors that share their storage, also where it is empty."""
    return tensor.untyped_storage()._cdata


@contextmanager
def results_of_operators(see: Callable[[Any], None]) -> Iterator[None]:
    """Inside, `see` gets every tensor that an operator gives back, below autograd."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    see(x)
            return result

    with Seeing():
        yield


# accelerate -------------------------------------------------------------------------------------------------------


def forget_accelerate_state() -> None:
    """Lets accelerate find out anew what was launched; it keeps what it found first for the life of the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


# flash-attn -------------------------------------------------------------------------------------------------------


def flash_attn_varlen() -> ForwardBackward:
    """The functions below flash-attn's public ones, which do not give the log-sum-exp of a backward pass."""
    from flash_attn import flash_attn_interface

    return ForwardBackward(
        flash_attn_interface._flash_attn_varlen_forward, flash_attn_interface._flash_attn_varlen_backward
    )


# transformers -----------------------------------------------------------------------------------------------------


def checkpoint_function(layer: Any) -> Any:
    """The function with which transformers checkpoints a decoder layer."""
    return layer._gradient_checkpointing_func


@contextmanager
def checkpointed_through(layer: Any, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside, what transformers checkpoints of a decoder layer goes through `wrap` first."""
    function = vars(layer).get("_gradient_checkpointing_func")
    if function is None:  # checkpointing was never switched on
        yield
        return
    layer._gradient_checkpointing_func = lambda run, *args, **kwargs: function(wrap(run), *args, **kwargs)
    try:
        yield
    finally:
        layer._gradient_checkpointing_func = function


def attention_implementation(config: Any) -> str:
    """The name of the attention that a model was loaded with; the public setter has no getter."""
    return config._attn_implementation
