"""Which token of a packed sample sits where: the one place that knows.

A packed sample is a list of documents, concatenated. `SequenceLayout` is a frozen value, a pure function of (document
lengths, config): it uses integers only, needs no processes, and is the same on every rank. Ids, labels, positions,
attention plans and the way back (`unshard`) all come from it; nothing is ever read back from local tensors, where a
zigzag shard with positions [0, 1, 6, 7] looks like two documents.

The sample is laid out over the ring axis; a ring shard is padded once, at its end, to a common length that divides by
`ulysses_degree`, and cut into that many contiguous pieces. After the all-to-all over the Ulysses axis the ring shard
is therefore in order. One document of 8 tokens on ring 2 x Ulysses 2, zigzag (chunks of 8 / 2R = 2 tokens):

    token        0 1 2 3 4 5 6 7
    ring rank    0 0 1 1 1 1 0 0      shard 0: [0 1 6 7], shard 1: [2 3 4 5]
    cp_rank      0 0 2 2 3 3 1 1      cp_rank = ring_rank * ulysses_degree + ulysses_rank

>>> layout = SequenceLayout([5, 3], ContextParallelConfig(ring_degree=2, layout="zigzag"))
>>> layout.indices(0).tolist(), layout.indices(1).tolist()
([0, 3, 4, 7], [1, 2, 5, 6])
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.placement import CUT, place_documents, zigzag_borders, zigzag_loads


class Segments(NamedTuple):
    """Runs of tokens of one ring shard, in the order in which they sit there (all int64 arrays of equal length).

    Run n holds the tokens `start, start + step, ...` (`length` of them) of document `doc`; `start` counts from the
    document's first token. Within a document the runs are in rising order.
    """

    doc: np.ndarray
    start: np.ndarray
    length: np.ndarray
    step: int


class SequenceLayout:
    """Maps the tokens of one packed sample to context-parallel ranks and back.

    Args:
        doc_lengths (`Sequence[int]`): tokens of each document of the sample, in order; every length is at least 1.
        config (`ContextParallelConfig`): gives the degrees and the layout rule:
            `contiguous` (ring rank r holds the r-th slice of the sample), `striped` (token i of the sample on ring
            rank i mod R; Striped Attention, arXiv:2311.09431), `zigzag` (every document is cut in 2R chunks
            [floor(iL/2R), floor((i+1)L/2R)), ring rank r holds chunks r and 2R-1-r of each) or `document` (documents
            stay whole on one rank, the longest ones are zigzagged; see [`place_documents`]).

    Attributes:
        doc_lengths (`tuple[int, ...]`): as given.
        layout (`str`): the rule, with `auto` resolved.
        ring_degree, ulysses_degree, cp_size (`int`): as in the config.
        num_tokens (`int`): tokens of the sample, without padding.
        local_length (`int`): slots of one rank, equal on all ranks of the context-parallel group.
        ring_shard_length (`int`): slots of one ring shard, `local_length * ulysses_degree`.
        cu_seqlens (`torch.Tensor`): int32 [num_docs + 1], global document borders, on the host.
        max_seqlen (`int`): the longest document.
        digest (`str`): the same on two ranks exactly if their layouts are the same.

    Raises:
        ValueError: there is no document, or a length is not a positive integer.
        AttributeError: an attribute is assigned; a layout is frozen. (No dataclass: FSDP copies those field by field.)
    """

    def __init__(self, doc_lengths: Sequence[int], config: ContextParallelConfig):
        lengths = tuple(int(length) for length in doc_lengths)
        if not lengths:
            raise ValueError(
                "A packed sample needs at least one document, got an empty list. Drop empty samples before sharding."
            )
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(
                    f"Document {index} has {length} tokens; a document needs at least 1. Drop empty ones first."
                )
        vars(self).update(
            doc_lengths=lengths,
            layout=config.resolved_layout,
            ring_degree=config.ring_degree,
            ulysses_degree=config.ulysses_degree,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A SequenceLayout is frozen, so {name} cannot be set. Make another one.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceLayout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def doc_starts(self) -> np.ndarray:
        """int64 [num_docs + 1]: first token of every document, and the end."""
        return np.concatenate([[0], np.cumsum(self.doc_lengths)]).astype(np.int64)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.doc_starts[-1])

    @cached_property
    def local_length(self) -> int:
        # the fullest ring shard, cut into ulysses_degree pieces of equal length (rounded up: the rest is padding)
        return -(-int(_RULES[self.layout].shard_lengths(self).max()) // self.ulysses_degree)

    @property
    def ring_shard_length(self) -> int:
        return self.local_length * self.ulysses_degree

    @property
    def cp_size(self) -> int:
        return self.ring_degree * self.ulysses_degree

    @property
    def max_seqlen(self) -> int:
        return max(self.doc_lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.from_numpy(self.doc_starts.astype(np.int32))

    @cached_property
    def digest(self) -> str:
        text = f"{self.layout}/{self.ring_degree}/{self.ulysses_degree}/{self.doc_lengths}"
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def owners(self) -> np.ndarray:
        """int64 [num_docs]: the ring rank that holds a whole document in the `document` layout, -1 if it is cut."""
        return place_documents(np.asarray(self.doc_lengths, dtype=np.int64), self.ring_degree)

    def segments(self, ring_rank: int) -> Segments:
        """The runs of tokens that ring shard `ring_rank` holds, in order."""
        if not 0 <= ring_rank < self.ring_degree:
            raise ValueError(
                f"ring_rank={ring_rank} is outside of the ring of {self.ring_degree}. Use 0 to {self.ring_degree - 1}."
            )
        return _RULES[self.layout].segments(self, ring_rank)

    def indices(self, cp_rank: int) -> torch.Tensor:
        """int64 [local_length]: the token of the sample in each local slot, -1 for padding."""
        if not 0 <= cp_rank < self.cp_size:
            raise ValueError(
                f"cp_rank={cp_rank} is outside of the context-parallel group of {self.cp_size} "
                f"(ring {self.ring_degree} x ulysses {self.ulysses_degree}). Use 0 to {self.cp_size - 1}."
            )
        ring_rank, ulysses_rank = divmod(cp_rank, self.ulysses_degree)
        doc, start, length, step = self.segments(ring_rank)
        tokens = ranges(self.doc_starts[doc] + start, length, step)
        shard = np.full(self.ring_shard_length, -1, dtype=np.int64)
        shard[: len(tokens)] = tokens
        return torch.from_numpy(shard[ulysses_rank * self.local_length :][: self.local_length].copy())

    def document_ids(self, cp_rank: int) -> torch.Tensor:
        """int64 [local_length]: the document of each local slot, -1 for padding."""
        indices = self.indices(cp_rank).numpy()
        # a padding index (-1) lies before the first border and so comes out as -1
        return torch.from_numpy(np.searchsorted(self.doc_starts, indices, side="right") - 1)

    def position_ids(self, cp_rank: int) -> torch.Tensor:
        """int64 [local_length]: position inside its document, 0 for padding."""
        indices, docs = self.indices(cp_rank), self.document_ids(cp_rank)
        return torch.where(docs < 0, 0, indices - torch.from_numpy(self.doc_starts)[docs])

    def shard(self, tensor: torch.Tensor, cp_rank: int, dim: int = 0, pad_value: float = 0) -> torch.Tensor:
        """The slots of `cp_rank`, out of a whole sample; the inverse is [`SequenceLayout.unshard`].

        Args:
            tensor (`torch.Tensor`): `num_tokens` entries along `dim`.
            cp_rank (`int`): rank in the context-parallel group.
            dim (`int`): the token dimension.
            pad_value (`float`): written into padding slots.
        """
        if tensor.shape[dim] != self.num_tokens:
            raise ValueError(
                f"The tensor has {tensor.shape[dim]} entries along dim {dim}, the sample has {self.num_tokens} "
                "tokens. Pass the whole sample."
            )
        indices = self.indices(cp_rank).to(tensor.device)
        local = tensor.index_select(dim, indices.clamp(min=0))
        is_pad = (indices < 0).view([-1 if d == dim % tensor.ndim else 1 for d in range(tensor.ndim)])
        return local.masked_fill(is_pad, pad_value)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The whole sample, out of the `cp_size` local tensors in rank order; padding is dropped."""
        if len(shards) != self.cp_size or any(t.shape[dim] != self.local_length for t in shards):
            raise ValueError(
                f"Expected {self.cp_size} shards of {self.local_length} slots along dim {dim}, got {len(shards)} of "
                f"{sorted({t.shape[dim] for t in shards})} slots. Pass the local tensor of every cp_rank, in order."
            )
        local = torch.cat(list(shards), dim)
        return local.index_select(dim, torch.from_numpy(self.slots).to(local.device))

    @cached_property
    def slots(self) -> np.ndarray:
        """int64 [num_tokens]: the slot of each token of the sample in the concatenated shards of all ranks."""
        indices = torch.cat([self.indices(rank) for rank in range(self.cp_size)]).numpy()
        slots = np.empty(self.num_tokens, dtype=np.int64)
        is_token = indices >= 0
        slots[indices[is_token]] = np.flatnonzero(is_token)
        return slots

    def __repr__(self) -> str:
        return (
            f"SequenceLayout({len(self.doc_lengths)} documents, {self.num_tokens} tokens, {self.layout}, "
            f"ring {self.ring_degree} x ulysses {self.ulysses_degree}, {self.local_length} slots a rank)"
        )


