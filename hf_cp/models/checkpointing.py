"""Gradient checkpointing that repeats neither attention nor its communication.

transformers recomputes a whole decoder layer in the backward pass. With context parallelism that would send keys and
values once more. So each forward pass of the model gets a [`KeptAttention`], which travels to the layers as a keyword
argument beside the packed sample: a checkpointed layer puts there what its attention has computed and received, and
takes it back when it is recomputed.

Invariant: it belongs to one forward pass. What a layer keeps is given out once and then let go of, and it all goes
with the graph; forward passes in flight do not see each other. A layer that is not checkpointed keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hf_cp import _compat
from hf_cp.attention.recompute import Memory, NoMemory, Recording, Replay


class KeptAttention:
    """What the checkpointed layers of one forward pass keep of their attention.

    Args:
        on_host (`dict[int, bool]`): by number of a checkpointed layer, whether what it keeps waits in host memory.
    """

    def __init__(self, on_host: dict[int, bool]):
        self._on_host = on_host
        self._kept: dict[int, list[Any]] = {}  # per layer, in order of the calls; on the host: packed tensors

    @contextmanager
    def layer(self, number: int, device: torch.device) -> Iterator[Memory]:
        """The memory of this run of a layer's attention: the first run fills it, the next one empties it."""
        if number not in self._on_host:
            yield NoMemory()
            return
        pack, unpack = _moves(self._on_host[number], device)
        if number in self._kept:
            yield Replay(self._kept.pop(number), unpack)
            return
        memory = Recording()
        yield memory
        self._kept[number] = [tuple(pack(x) for x in tensors) for tensors in memory.made]  # all has arrived now


@torch.compiler.disable
def kept_attention(layers: Iterable[nn.Module]) -> KeptAttention | None:
    """For a forward pass that starts now; `None` if no layer is going to be checkpointed.

    The condition is that of [`transformers.modeling_layers.GradientCheckpointingLayer`].
    """
    if not torch.is_grad_enabled():
        return None
    checkpointed = {
        layer.self_attn.layer_idx: _offloads(layer)
        for layer in layers
        if getattr(layer, "gradient_checkpointing", False) and layer.training
    }
    return KeptAttention(checkpointed) if checkpointed else None


def _offloads(layer: nn.Module) -> bool:
    """Whether the layer's saved input goes to host memory: transformers then wraps torch's checkpoint function."""
    function = _compat.checkpoint_function(layer)
    return getattr(function, "func", function) is not checkpoint


def _moves(on_host: bool, device: torch.device) -> tuple[Callable, Callable]:
    """How a tensor is put away and taken back."""
    if not on_host:
        return (lambda tensor: tensor), (lambda tensor: tensor)
    hooks = save_on_cpu(pin_memory=device.type != "cpu", device_type=device.type)
    return hooks.pack_hook, hooks.unpack_hook
