"""PyTorch's own flash attention, called below `scaled_dot_product_attention` because that hides the log-sum-exp.

On the CPU `aten::_scaled_dot_product_flash_attention_for_cpu` (every float type), on CUDA
`aten::_scaled_dot_product_flash_attention` (FlashAttention-2, arXiv:2307.08691; fp16 and bf16). Both take grouped K/V
heads as they are, and both backward operators recompute P from the log-sum-exp they are given, so that the final `out`
and `lse` of a row give the exact part of a single block of keys.
"""

from __future__ import annotations

import torch

from hf_cp.sequence.plan import Tile

_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_CUDA_HEAD_SIZES = range(8, 257, 8)


class SdpaKernel:
    """Full tiles and causal squares; memory grows with tokens, not with scores."""

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
        causal = _is_causal_square(tile)
        q, k, v = (_to_bhsd(x) for x in (q, k, v))
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return _from_bhsd(out), lse.squeeze(0).T

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
        causal = _is_causal_square(tile)
        grad_out, q, k, v, out = (_to_bhsd(x) for x in (grad_out, q, k, v, out))
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
        return tuple(_from_bhsd(grad) for grad in grads)


def _is_causal_square(tile: Tile) -> bool:
    if tile.is_full:
        return False
    assert tile.left is None and tile.right == 0 and tile.q_len == tile.k_len, f"not lowered: {tile}"
    return True


def _to_bhsd(x: torch.Tensor) -> torch.Tensor:
    """[N, H, D] -> [1, H, N, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _from_bhsd(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).transpose(0, 1)
