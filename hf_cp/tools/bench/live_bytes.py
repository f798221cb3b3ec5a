"""Counts the bytes of all tensors that torch operators make, as long as they exist."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, `live` is what exists of all that was made inside, and `peak` its largest value since [`restart`].

    A storage counts once, however many tensors view it; those of `known` tensors do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in known}

    def restart(self) -> int:
        """The peak is what exists now; returns it."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._note(x.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
