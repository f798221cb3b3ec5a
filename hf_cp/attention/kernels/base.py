"""What every local attention kernel offers, and the unit of work that it is given.

Dimensions: N = queries of a call, M = its keys, H = query heads, G = K/V heads (G divides H; query head h uses K/V
head h // (H / G)), D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hf_cp.sequence.tiles import Tile, TileTable, are_side_by_side, cut_for_causal_kernel, join_for_varlen_kernel

Index = slice | torch.Tensor
Slots = slice | np.ndarray


class VarlenArguments(NamedTuple):
    """flash-attn's description of several sequences in one call; borders are int32 [num_tiles + 1], on the device."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class TileGroup:
    """Tiles that one kernel call computes: they have the same band, and share neither queries nor keys.

    Attributes:
        tiles (`tuple[Tile, ...]`): a single one, unless the kernel is `varlen`.
        q_index, k_index (`slice` or int64 `torch.Tensor`): the slots of all tiles, one after another.
        q_slots (`slice` or int64 `np.ndarray`): `q_index`, on the host.
        varlen (`VarlenArguments`, *optional*): for `varlen` kernels.
    """

    tiles: tuple[Tile, ...]
    q_index: Index
    k_index: Index
    q_slots: Slots
    varlen: VarlenArguments | None = None

    @property
    def tile(self) -> Tile:
        """The band of all tiles; the tile itself if it is single."""
        return self.tiles[0]

    @cached_property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return TileTable.from_tiles(list(self.tiles)).area


class TensorKind(NamedTuple):
    """What decides whether a kernel can run: where the tensors are, their type and their head sizes."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int  # of queries and keys
    value_dim: int


class BackwardInputs(NamedTuple):
    """What a backward kernel gets of the queries and keys of its tiles.

    `out` and `lse` are over *all* keys of the sample, not only these tiles': P = exp(scores - lse) is then the final
    probability, and a tile's part of every gradient is exact.
    """

    grad_out: torch.Tensor  # [N, H, D]
    q: torch.Tensor  # [N, H, D]
    k: torch.Tensor  # [M, G, D]
    v: torch.Tensor  # [M, G, D]
    out: torch.Tensor  # [N, H, D]
    lse: torch.Tensor  # [N, H]


class Kernel(Protocol):
    """Attention of a group of tiles, with its log-sum-exp, forward and backward."""

    name: str
    bands: bool
    """Takes any tile; if False, only what `cut_for_causal_kernel` makes of it."""
    varlen: bool
    """Takes several tiles in one call."""

    @classmethod
    def refusal(cls, kind: TensorKind) -> str | None:
        """Why the kernel cannot run on such tensors, or is not installed: "runs ..., got ..."; None if it can."""

    def forward(
        self,
        q: torch.Tensor,  # [N, H, D]
        k: torch.Tensor,  # [M, G, D]
        v: torch.Tensor,  # [M, G, D]
        *,
        group: TileGroup,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [N, H, D], lse [N, H]) over the keys of the tiles alone; lse is fp32 (fp64 for fp64)."""

    def backward(
        self, inputs: BackwardInputs, *, group: TileGroup, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tiles' part of (grad_q [N, H, D], grad_k [M, G, D], grad_v [M, G, D])."""


def kernel_calls(tiles: Sequence[Tile], kernel: Kernel, device: torch.device) -> list[TileGroup]:
    """The kernel calls that compute `tiles`: as few as the kernel allows."""
    if not kernel.bands:
        tiles = [part for tile in tiles for part in cut_for_causal_kernel(tile)]
    if not kernel.varlen:
        return [TileGroup((tile,), tile.q_slots, tile.k_slots, tile.q_slots) for tile in tiles]
    return [_make_group(group, device) for group in join_for_varlen_kernel(tiles)]


def _make_group(tiles: Sequence[Tile], device: torch.device) -> TileGroup:
    q_lens, k_lens = [t.q_len for t in tiles], [t.k_len for t in tiles]
    borders = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device) for lens in (q_lens, k_lens)]
    varlen = VarlenArguments(*borders, max(q_lens), max(k_lens))
    q_slots, k_slots = _joined([t.q_slots for t in tiles]), _joined([t.k_slots for t in tiles])
    q_index, k_index = (s if isinstance(s, slice) else torch.from_numpy(s).to(device) for s in (q_slots, k_slots))
    return TileGroup(tuple(tiles), q_index, k_index, q_slots, varlen)


def _joined(slots: Sequence[slice]) -> Slots:
    """One slice if the slots are side by side (a view), else their numbers (a copy)."""
    if are_side_by_side(slots):
        return slice(slots[0].start, slots[-1].stop)
    return np.concatenate([np.arange(s.start, s.stop) for s in slots])
