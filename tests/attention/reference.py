"""Attention of a whole packed row in one process, dense and masked, with autograd's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Attention(NamedTuple):
    """Output and gradients of one row, [tokens, heads, head_dim] each."""

    out: torch.Tensor
    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_v: torch.Tensor


def random_row(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v, grad_out) of a whole row, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return tuple(
        torch.randn(num_tokens, h, head_dim, generator=generator, dtype=torch.float64).to(dtype) for h in heads
    )


def visible(doc_lengths: Sequence[int], causal: bool = True, window: int | None = None) -> torch.Tensor:
    """bool [tokens, tokens]: which query (row) sees which key (column)."""
    docs = torch.repeat_interleave(torch.arange(len(doc_lengths)), torch.tensor(doc_lengths))
    positions = torch.cat([torch.arange(length) for length in doc_lengths])
    distance = positions[:, None] - positions
    mask = docs[:, None] == docs
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance < window
    return mask


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    doc_lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Attention:
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    probs = scores.masked_fill(~visible(doc_lengths, causal, window), -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", probs, values)
    out.backward(grad_out)
    return Attention(out.detach(), q.grad, k.grad, v.grad)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value (or 0.01: a document of one token has zero gradients)."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=0.01))


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    return float((actual - expected).norm() / expected.norm())
