"""Which ring rank takes which document whole, and which documents are cut: the `document` layout's rule.

A document that sits on one rank causes no traffic, so as few as possible are cut (zigzag over all ranks), the longest
ones first. The others go, longest first, to the rank that stays emptiest, where full is judged by the worse of its
share of the tokens and its share of the attention area; ties go to the lowest rank. Then the fullest rank swaps a
document with the emptiest one as long as that makes the fuller of the two less full; where that is not enough, a
document of the fullest rank is cut, the one that evens out most. The number of longest documents that are cut is the
smallest one tried for which area and tokens get even enough; if there is none, the one with the least full fullest
rank.

Documents of 8, 2 and 2 tokens on 2 ranks: the first alone has 36 of 42 pairs of attention area, so it is cut in 4:

    chunk     0 1 | 2 3 | 4 5 | 6 7      rank 0 has 3 + 15 pairs, rank 1 has 7 + 11,
    rank        0     1     1     0      and each gets one of the short documents
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

CUT = -1
NOTHING = -1  # no document
_ENOUGH = 0.991  # mean over largest area of a rank
_PADDING = 0.0048  # largest over mean number of tokens of a rank, minus 1
_MOST_CUTS = 64  # beside the longest documents; keeps the search short with many ranks
_MOST_LOOKED_AT = 512  # documents of a rank that are looked at for a swap: all pairs of two ranks' are compared
_MOST_SWAPS = 512


class Loads(NamedTuple):
    """Shares of the sample's tokens and of its attention area, times the number of ranks: 1 is perfectly even."""

    tokens: np.ndarray
    areas: np.ndarray

    @property
    def fullness(self) -> np.ndarray:
        return np.maximum(self.tokens, self.areas)

    @property
    def is_even(self) -> bool:
        return bool(self.tokens.max() <= 1 + _PADDING and self.areas.max() <= 1 / _ENOUGH)


def place_documents(doc_lengths: np.ndarray, ring_degree: int) -> np.ndarray:
    """The ring rank of every document, or `CUT` for those that are zigzagged over all ranks.

    Args:
        doc_lengths (`np.ndarray`): int64 [num_docs].
        ring_degree (`int`): number of ranks.

    >>> place_documents(np.array([100, 4, 4, 4, 4]), 2).tolist()
    [-1, 0, 1, 0, 1]
    """
    doc_areas = causal_area(doc_lengths.astype(np.float64))
    documents = Loads(doc_lengths * ring_degree / doc_lengths.sum(), doc_areas * ring_degree / doc_areas.sum())
    by_length = np.lexsort((np.arange(len(doc_lengths)), -doc_lengths))
    best_owners, best_fullness = None, np.inf
    for num_cut in _numbers_to_try(documents, by_length):
        cut_tokens, cut_areas = zigzag_loads(doc_lengths[by_length[:num_cut]], ring_degree)
        ranks = Loads(cut_tokens * ring_degree / doc_lengths.sum(), cut_areas * ring_degree / doc_areas.sum())
        owners = _place(documents, ranks, by_length[num_cut:])
        _swap(documents, ranks, owners)
        _cut_more(doc_lengths, documents, ranks, owners)
        if ranks.is_even:
            return owners
        if ranks.fullness.max() < best_fullness:
            best_owners, best_fullness = owners, ranks.fullness.max()
    return best_owners


def _numbers_to_try(documents: Loads, by_length: np.ndarray) -> Iterator[int]:
    """From the documents that cannot fit on one rank: every number at first, then in growing steps, then all."""
    first = int(((documents.tokens > 1 + _PADDING) | (documents.areas > 1 / _ENOUGH)).sum())
    num_cut = first
    while num_cut < len(by_length):
        yield num_cut
        num_cut += 1 if num_cut < first + 16 else (num_cut - first) // 2
    yield len(by_length)


def _place(documents: Loads, ranks: Loads, whole: np.ndarray) -> np.ndarray:
    """Gives each document of `whole`, in order, to the rank that stays emptiest; adds it to `ranks`."""
    owners = np.full(len(documents.tokens), CUT, dtype=np.int64)
    for doc in whole:
        tokens, areas = documents.tokens[doc], documents.areas[doc]
        owners[doc] = rank = int(np.maximum(ranks.tokens + tokens, ranks.areas + areas).argmin())
        ranks.tokens[rank] += tokens
        ranks.areas[rank] += areas
    return owners


