"""FlashAttention-2 (arXiv:2307.08691) with variable lengths and windows, as built into PyTorch or from `flash_attn`.

Both know every band and take many tiles in one call. Their backward pass recomputes P from the log-sum-exp that it is
given, so the final `out` and `lse` of a row give the exact part of a block of keys. fp16 and bf16 on CUDA.
"""

from __future__ import annotations

import importlib.util

import torch

from hf_cp.attention.kernels.base import TileGroup

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = range(8, 257, 8)
NO_BOUND = -1  # flash-attn's way to write None


class _FlashKernel:
    """What the two have in common."""

    name: str
    bands = True
    varlen = True

    def check(self, q: torch.Tensor, v: torch.Tensor) -> None:
        if q.device.type != "cuda" or q.dtype not in _DTYPES:
            raise ValueError(
                f"kernel={self.name!r} runs fp16 and bf16 on CUDA, got {q.dtype} on {q.device.type}. Use bf16, or "
                "kernel='eager' for short rows."
            )
        if q.shape[-1] != v.shape[-1] or q.shape[-1] not in _HEAD_SIZES:
            raise ValueError(
                f"kernel={self.name!r} needs one head size, a multiple of 8 up to 256, got {q.shape[-1]} for queries "
                f"and {v.shape[-1]} for values. Use kernel='eager'."
            )


class AtenFlashKernel(_FlashKernel):
    """`aten::_flash_attention_forward`, part of every CUDA build of PyTorch."""

    name = "sdpa"

    def __init__(self):
        self._forward = torch.ops.aten._flash_attention_forward
        self._backward = torch.ops.aten._flash_attention_backward

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(q, k, v, *group.varlen, 0.0, False, False, scale=scale, **_aten_window(group))
        return out, _rows_first(lse)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        group: TileGroup,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # without dropout the random state is not read
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        rows = (grad_out.contiguous(), q, k, v, out, lse.T.contiguous())
        return self._backward(
            *rows, *group.varlen, 0.0, False, random_state, unused, scale=scale, **_aten_window(group)
        )


class FlashAttnKernel(_FlashKernel):
    """The `flash_attn` package, version 2.7 or later; its backward pass can be deterministic."""

    name = "flash_attn"

    def __init__(self):
        if not flash_attn_is_installed():
            raise ValueError(
                "kernel='flash_attn' needs the flash-attn package, which is not installed: pip install 'hf-cp[flash]' "
                "or use kernel='sdpa' (PyTorch's own)."
            )
        from flash_attn import flash_attn_interface

        self._forward = flash_attn_interface._flash_attn_varlen_forward
        self._backward = flash_attn_interface._flash_attn_varlen_backward

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = _window(group)
        out, lse, *_ = self._forward(
            q, k, v, *group.varlen, 0.0, scale, False, window_size_left=left, window_size_right=right
        )
        return out, _rows_first(lse)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        group: TileGroup,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, right = _window(group)
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        rows = (grad_out.contiguous(), q, k, v, out, lse.T.contiguous())
        self._backward(
            *rows, *grads, *group.varlen, 0.0, scale, False,
            window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return grads


def flash_attn_is_installed() -> bool:
    """Whether `import flash_attn` would find the package; does not import it."""
    return importlib.util.find_spec("flash_attn") is not None


def _window(group: TileGroup) -> tuple[int, int]:
    """The band in flash-attn's numbers: it is bottom-right aligned there too."""
    return tuple(NO_BOUND if bound is None else bound for bound in (group.tile.left, group.tile.right))


def _aten_window(group: TileGroup) -> dict[str, int]:
    left, right = _window(group)
    return {"window_size_left": left, "window_size_right": right}


def _rows_first(lse: torch.Tensor) -> torch.Tensor:
    """[H, N] -> [N, H]; flash-attn writes +inf for a row that sees no key, we write -inf."""
    return lse.T.masked_fill(lse.T == torch.inf, -torch.inf)
