"""PyTorch's own flash attention, called below `scaled_dot_product_attention` because that hides the log-sum-exp.

On the CPU `aten::_scaled_dot_product_flash_attention_for_cpu` (every float type), on CUDA
`aten::_scaled_dot_product_flash_attention` (FlashAttention-2, arXiv:2307.08691; fp16 and bf16). Both take grouped K/V
heads as they are, and both backward operators recompute P from the log-sum-exp they are given, so that the final `out`
and `lse` of a row give the exact part of a single block of keys.
"""

from __future__ import annotations

import torch

from hf_cp.sequence.tiles import Tile

_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_CUDA_HEAD_SIZES = range(8, 257, 8)


class SdpaKernel:
    """Full tiles and (mirrored) causal squares; memory grows with tokens, not with scores."""

    name = "sdpa"
    bands = False

    def check(self, q: torch.Tensor, v: torch.Tensor) -> None:
        if v.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"kernel='sdpa' needs one head size, got {q.shape[-1]} for queries and {v.shape[-1]} for values. "
                "Use kernel='eager'."
            )
        if q.device.type == "cuda" and not (q.dtype in _CUDA_DTYPES and q.shape[-1] in _CUDA_HEAD_SIZES):
            raise ValueError(
                f"kernel='sdpa' on CUDA runs fp16 and bf16 with a head size that is a multiple of 8 up to 256, got "
                f"{q.dtype} and {q.shape[-1]}. Use bf16, or kernel='eager' for short rows."
            )
        if q.device.type not in ("cpu", "cuda"):
            raise ValueError(f"kernel='sdpa' runs on cpu and cuda, got {q.device.type}. Use kernel='eager'.")

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal, mirror = _square(tile)
        q, k, v = (_to_bhsd(x, mirror) for x in (q, k, v))
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        lse = lse.squeeze(0).T
        return _from_bhsd(out, mirror), lse.flip(0) if mirror else lse

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        causal, mirror = _square(tile)
        grad_out, q, k, v, out = (_to_bhsd(x, mirror) for x in (grad_out, q, k, v, out))
        lse = lse.flip(0) if mirror else lse
        if q.device.type == "cpu":
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, q, k, v, out, lse.T.unsqueeze(0), 0.0, causal, scale=scale
            )
        else:
            # one dense sequence: no cumulative lengths; without dropout the random state is not read
            unused = torch.empty(0, dtype=torch.int64, device=q.device)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_out, q, k, v, out, lse.T.contiguous().unsqueeze(0), None, None,
                tile.q_len, tile.k_len, 0.0, causal, unused, unused, scale=scale,
            )  # fmt: skip
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
