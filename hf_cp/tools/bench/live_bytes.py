"""Counts the bytes of all tensors that torch operators make, as long as they exist."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from hf_cp import _compat


class LiveBytes:
    """Inside, `live` is what exists of all that was made inside, and `peak` its largest value since [`restart`].

    A storage counts once, however many tensors view it; those of `known` tensors do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        self.live = self.peak = 0
        self._known = {_compat.storage_key(x) for x in known}

    def __enter__(self) -> LiveBytes:
        self._seeing = _compat.results_of_operators(self._note)
        self._seeing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._seeing.__exit__(*error)

    def restart(self) -> int:
        """The peak is what exists now; returns it."""
        self.peak = self.live
        return self.live

    def _note(self, tensor: torch.Tensor) -> None:
        key, storage = _compat.storage_key(tensor), tensor.untyped_storage()
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
