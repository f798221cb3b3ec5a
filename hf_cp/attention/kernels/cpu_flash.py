"""PyTorch's flash attention for the CPU, called below `scaled_dot_product_attention`, which hides the log-sum-exp.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes every float type and grouped K/V heads as they are. Its
backward operator recomputes P from the log-sum-exp that it is given, so the final `out` and `lse` of a query give the
exact part of a single block of keys.
"""

from __future__ import annotations

import torch

from hf_cp import _compat
from hf_cp.attention.kernels.base import BackwardInputs, TensorKind, TileGroup
from hf_cp.sequence.tiles import Tile


class CpuFlashKernel:
    """Full tiles and (mirrored) causal squares; memory grows with tokens, not with scores."""

    name = "sdpa"
    bands = False
    varlen = False

    def __init__(self):
        self._forward, self._backward = _compat.aten_cpu_flash()

    @classmethod
    def refusal(cls, kind: TensorKind) -> str | None:
        if kind.device.type != "cpu":
            return f"runs on cpu and cuda, got {kind.device.type}"
        if kind.head_dim != kind.value_dim:
            return f"needs one head size, got {kind.head_dim} for queries and {kind.value_dim} for values"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal, mirror = _square(group.tile)
        q, k, v = (_to_bhsd(x, mirror) for x in (q, k, v))
        out, lse = self._forward(q, k, v, 0.0, causal, scale=scale)
        lse = lse.squeeze(0).T
        return _from_bhsd(out, mirror), lse.flip(0) if mirror else lse

    def backward(
        self, inputs: BackwardInputs, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        causal, mirror = _square(group.tile)
        grad_out, q, k, v, out = (_to_bhsd(x, mirror) for x in inputs[:-1])
        lse = inputs.lse.flip(0) if mirror else inputs.lse
        grads = self._backward(grad_out, q, k, v, out, lse.T.unsqueeze(0), 0.0, causal, scale=scale)
        return tuple(_from_bhsd(grad, mirror) for grad in grads)


def _square(tile: Tile) -> tuple[bool, bool]:
    """(is causal, is mirrored). A mirrored causal square is a causal one with queries and keys in reverse order."""
    if tile.is_full:
        return False, False
    bounds = (tile.left, tile.right)
    assert bounds in ((None, 0), (0, None)) and tile.q_len == tile.k_len, f"not lowered: {tile}"
    return True, bounds == (0, None)


def _to_bhsd(x: torch.Tensor, mirror: bool) -> torch.Tensor:
    """[N, H, D] -> [1, H, N, D]; a view, unless the order is reversed."""
    return (x.flip(0) if mirror else x).transpose(0, 1).unsqueeze(0)


def _from_bhsd(x: torch.Tensor, mirror: bool) -> torch.Tensor:
    x = x.squeeze(0).transpose(0, 1)
    return x.flip(0) if mirror else x