def ranges(start: np.ndarray, length: np.ndarray, step: int = 1) -> np.ndarray:
    """Concatenated `start, start + step, ...` runs.

    >>> ranges(np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    ends = np.cumsum(length)
    offset = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - length, length)
    return np.repeat(start, length) + step * offset


def _nonempty(doc: np.ndarray, start: np.ndarray, length: np.ndarray, step: int = 1) -> Segments:
    keep = length > 0
    return Segments(doc[keep], start[keep], length[keep], step)


class _Rule(NamedTuple):
    """A layout rule: the runs of one ring shard, and the tokens of every ring shard (int64 [ring_degree])."""

    segments: Callable[[SequenceLayout, int], Segments]
    shard_lengths: Callable[[SequenceLayout], np.ndarray]


def _contiguous_segments(layout: SequenceLayout, ring_rank: int) -> Segments:
    size = -(-layout.num_tokens // layout.ring_degree)
    begin, end = ring_rank * size, min((ring_rank + 1) * size, layout.num_tokens)
    starts, ends = layout.doc_starts[:-1], layout.doc_starts[1:]
    first, last = np.maximum(starts, begin), np.minimum(ends, end)
    return _nonempty(np.arange(len(starts)), first - starts, last - first)


def _contiguous_lengths(layout: SequenceLayout) -> np.ndarray:
    size = -(-layout.num_tokens // layout.ring_degree)
    return np.clip(layout.num_tokens - size * np.arange(layout.ring_degree), 0, size)


def _striped_segments(layout: SequenceLayout, ring_rank: int) -> Segments:
    starts, lengths = layout.doc_starts[:-1], np.asarray(layout.doc_lengths)
    first = (ring_rank - starts) % layout.ring_degree
    return _nonempty(np.arange(len(starts)), first, -((first - lengths) // layout.ring_degree), layout.ring_degree)


def _striped_lengths(layout: SequenceLayout) -> np.ndarray:
    return (layout.num_tokens - 1 - np.arange(layout.ring_degree)) // layout.ring_degree + 1


def _zigzag_segments(layout: SequenceLayout, ring_rank: int) -> Segments:
    return _chunk_segments(layout, ring_rank, np.full(len(layout.doc_lengths), CUT))


def _zigzag_lengths(layout: SequenceLayout) -> np.ndarray:
    return zigzag_loads(np.asarray(layout.doc_lengths), layout.ring_degree)[0].astype(np.int64)


def _document_segments(layout: SequenceLayout, ring_rank: int) -> Segments:
    return _chunk_segments(layout, ring_rank, layout.owners)


def _document_lengths(layout: SequenceLayout) -> np.ndarray:
    lengths, owners, is_cut = np.asarray(layout.doc_lengths), layout.owners, layout.owners == CUT
    whole = np.bincount(owners[~is_cut], weights=lengths[~is_cut], minlength=layout.ring_degree)
    return (whole + zigzag_loads(lengths[is_cut], layout.ring_degree)[0]).astype(np.int64)


def _chunk_segments(layout: SequenceLayout, ring_rank: int, owners: np.ndarray) -> Segments:
    """Two chunks of every cut document, and the whole of every document that `ring_rank` owns."""
    docs = np.flatnonzero((owners == CUT) | (owners == ring_rank))
    lengths = np.asarray(layout.doc_lengths, dtype=np.int64)[docs]
    chunks = np.array([ring_rank, 2 * layout.ring_degree - 1 - ring_rank])
    start, stop = (zigzag_borders(lengths, layout.ring_degree, c) for c in (chunks, chunks + 1))  # [2, docs]
    is_whole = owners[docs] == ring_rank
    start[:, is_whole], stop[0, is_whole], stop[1, is_whole] = 0, lengths[is_whole], 0
    return _nonempty(*(x.T.reshape(-1) for x in (np.broadcast_to(docs, start.shape), start, stop - start)))


_RULES = {
    "contiguous": _Rule(_contiguous_segments, _contiguous_lengths),
    "document": _Rule(_document_segments, _document_lengths),
    "striped": _Rule(_striped_segments, _striped_lengths),
    "zigzag": _Rule(_zigzag_segments, _zigzag_lengths),
}