def _swap(documents: Loads, ranks: Loads, owners: np.ndarray) -> None:
    """Evens out `ranks`, in place: the fullest rank gives a document to the emptiest, for another one or for none."""
    for _ in range(min(len(owners), _MOST_SWAPS)):
        full, empty = int(ranks.fullness.argmax()), int(ranks.fullness.argmin())
        given, taken = _some(owners == full, documents), np.append(_some(owners == empty, documents), NOTHING)
        if ranks.is_even or len(given) == 0:
            return
        moved = [  # what leaves the fuller rank, [given, taken]
            load[given][:, None] - np.where(taken == NOTHING, 0, load[taken]) for load in documents
        ]
        sides = [side for m, load in zip(moved, ranks, strict=True) for side in (load[full] - m, load[empty] + m)]
        fuller = np.maximum.reduce(sides)
        a, b = np.unravel_index(fuller.argmin(), fuller.shape)
        if fuller[a, b] >= ranks.fullness[full]:
            return
        owners[given[a]] = empty
        if taken[b] != NOTHING:
            owners[taken[b]] = full
        for m, load in zip(moved, ranks, strict=True):
            load[full] -= m[a, b]
            load[empty] += m[a, b]


def _some(is_wanted: np.ndarray, documents: Loads) -> np.ndarray:
    """The wanted documents in order; of more than `_MOST_LOOKED_AT`, as many of all lengths."""
    docs = np.flatnonzero(is_wanted)
    if len(docs) <= _MOST_LOOKED_AT:
        return docs
    by_length = docs[np.argsort(documents.tokens[docs], kind="stable")]
    return np.sort(by_length[np.linspace(0, len(docs) - 1, _MOST_LOOKED_AT).astype(np.int64)])


def _cut_more(doc_lengths: np.ndarray, documents: Loads, ranks: Loads, owners: np.ndarray) -> None:
    """Evens out `ranks`, in place: documents of the fullest rank are spread over all ranks, one after another.

    Each time it is the one that leaves the least full fullest rank; among equals the shortest, then the first.
    """
    size = len(ranks.tokens)
    most = min(2 * size, _MOST_CUTS)
    too_full = (ranks.tokens > 1 + _PADDING) | (ranks.areas > 1 / _ENOUGH)
    if too_full.sum() > most:
        return  # out of reach
    for _ in range(most):
        full = int(ranks.fullness.argmax())
        docs = np.flatnonzero(owners == full)
        if ranks.is_even or len(docs) == 0:
            return
        docs = docs[np.lexsort((docs, doc_lengths[docs]))]
        left = [load[full] - doc[docs] * (1 - 1 / size) for load, doc in zip(ranks, documents, strict=True)]
        others = [np.delete(load, full).max() + doc[docs] / size for load, doc in zip(ranks, documents, strict=True)]
        doc = docs[np.maximum.reduce([*left, *others]).argmin()]
        owners[doc] = CUT
        for load, share, spread in zip(ranks, documents, zigzag_loads(doc_lengths[[doc]], size), strict=True):
            load[full] -= share[doc]
            load += share[doc] * spread / spread.sum()


def causal_area(length: Any) -> Any:
    """Visible (query, key) pairs of a causal document of `length` tokens, 1 + 2 + ... + length; arrays too.

    >>> causal_area(4)
    10
    """
    return length * (length + 1) // 2


def zigzag_borders(lengths: np.ndarray, ring_degree: int, chunk: np.ndarray) -> np.ndarray:
    """First token of chunk number `chunk` of 2 * ring_degree in each document, int64 [*chunk.shape, num_docs]."""
    return chunk[..., None] * lengths // (2 * ring_degree)


def zigzag_loads(lengths: np.ndarray, ring_degree: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, attention area) of every rank, fp64 [ring_degree], of documents that are zigzagged over all ranks."""
    borders = zigzag_borders(lengths, ring_degree, np.arange(2 * ring_degree + 1))
    chunk_tokens = np.diff(borders, axis=0).sum(-1).astype(np.float64)
    chunk_areas = np.diff(causal_area(borders.astype(np.float64)), axis=0).sum(-1)
    first, last = slice(0, ring_degree), slice(None, ring_degree - 1, -1)
    return chunk_tokens[first] + chunk_tokens[last], chunk_areas[first] + chunk_areas[last]
