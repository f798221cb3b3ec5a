"""Runs a kernel over groups of tiles and adds the results up: what all engines have in common."""

from __future__ import annotations

import copy

import numpy as np
import torch

from hf_cp.attention.kernels import Kernel, TileGroup
from hf_cp.attention.merge import accumulator_dtype, empty_result, merge_


class TileForward:
    """Queries of a ring shard and their result so far; `add` takes in more keys.

    Attributes:
        out (`torch.Tensor`): [T, H, D], fp32 (fp64 for fp64), zero where no key was seen.
        lse (`torch.Tensor`): [T, H], likewise, -inf where no key was seen.
    """

    def __init__(self, q: torch.Tensor, kernel: Kernel, scale: float):
        self.q, self.kernel, self.scale = q, kernel, scale
        self.out, self.lse = empty_result(q)
        self._visited = np.zeros(len(q), dtype=bool)

    def heads(self, heads: slice) -> TileForward:
        """Some of the query heads; adds to the same result."""
        part = copy.copy(self)
        part._visited = self._visited.copy()
        part.q, part.out, part.lse = self.q[:, heads], self.out[:, heads], self.lse[:, heads]
        return part

    def add(self, k: torch.Tensor, v: torch.Tensor, groups: list[TileGroup]) -> None:
        """Takes in keys and values [M, G, D]; the tiles count their slots in k."""
        for group in groups:
            q_rows, k_rows = group.q_rows, group.k_rows
            out, lse = self.kernel.forward(self.q[q_rows], k[k_rows], v[k_rows], group=group, scale=self.scale)
            if _is_first_visit(self._visited, group):
                self.out[q_rows], self.lse[q_rows] = out.to(self.out.dtype), lse.to(self.lse.dtype)
            elif isinstance(q_rows, slice):
                merge_(self.out[q_rows], self.lse[q_rows], out, lse)
            else:  # numbered rows are a copy
                total_out, total_lse = self.out[q_rows], self.lse[q_rows]
                merge_(total_out, total_lse, out, lse)
                self.out[q_rows], self.lse[q_rows] = total_out, total_lse


class TileBackward:
    """The backward pass of [`TileForward`], with the final `out` and `lse` of every row.

    Attributes:
        grad_q (`torch.Tensor`): [T, H, D], the sum so far, fp32 (fp64 for fp64).
    """

    def __init__(
        self,
        q: torch.Tensor,  # [T, H, D]
        out: torch.Tensor,  # [T, H, D]
        lse: torch.Tensor,  # [T, H]
        grad_out: torch.Tensor,  # [T, H, D]
        kernel: Kernel,
        scale: float,
    ):
        self.q, self.out, self.lse, self.grad_out = q, out, lse, grad_out
        self.kernel, self.scale = kernel, scale
        self.grad_q = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype))
        self._visited = np.zeros(len(q), dtype=bool)

    def heads(self, heads: slice) -> TileBackward:
        """Some of the query heads; adds to the same gradient."""
        part = copy.copy(self)
        part._visited = self._visited.copy()
        for name in ("q", "out", "lse", "grad_out", "grad_q"):
            setattr(part, name, getattr(self, name)[:, heads])
        return part

    def visit(self, groups: list[TileGroup]) -> None:
        """Marks the queries of `groups` as having a part of their gradient, as `add` of these groups does."""
        for group in groups:
            _is_first_visit(self._visited, group)

    def add(self, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, groups: list[TileGroup]) -> None:
        """Adds the tiles' part of the gradients of k and v [M, G, D] to `grad_kv` [M, 2, G, D], in its dtype."""
        for group in groups:
            q_rows, k_rows = group.q_rows, group.k_rows
            rows = (self.grad_out[q_rows], self.q[q_rows], k[k_rows], v[k_rows], self.out[q_rows], self.lse[q_rows])
            grad_q, grad_k, grad_v = self.kernel.backward(*rows, group=group, scale=self.scale)
            if _is_first_visit(self._visited, group):
                self.grad_q[q_rows] = grad_q.to(self.grad_q.dtype)
            else:
                self.grad_q[q_rows] += grad_q
            grad_kv[k_rows, 0] += grad_k
            grad_kv[k_rows, 1] += grad_v


def _is_first_visit(visited: np.ndarray, group: TileGroup) -> bool:
    """Whether no query of the group was in one before: then its result is the sum so far, and need not be added."""
    is_first = not any(visited[tile.q_slots].any() for tile in group.tiles)
    for tile in group.tiles:
        visited[tile.q_slots] = True
    return is_first
