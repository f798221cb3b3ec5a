"""Which ring rank takes which document whole, and which documents are cut: the `document` layout's rule.

A document that sits on one rank causes no traffic, so as few as possible are cut (zigzag over all ranks), the longest
ones first. The others go, longest first, to the rank that stays emptiest, where full is judged by the worse of its
share of the tokens and its share of the attention area; ties go to the lowest rank. The number of cut documents is the
smallest one tried for which area and tokens are even enough; if there is none, the one with the least full fullest
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

CUT = -1
_ENOUGH = 0.995  # mean over largest area of a rank
_PADDING = 0.004  # largest over mean number of tokens of a rank, minus 1


class Placement(NamedTuple):
    """Where documents go: `owners` int64 [num_docs], a ring rank or `CUT`."""

    owners: np.ndarray
    fullest: float  # largest share of a rank, times the number of ranks: 1 is perfect
    is_even: bool


def place_documents(doc_lengths: np.ndarray, ring_degree: int) -> np.ndarray:
    """The ring rank of every document, or `CUT` for those that are zigzagged over all ranks.

    Args:
        doc_lengths (`np.ndarray`): int64 [num_docs].
        ring_degree (`int`): number of ranks.

    >>> place_documents(np.array([100, 3, 4, 3]), 2).tolist()
    [-1, 0, 1, 0]
    """
    best: Placement | None = None
    by_length = np.lexsort((np.arange(len(doc_lengths)), -doc_lengths))
    for num_cut in _numbers_to_try(doc_lengths[by_length], ring_degree):
        placement = _place(doc_lengths, ring_degree, by_length[:num_cut], by_length[num_cut:])
        if best is None or placement.is_even or placement.fullest < best.fullest:
            best = placement
        if placement.is_even:
            break
    return best.owners


def _numbers_to_try(sorted_lengths: np.ndarray, ring_degree: int) -> Iterator[int]:
    """From the documents that cannot fit on one rank: every number at first, then in steps of a quarter, then all."""
    tokens = sorted_lengths.astype(np.float64)
    areas = attention_area(tokens)
    too_long = (tokens * ring_degree > tokens.sum() * (1 + _PADDING)) | (areas * ring_degree > areas.sum() / _ENOUGH)
    num_cut = int(too_long.sum())
    step = 1
    while num_cut < len(sorted_lengths):
        yield num_cut
        step = max(1, (num_cut - int(too_long.sum())) // 4)
        num_cut += step
    yield len(sorted_lengths)


def _place(lengths: np.ndarray, ring_degree: int, cut: np.ndarray, whole: np.ndarray) -> Placement:
    all_areas = attention_area(lengths.astype(np.float64))
    total_tokens, total_area = float(lengths.sum()), float(all_areas.sum())
    tokens, areas = zigzag_loads(lengths[cut], ring_degree)
    owners = np.full(len(lengths), CUT, dtype=np.int64)
    for doc in whole:
        share = np.maximum((tokens + lengths[doc]) / total_tokens, (areas + all_areas[doc]) / total_area)
        owners[doc] = rank = int(share.argmin())
        tokens[rank] += lengths[doc]
        areas[rank] += all_areas[doc]
    token_excess, area_excess = tokens.max() * ring_degree / total_tokens, areas.max() * ring_degree / total_area
    is_even = token_excess <= 1 + _PADDING and area_excess <= 1 / _ENOUGH
    return Placement(owners, max(token_excess, area_excess), bool(is_even))


def attention_area(length: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of a causal document."""
    return length * (length + 1) / 2


def zigzag_borders(lengths: np.ndarray, ring_degree: int, chunk: np.ndarray) -> np.ndarray:
    """First token of chunk number `chunk` of 2 * ring_degree in each document, int64 [*chunk.shape, num_docs]."""
    return chunk[..., None] * lengths // (2 * ring_degree)


def zigzag_loads(lengths: np.ndarray, ring_degree: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, attention area) of every rank, fp64 [ring_degree], of documents that are zigzagged over all ranks."""
    borders = zigzag_borders(lengths, ring_degree, np.arange(2 * ring_degree + 1))
    chunk_tokens = np.diff(borders, axis=0).sum(-1).astype(np.float64)
    chunk_areas = np.diff(attention_area(borders.astype(np.float64)), axis=0).sum(-1)
    first, last = slice(0, ring_degree), slice(None, ring_degree - 1, -1)
    return chunk_tokens[first] + chunk_tokens[last], chunk_areas[first] + chunk_areas[last]
