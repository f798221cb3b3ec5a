"""Adds up partial softmax results over blocks of keys.

With block outputs o_b and log-sum-exps l_b the exact result over two blocks is
    out = out + sigmoid(l_b - l) (o_b - out),    l = log(exp(l) + exp(l_b)),
since exp(l_b) / (exp(l) + exp(l_b)) = sigmoid(l_b - l). A query that has seen no key yet has out = 0 and l = -inf.
"""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half types, so that the error does not grow with the number of blocks; fp64 stays fp64."""
    return torch.promote_types(dtype, torch.float32)


def empty_result(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D] of zeros, lse [T, H] of -inf): the result over no keys at all, in the accumulator's dtype."""
    dtype = accumulator_dtype(q.dtype)
    return torch.zeros_like(q, dtype=dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)


def merge_(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Adds a block of keys to (out [n, H, D], lse [n, H]), in place.

    Nothing is ever differentiated through this: backward passes use the final `out` and `lse`.
    """
    block_lse = block_lse.to(lse.dtype)
    # two empty sides give -inf - -inf = nan: keep the zeros that are there; any other nan goes on
    weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -torch.inf, 0.0)
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)
