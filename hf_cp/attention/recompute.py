"""How a recomputed layer gets back what its attention has computed and received before.

Attention asks its [`Memory`] before it does what is expensive (the kernels, an all-to-all of the forward pass), and
gives it the result. Without gradient checkpointing that is [`NoMemory`]. A checkpointed layer gives one that keeps
results in the first run ([`Recording`]) and hands them out in the second ([`Replay`]): neither a kernel nor a forward
transfer runs twice; the graph is built both times. The order of the calls is the same in both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

Tensors = tuple[torch.Tensor, ...]


class Memory(Protocol):
    """Of one run of a layer's attention."""

    def recall(self) -> Tensors | None:
        """The next result of the run before; `None` if it must be made."""

    def keep(self, tensors: Tensors) -> Tensors:
        """Takes a result that was made; returns it."""


class NoMemory:
    """Everything is made anew."""

    def recall(self) -> None:
        return None

    def keep(self, tensors: Tensors) -> Tensors:
        return tensors


class Recording(NoMemory):
    """Keeps results, without the graph that they are going to be part of."""

    def __init__(self):
        self.made: list[Tensors] = []

    def keep(self, tensors: Tensors) -> Tensors:
        self.made.append(tuple(x.detach() for x in tensors))
        return tensors


class Replay(NoMemory):
    """Hands out what a [`Recording`] has kept, in its order."""

    def __init__(self, kept: Iterable[Tensors], unpack: Callable[[torch.Tensor], torch.Tensor]):
        self._kept, self._unpack = iter(kept), unpack

    def recall(self) -> Tensors:
        return tuple(self._unpack(x) for x in next(self._kept))
