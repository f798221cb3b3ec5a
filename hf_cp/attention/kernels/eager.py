"""The readable kernel: plain matrix products in fp32 or fp64, on any device. The reference for the others."""

from __future__ import annotations

import torch

from hf_cp.attention.kernels.base import BackwardInputs, TensorKind, TileGroup
from hf_cp.attention.merge import accumulator_dtype
from hf_cp.sequence.tiles import Tile


class EagerKernel:
    """Holds all scores of a tile at once (H x N x M): for tests, and for short samples where no other kernel runs."""

    name = "eager"
    bands = True
    varlen = False

    @classmethod
    def refusal(cls, kind: TensorKind) -> str | None:
        """Runs on everything."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_GRND, k_GMD, v_GMD = _by_kv_head(q, k.shape[1]), _heads_first(k), _heads_first(v)
        scores = _masked_scores(q_GRND, k_GMD, group.tile, scale)
        lse_GRN = scores.logsumexp(-1)
        probs = _probabilities(scores, lse_GRN)
        return _tokens_first(torch.einsum("grnm,gmd->grnd", probs, v_GMD)), lse_GRN.flatten(0, 1).T

    def backward(
        self, inputs: BackwardInputs, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_out, q, k, v, out, lse = inputs
        num_kv_heads = k.shape[1]
        q_GRND, k_GMD, v_GMD = _by_kv_head(q, num_kv_heads), _heads_first(k), _heads_first(v)
        out_GRND, grad_GRND = _by_kv_head(out, num_kv_heads), _by_kv_head(grad_out, num_kv_heads)
        lse_GRN = lse.T.reshape(num_kv_heads, -1, len(q))
        # P_ij = exp(s_ij - lse_i) with the query's final lse; dS = P (dP - delta), delta_i = sum_d dO_id O_id
        probs = _probabilities(_masked_scores(q_GRND, k_GMD, group.tile, scale), lse_GRN)
        delta = (grad_GRND * out_GRND).sum(-1, keepdim=True)
        grad_scores = probs * (torch.einsum("grnd,gmd->grnm", grad_GRND, v_GMD) - delta) * scale
        grad_q = torch.einsum("grnm,gmd->grnd", grad_scores, k_GMD)
        grad_k = torch.einsum("grnm,grnd->gmd", grad_scores, q_GRND)
        grad_v = torch.einsum("grnm,grnd->gmd", probs, grad_GRND)
        return _tokens_first(grad_q), grad_k.transpose(0, 1), grad_v.transpose(0, 1)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[M, G, D] -> [G, M, D], in the accumulator's dtype."""
    return x.transpose(0, 1).to(accumulator_dtype(x.dtype))


def _by_kv_head(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[N, H, D] -> [G, H / G, N, D]."""
    return _heads_first(x).unflatten(0, (num_kv_heads, -1))


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[G, H / G, N, D] -> [N, H, D]."""
    return x.flatten(0, 1).transpose(0, 1)


def _masked_scores(q_GRND: torch.Tensor, k_GMD: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    scores = torch.einsum("grnd,gmd->grnm", q_GRND, k_GMD) * scale
    if tile.is_full:
        return scores
    queries, keys = (torch.arange(n, device=scores.device) for n in (tile.q_len, tile.k_len))
    offset = keys - queries[:, None] - (tile.k_len - tile.q_len)
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if tile.right is not None:
        hidden |= offset > tile.right
    if tile.left is not None:
        hidden |= offset < -tile.left
    return scores.masked_fill(hidden, -torch.inf)


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse); a query that sees no key (lse = -inf) has only zeros. NaN stays NaN."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
