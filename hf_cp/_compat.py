"""Every private name of another library that this package reaches for: one function each, and a test each.

`tests/test_compat.py` runs every one on the installed versions; setup.cfg's upper bounds are those for which it has
passed, and are raised when it passes on newer ones. Libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

# torch --------------------------------------------------------------------------------------------------------------


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


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists and dicts, and their structure."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def unflatten_tree(leaves: list[Any], structure: Any) -> Any:
    """The nested structure with these leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


# accelerate ---------------------------------------------------------------------------------------------------------


def forget_accelerate_state() -> None:
    """Lets accelerate find out anew what was launched; it keeps what it found first for the life of the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def is_prepared(model: Any) -> bool:
    """Whether accelerate has set up a model: it then leaves it as it is."""
    return getattr(model, "_is_accelerate_prepared", False)


def forget_prepared(model: Any) -> None:
    """Lets accelerate set up a model once more."""
    vars(model).pop("_is_accelerate_prepared", None)


def mark_prepared(loader: Any) -> None:
    """`Accelerator.prepare` takes a loader as it is: it does not split its batches over the processes once more."""
    loader._is_accelerate_prepared = True


# flash-attn ---------------------------------------------------------------------------------------------------------


def flash_attn_varlen() -> ForwardBackward:
    """The functions below flash-attn's public ones, which do not give the log-sum-exp of a backward pass."""
    from flash_attn import flash_attn_interface

    return ForwardBackward(
        flash_attn_interface._flash_attn_varlen_forward, flash_attn_interface._flash_attn_varlen_backward
    )


# transformers -------------------------------------------------------------------------------------------------------


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


def on_device(trainer: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with its tensors on the Trainer's device (and in the type that DeepSpeed wants)."""
    return {name: trainer._prepare_input(value) for name, value in batch.items()}


# DeepSpeed ----------------------------------------------------------------------------------------------------------


def knows_grad_norm(optimizer: Any) -> bool:
    """Whether a DeepSpeed engine finds the gradient norm at its optimizer."""
    return hasattr(optimizer, "_global_grad_norm")


def note_grad_norm(optimizer: Any, norm: float | None) -> None:
    """Puts the gradient norm where a DeepSpeed engine looks after a step."""
    optimizer._global_grad_norm = norm


# TRL ----------------------------------------------------------------------------------------------------------------


def trained_tokens(trainer: Any) -> int:
    """Tokens that a SFTTrainer has counted in training."""
    return trainer._total_train_tokens


def note_trained_tokens(trainer: Any, num_tokens: int) -> None:
    """Sets that number, also in the log that is to come."""
    trainer._total_train_tokens = num_tokens
    trainer._metrics["train"]["num_tokens"] = [num_tokens]
