"""Runs a kernel over groups of tiles and adds the results up: what all engines have in common.

The result of one kernel call is gone before the next call starts.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from hf_cp.attention.kernels import Kernel, TileGroup
from hf_cp.attention.merge import accumulator_dtype, empty_result, merge_


class TileForward:
    """Queries of a ring shard and their result so far; `add` takes in more keys."""

    def __init__(self, q: torch.Tensor, kernel: Kernel, scale: float):
        self.q, self.kernel, self.scale = q, kernel, scale
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        self._visited = np.zeros(len(q), dtype=bool)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, H, D] and lse [T, H] so far, fp32 (fp64 for fp64); 0 and -inf where no key was seen."""
        if self._result is None:
            self._result = empty_result(self.q)
        return self._result

    def heads(self, heads: slice) -> TileForward:
        """Some of the query heads; adds to the same result."""
        part = copy.copy(self)
        part._visited = self._visited.copy()
        part.q, part._result = self.q[:, heads], tuple(x[:, heads] for x in self.result())
        return part

    def add(self, k: torch.Tensor, v: torch.Tensor, groups: list[TileGroup]) -> None:
        """Takes in keys and values [M, G, D]; the tiles count their slots in k."""
        for group in groups:
            self._add(k, v, group)

    def _add(self, k: torch.Tensor, v: torch.Tensor, group: TileGroup) -> None:
        q_rows, k_rows = group.q_rows, group.k_rows
        out, lse = self.kernel.forward(self.q[q_rows], k[k_rows], v[k_rows], group=group, scale=self.scale)
        is_first = _is_first_visit(self._visited, group)
        if self._result is None and len(out) == len(self.q):  # all queries: the result as it is
            dtype = accumulator_dtype(self.q.dtype)
            self._result = out.to(dtype), lse.to(dtype)
            return
        total_out, total_lse = self.result()
        if is_first:
            total_out[q_rows], total_lse[q_rows] = out.to(total_out.dtype), lse.to(total_lse.dtype)
        elif isinstance(q_rows, slice):
            merge_(total_out[q_rows], total_lse[q_rows], out, lse)
        else:  # numbered rows are a copy
            rows_out, rows_lse = total_out[q_rows], total_lse[q_rows]
            merge_(rows_out, rows_lse, out, lse)
            total_out[q_rows], total_lse[q_rows] = rows_out, rows_lse


class TileBackward:
    """The backward pass of [`TileForward`], with the final `out` and `lse` of every row."""

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
        self._grad_q: torch.Tensor | None = None
        self._visited = np.zeros(len(q), dtype=bool)

    def grad_q(self) -> torch.Tensor:
        """[T, H, D], the sum so far, fp32 (fp64 for fp64)."""
        if self._grad_q is None:
            self._grad_q = torch.zeros_like(self.q, dtype=accumulator_dtype(self.q.dtype))
        return self._grad_q

    def heads(self, heads: slice) -> TileBackward:
        """Some of the query heads; adds to the same gradient."""
        part = copy.copy(self)
        part._visited = self._visited.copy()
        for name in ("q", "out", "lse", "grad_out"):
            setattr(part, name, getattr(self, name)[:, heads])
        part._grad_q = self.grad_q()[:, heads]
        return part

    def visit(self, groups: list[TileGroup]) -> None:
        """Marks the queries of `groups` as having a part of their gradient, as `add` of these groups does."""
        for group in groups:
            _is_first_visit(self._visited, group)

    def add(self, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, groups: list[TileGroup]) -> None:
        """Adds the tiles' part of the gradients of k and v [M, G, D] to `grad_kv` [M, 2, G, D], in its dtype."""
        for group in groups:
            self._add(k, v, grad_kv, group)

    def _add(self, k: torch.Tensor, v: torch.Tensor, grad_kv: torch.Tensor, group: TileGroup) -> None:
        q_rows, k_rows = group.q_rows, group.k_rows
        rows = (self.grad_out[q_rows], self.q[q_rows], k[k_rows], v[k_rows], self.out[q_rows], self.lse[q_rows])
        grad_q, grad_k, grad_v = self.kernel.backward(*rows, group=group, scale=self.scale)
        is_first = _is_first_visit(self._visited, group)
        if self._grad_q is None and len(grad_q) == len(self.q):  # all queries: the gradient as it is
            self._grad_q = grad_q.to(accumulator_dtype(self.q.dtype))
        elif is_first:
            self.grad_q()[q_rows] = grad_q.to(self.grad_q().dtype)
        else:
            self.grad_q()[q_rows] += grad_q
        grad_kv[k_rows, 0] += grad_k
        grad_kv[k_rows, 1] += grad_v


def _is_first_visit(visited: np.ndarray, group: TileGroup) -> bool:
    """Whether no query of the group was in one before: then its result is the sum so far, and need not be added."""
    is_first = not visited[group.q_slots].any()
    visited[group.q_slots] = True
    return is_first
