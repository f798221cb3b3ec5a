"""Which scores every ring rank computes, and which K/V tokens they need: integers only, computed from the layout.

Kernels and communication both follow it.

>>> from hf_cp.config import ContextParallelConfig
>>> layout = SequenceLayout([8], ContextParallelConfig(ring_degree=2))  # shards [0, 1, 6, 7] and [2, 3, 4, 5]
>>> plan = AttentionPlan(layout)
>>> plan.tiles(0, 0)  # own keys: one causal square
[Tile(q_start=0, q_len=4, k_start=0, k_len=4, left=None, right=0)]
>>> plan.tiles(0, 1)  # tokens 6, 7 see all of 2..5
[Tile(q_start=2, q_len=2, k_start=0, k_len=4, left=None, right=None)]
>>> plan.tiles(1, 0)  # tokens 2..5 see 0, 1 but not 6, 7
[Tile(q_start=0, q_len=4, k_start=0, k_len=2, left=None, right=None)]
>>> plan.area(0) == plan.area(1) == (8 * 9 // 2) / 2
True
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hf_cp.sequence.layout import Segments, SequenceLayout, ranges
from hf_cp.sequence.tiles import UNBOUNDED, Tile, TileTable, fuse, run_tiles

Schedule = TypeVar("Schedule")


class GatheredKeys(NamedTuple):
    """One rank's tiles when the shared slots of all shards lie in one buffer.

    Attributes:
        order (`np.ndarray`, *optional*): int64 [num_keys], for each slot of the buffer its place in what was gathered:
            the shared slots of all shards, each padded to `slots_per_rank`. `None` where the buffer is just that.
        slots_per_rank (`int`): shared slots of the rank that has most of them.
        own_tiles (`list[Tile]`): on this rank's own keys; key slots count in this rank's shard.
        tiles (`list[Tile]`): the others; key slots count in the buffer.
    """

    order: np.ndarray | None
    slots_per_rank: int
    own_tiles: list[Tile]
    tiles: list[Tile]


class AttentionPlan:
    """The tiles of one sample's attention, for every (query ring rank, key ring rank).

    Args:
        layout (`SequenceLayout`): where the tokens are.
        causal (`bool`): a query sees keys up to its own position.
        window (`int`, *optional*): a query sees only the last `window` keys, itself included, of its own document.

    Raises:
        ValueError: `window` is below 1, or given without `causal`.
    """

    def __init__(self, layout: SequenceLayout, causal: bool = True, window: int | None = None):
        if window is not None and (window < 1 or not causal):
            raise ValueError(
                f"window={window} with causal={causal}: a window counts the last keys up to a query, so it must be "
                "at least 1 and causal."
            )
        self.layout = layout
        self.causal = causal
        # a window that no document outgrows hides nothing
        self.window = window if window is not None and window < layout.max_seqlen else None
        self._segments: dict[int, Segments] = {}
        self._tiles: dict[tuple[int, int], list[Tile]] = {}
        self._schedules: dict[Hashable, Any] = {}

    def tiles(self, q_ring_rank: int, k_ring_rank: int) -> list[Tile]:
        """Tiles of shard `q_ring_rank`'s queries against shard `k_ring_rank`'s keys, in slots of those shards."""
        key = (q_ring_rank, k_ring_rank)
        if key not in self._tiles:
            self._tiles[key] = self._table(*key).to_tiles()
        return self._tiles[key]

    def schedule(self, key: Hashable, make: Callable[[], Schedule]) -> Schedule:
        """What attention derives for this sample (an engine's schedule, the kernel), made once per `key`."""
        if key not in self._schedules:
            self._schedules[key] = make()
        return self._schedules[key]

    def area(self, ring_rank: int) -> int:
        """Visible (query, key) pairs that `ring_rank` computes, over all key shards."""
        return sum(self.pair_area(ring_rank, k) for k in range(self.layout.ring_degree))

    def pair_area(self, q_ring_rank: int, k_ring_rank: int) -> int:
        """Visible pairs of shard `q_ring_rank`'s queries and shard `k_ring_rank`'s keys."""
        return self._table(q_ring_rank, k_ring_rank).area

    def kv_slots(self, src_ring_rank: int, dst_ring_rank: int) -> np.ndarray:
        """int64, rising: slots of shard `src_ring_rank` whose keys some query of shard `dst_ring_rank` sees."""
        table = self._table(dst_ring_rank, src_ring_rank)
        # +1 where a tile's keys begin, -1 behind their end: the running sum counts the tiles that need a slot
        borders = np.zeros(self.layout.ring_shard_length + 1, dtype=np.int64)
        np.add.at(borders, table.k_start, 1)
        np.add.at(borders, table.k_start + table.k_len, -1)
        return np.flatnonzero(np.cumsum(borders[:-1]))

    kv_rows = kv_slots  # the name that it was made public with

    def shared_slots(self, ring_rank: int) -> np.ndarray:
        """int64, rising: slots of shard `ring_rank` whose documents are on other ranks too."""
        doc, _, length, _ = self._run(ring_rank)
        return np.flatnonzero(np.repeat(self._ranks_of_document[doc] > 1, length))

    @property
    def needs_traffic(self) -> bool:
        """Whether any document is on more than one ring rank."""
        return self.num_shared_tokens > 0

    @cached_property
    def num_shared_tokens(self) -> int:
        """Tokens of the documents that are on more than one ring rank."""
        return int(np.asarray(self.layout.doc_lengths)[self._ranks_of_document > 1].sum())

    def gathered(self, ring_rank: int, *, in_order: bool) -> GatheredKeys:
        """The tiles of `ring_rank` when the shared slots of all shards are gathered.

        Args:
            ring_rank (`int`): whose queries.
            in_order (`bool`): put the keys in the order of the sample, so that a run of queries needs one tile, which
                pays for kernels with bands. Otherwise (and in the `striped` layout, whose queries are not neighbours)
                they stay as they arrive, and own keys are used where they are.

        Documents of 8 (cut), 2 and 2 tokens (whole), R = 2; shards [0 1 6 7 8 9] and [2 3 4 5 10 11]:

            gathered, as it arrives     0 1 6 7 | 2 3 4 5        each rank's shared slots, padded to the most
            in order                    0 1 2 3 4 5 6 7          `order` = 0 1 4 5 6 7 2 3
        """
        shared = [self.shared_slots(rank) for rank in range(self.layout.ring_degree)]
        most = max(len(kept) for kept in shared)
        if not in_order or self.layout.layout == "striped":
            tiles = [
                tile._replace(k_start=tile.k_start + rank * most)
                for rank, kept in enumerate(shared)
                if rank != ring_rank
                for tile in renumber_keys(self.tiles(ring_rank, rank), kept)
            ]
            return GatheredKeys(None, most, self.tiles(ring_rank, ring_rank), tiles)
        own, queries = self._table(ring_rank, ring_rank), self._run(ring_rank)
        docs_of_own = np.repeat(queries.doc, queries.length)[own.q_start]
        own_tiles = own.select(self._ranks_of_document[docs_of_own] == 1).to_tiles()
        docs = np.flatnonzero(self._ranks_of_document > 1)
        keys = Segments(docs, np.zeros_like(docs), np.asarray(self.layout.doc_lengths, dtype=np.int64)[docs], 1)
        tiles = run_tiles(queries, keys, causal=self.causal, window=self.window).to_tiles()
        # from the slot of each shared token in the concatenated shards to its place in the gathered buffer
        places = np.concatenate([rank * most + np.arange(len(kept)) for rank, kept in enumerate(shared)])
        slots = np.concatenate([rank * self.layout.ring_shard_length + kept for rank, kept in enumerate(shared)])
        tokens = ranges(self.layout.doc_starts[docs], keys.length)
        return GatheredKeys(places[np.searchsorted(slots, self.layout.slots[tokens])], most, own_tiles, tiles)

    @cached_property
    def _ranks_of_document(self) -> np.ndarray:
        """int64 [num_docs]: number of ring ranks that hold tokens of the document."""
        docs = [np.unique(self._run(rank).doc) for rank in range(self.layout.ring_degree)]
        return np.bincount(np.concatenate(docs), minlength=len(self.layout.doc_lengths))

    def _run(self, ring_rank: int) -> Segments:
        if ring_rank not in self._segments:
            self._segments[ring_rank] = self.layout.segments(ring_rank)
        return self._segments[ring_rank]

    def _table(self, q_ring_rank: int, k_ring_rank: int) -> TileTable:
        if q_ring_rank == k_ring_rank and self.window is None:
            return _own_tiles(self._run(q_ring_rank), self.causal)
        queries, keys = self._run(q_ring_rank), self._run(k_ring_rank)
        return fuse(run_tiles(queries, keys, causal=self.causal, window=self.window))


def _own_tiles(segments: Segments, causal: bool) -> TileTable:
    """One tile per document of this rank's shard: its slots are in rising order, so one band covers all its runs."""
    first = np.unique(segments.doc, return_index=True)[1]
    lengths = np.add.reduceat(segments.length, first) if len(first) else segments.length
    slots = np.cumsum(lengths) - lengths
    unbounded = np.full_like(lengths, UNBOUNDED)
    return TileTable(slots, lengths, slots, lengths, unbounded, np.zeros_like(lengths) if causal else unbounded)


def renumber_keys(tiles: list[Tile], kept: np.ndarray) -> list[Tile]:
    """The tiles on a buffer that holds only the key slots `kept` (rising; all that the tiles need), in that order."""
    starts = np.searchsorted(kept, [tile.k_start for tile in tiles]).tolist()
    return [tile._replace(k_start=start) for tile, start in zip(tiles, starts, strict=True)]
