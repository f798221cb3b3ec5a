"""What every local attention kernel offers.

Dimensions: N = queries of a tile, M = its keys, H = query heads, G = K/V heads (G divides H; query head h uses K/V
head h // (H / G)), D = head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hf_cp.sequence.tiles import Tile


class Kernel(Protocol):
    """Attention of one tile, with its log-sum-exp, forward and backward."""

    name: str
    bands: bool
    """Takes any tile; if False, only what `cut_for_causal_kernel` makes of it."""

    def check(self, q: torch.Tensor, v: torch.Tensor) -> None:
        """Raises ValueError if the kernel cannot run on this dtype, device or head size."""

    def forward(
        self,
        q: torch.Tensor,  # [N, H, D]
        k: torch.Tensor,  # [M, G, D]
        v: torch.Tensor,  # [M, G, D]
        *,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [N, H, D], lse [N, H]) over the keys of the tile alone; lse is fp32 (fp64 for fp64)."""

    def backward(
        self,
        grad_out: torch.Tensor,  # [N, H, D]
        q: torch.Tensor,  # [N, H, D]
        k: torch.Tensor,  # [M, G, D]
        v: torch.Tensor,  # [M, G, D]
        out: torch.Tensor,  # [N, H, D], over *all* keys of the row, not only this tile's
        lse: torch.Tensor,  # [N, H], likewise
        *,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's part of (grad_q [N, H, D], grad_k [M, G, D], grad_v [M, G, D])."""
