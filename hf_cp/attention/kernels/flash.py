"""FlashAttention-2 (arXiv:2307.08691) with variable lengths and windows, as built into PyTorch or from `flash_attn`.

Both know every band and take many tiles in one call. Their backward pass recomputes P from the log-sum-exp that it is
given, so the final `out` and `lse` of a query give the exact part of a block of keys. fp16 and bf16 on CUDA.
"""

from __future__ import annotations

import importlib.util

import torch

from hf_cp import _compat
from hf_cp.attention.kernels.base import BackwardInputs, TensorKind, TileGroup

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = range(8, 257, 8)
_AMPERE = 8  # compute capability
NO_BOUND = -1  # flash-attn's way to write None


class FlashKernel:
    """What the flash kernels for CUDA have in common."""

    name: str
    bands = True
    varlen = True

    @classmethod
    def refusal(cls, kind: TensorKind) -> str | None:
        if kind.device.type != "cuda" or kind.dtype not in _DTYPES:
            return f"runs fp16 and bf16 on CUDA, got {kind.dtype} on {kind.device.type}"
        if kind.head_dim != kind.value_dim or kind.head_dim not in _HEAD_SIZES:
            return (
                f"needs one head size, a multiple of 8 up to 256, got {kind.head_dim} for queries and "
                f"{kind.value_dim} for values"
            )
        if torch.version.hip is None and torch.cuda.get_device_capability(kind.device)[0] < _AMPERE:
            return f"needs an Ampere GPU or a later one, got {torch.cuda.get_device_name(kind.device)}"
        return None


class AtenFlashKernel(FlashKernel):
    """`aten::_flash_attention_forward`, part of every CUDA build of PyTorch."""

    name = "sdpa"

    def __init__(self):
        self._forward, self._backward = _compat.aten_flash()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(q, k, v, *group.varlen, 0.0, False, False, scale=scale, **_aten_window(group))
        return out, tokens_first(lse)

    def backward(
        self, inputs: BackwardInputs, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # without dropout the random state is not read
        random_state = torch.empty(2, dtype=torch.uint64, device=inputs.q.device)
        unused = torch.empty(0, device=inputs.q.device)
        return self._backward(
            *heads_first_lse(inputs),
            *group.varlen,
            0.0,
            False,
            random_state,
            unused,
            scale=scale,
            **_aten_window(group),
        )


class FlashAttnKernel(FlashKernel):
    """The `flash_attn` package, version 2.7 or later; its backward pass can be deterministic."""

    name = "flash_attn"

    def __init__(self):
        self._forward, self._backward = _compat.flash_attn_varlen()

    @classmethod
    def refusal(cls, kind: TensorKind) -> str | None:
        if not flash_attn_is_installed():
            return "needs the flash-attn package, which is not installed (pip install 'hf-cp[flash]')"
        return super().refusal(kind)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = window_bounds(group)
        out, lse, *_ = self._forward(
            q, k, v, *group.varlen, 0.0, scale, False, window_size_left=left, window_size_right=right
        )
        return out, tokens_first(lse)

    def backward(
        self, inputs: BackwardInputs, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, right = window_bounds(group)
        grads = empty_gradients(inputs)
        self._backward(
            *heads_first_lse(inputs), *grads, *group.varlen, 0.0, scale, False,
            window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return grads


def flash_attn_is_installed() -> bool:
    """Whether `import flash_attn` would find the package; does not import it."""
    return importlib.util.find_spec("flash_attn") is not None


def window_bounds(group: TileGroup) -> tuple[int, int]:
    """The band in flash-attn's numbers: it is bottom-right aligned there too."""
    return tuple(NO_BOUND if bound is None else bound for bound in (group.tile.left, group.tile.right))


def _aten_window(group: TileGroup) -> dict[str, int]:
    left, right = window_bounds(group)
    return {"window_size_left": left, "window_size_right": right}


def tokens_first(lse: torch.Tensor) -> torch.Tensor:
    """[H, N] -> [N, H]; flash-attn writes +inf for a query that sees no key, we write -inf."""
    return lse.T.masked_fill(lse.T == torch.inf, -torch.inf)


def heads_first_lse(inputs: BackwardInputs) -> BackwardInputs:
    """As flash-attn's backward operators take them: a contiguous gradient, and lse [H, N]."""
    return inputs._replace(grad_out=inputs.grad_out.contiguous(), lse=inputs.lse.T.contiguous())


def empty_gradients(inputs: BackwardInputs) -> tuple[torch.Tensor, ...]:
    """Where an operator writes grad_q, grad_k and grad_v."""
    shapes = (inputs.q, inputs.k, inputs.v)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in shapes)
