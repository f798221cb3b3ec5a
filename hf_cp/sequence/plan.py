"""Which scores every ring rank computes, and which K/V rows they need: integers only, computed from the layout.

A *tile* is a rectangle of scores between a run of query slots of one ring shard and a run of key slots of another,
with a band of visible entries inside. Kernels, communication and telemetry all read the same tiles.

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

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from hf_cp.sequence.layout import Segments, SequenceLayout


class Tile(NamedTuple):
    """Scores of query slots [q_start, q_start + q_len) against key slots [k_start, k_start + k_len).

    Query i sees key j if -left <= j - i - (k_len - q_len) <= right: the band is bottom-right aligned like flash-attn's
    windows. `None` is unbounded, so (None, 0) is causal and (None, None) is full. Every query of a tile sees a key.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    left: int | None
    right: int | None

    @property
    def q_slots(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_len)

    @property
    def k_slots(self) -> slice:
        return slice(self.k_start, self.k_start + self.k_len)

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs.

        >>> Tile(0, 4, 0, 4, None, 0).area, Tile(0, 2, 0, 4, None, 0).area, Tile(0, 2, 0, 4, None, None).area
        (10, 7, 8)
        """
        shift = self.k_len - self.q_len
        above = 0 if self.right is None else _triangle(self.k_len - 1 - shift - self.right, self.q_len)
        below = 0 if self.left is None else _triangle(self.q_len - 1 + shift - self.left, self.q_len)
        return self.q_len * self.k_len - above - below


def _triangle(rows: int, max_rows: int) -> int:
    """rows + (rows - 1) + ... , at most `max_rows` terms, none below zero."""
    rows = max(rows, 0)
    rest = max(rows - max_rows, 0)
    return (rows * (rows + 1) - rest * (rest + 1)) // 2


class AttentionPlan:
    """The tiles of one row's attention, for every (query ring rank, key ring rank).

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
                f"window={window} with causal={causal}: a window counts the last keys of a causal row, so it must be "
                "at least 1 and causal."
            )
        self.layout = layout
        self.causal = causal
        # a window that no document outgrows hides nothing
        self.window = window if window is not None and window < layout.max_seqlen else None
        self._tiles: dict[tuple[int, int], list[Tile]] = {}
        self._squares: dict[tuple[int, int], list[Tile]] = {}

    def tiles(self, q_ring_rank: int, k_ring_rank: int) -> list[Tile]:
        """Tiles of shard `q_ring_rank`'s queries against shard `k_ring_rank`'s keys, in slots of those shards."""
        key = (q_ring_rank, k_ring_rank)
        if key not in self._tiles:
            if q_ring_rank == k_ring_rank and self.window is None:
                tiles = self._own_tiles(q_ring_rank)
            else:
                tiles = _fuse(self._run_tiles(q_ring_rank, k_ring_rank))
            self._tiles[key] = list(tiles)
        return self._tiles[key]

    def area(self, ring_rank: int) -> int:
        """Visible (query, key) pairs that `ring_rank` computes, over all key shards."""
        return sum(t.area for k in range(self.layout.ring_degree) for t in self.tiles(ring_rank, k))

    def kv_rows(self, src_ring_rank: int, dst_ring_rank: int) -> np.ndarray:
        """int64, rising: slots of shard `src_ring_rank` whose keys some query of shard `dst_ring_rank` sees."""
        needed = np.zeros(self.layout.ring_shard_length, dtype=bool)
        for tile in self.tiles(dst_ring_rank, src_ring_rank):
            needed[tile.k_slots] = True
        return needed.nonzero()[0]

    def lower(self, q_ring_rank: int, k_ring_rank: int, *, bands: bool) -> list[Tile]:
        """The same scores as tiles that a kernel can compute.

        A kernel with `bands` takes every tile as it is; one without takes full tiles and causal squares only.
        """
        tiles = self.tiles(q_ring_rank, k_ring_rank)
        if bands:
            return tiles
        key = (q_ring_rank, k_ring_rank)
        if key not in self._squares:
            self._squares[key] = [square for tile in tiles for square in _full_and_causal_squares(tile)]
        return self._squares[key]

    def _own_tiles(self, ring_rank: int) -> Iterator[Tile]:
        """One tile per document of the own shard: its slots are in rising order, so one band covers all its runs."""
        segments = self.layout.segments(ring_rank)
        first_of_doc = np.unique(segments.doc, return_index=True)[1]
        if len(first_of_doc) == 0:
            return
        lengths = np.add.reduceat(segments.length, first_of_doc)
        right = 0 if self.causal else None
        for slot, length in zip((np.cumsum(lengths) - lengths).tolist(), lengths.tolist(), strict=True):
            yield Tile(slot, length, slot, length, None, right)

    def _run_tiles(self, q_ring_rank: int, k_ring_rank: int) -> Iterator[Tile]:
        """One tile for every pair of runs of the same document that see each other."""
        queries, keys = self.layout.segments(q_ring_rank), self.layout.segments(k_ring_rank)
        q_runs, k_runs = _runs(queries), _runs(keys)
        first, last = np.searchsorted(keys.doc, queries.doc, "left"), np.searchsorted(keys.doc, queries.doc, "right")
        for q_run, begin, end in zip(q_runs, first.tolist(), last.tolist(), strict=True):
            for k_run in k_runs[begin:end]:
                tile = _band_tile(q_run, k_run, queries.step, self.causal, self.window)
                if tile is not None:
                    yield tile


class _Run(NamedTuple):
    """Tokens at positions `position, position + step, ...` in slots `slot, slot + 1, ...`"""

    slot: int
    position: int
    length: int


def _band_tile(queries: _Run, keys: _Run, step: int, causal: bool, window: int | None) -> Tile | None:
    """The tile of two runs, trimmed to the queries that see a key and the keys that are seen.

    With positions p + i*step and c + j*step: causal j <= i + high, high = floor((p - c) / step); window: the distance
    p + i*step - c - j*step is below `window`, so j >= i + low, low = floor((p - c - window) / step) + 1.
    """
    distance = queries.position - keys.position
    high = distance // step if causal else None
    low = (distance - window) // step + 1 if window is not None else None
    if low is not None and low > high:  # a window narrower than the stride steps over these keys
        return None
    # queries i with some key in i + low .. i + high, then keys with some such query
    q_begin = 0 if high is None else max(0, -high)
    q_end = queries.length if low is None else min(queries.length, keys.length - low)
    k_begin = 0 if low is None else max(0, q_begin + low)
    k_end = keys.length if high is None else min(keys.length, q_end + high)
    if q_begin >= q_end or k_begin >= k_end:
        return None
    q_len, k_len = q_end - q_begin, k_end - k_begin
    # bottom-right alignment: j - i is counted from (k_len - q_len) of the trimmed rectangle
    shift = q_begin - k_begin - (k_len - q_len)
    right = None if high is None or high >= (k_end - 1) - q_begin else high + shift
    left = None if low is None or low <= k_begin - (q_end - 1) else -(low + shift)
    return Tile(queries.slot + q_begin, q_len, keys.slot + k_begin, k_len, left, right)


def _runs(segments: Segments) -> list[_Run]:
    slots = np.cumsum(segments.length) - segments.length
    columns = (slots.tolist(), segments.start.tolist(), segments.length.tolist())
    return [_Run(*run) for run in zip(*columns, strict=True)]


def _full_and_causal_squares(tile: Tile) -> Iterator[Tile]:
    """Cuts a causal tile into full rectangles and one causal square.

    The last `right` queries see every key. Of the others, m = q_len - right, the first sees k_len - m + 1 keys: all of
    them see the first k_len - m keys, and the rest is a causal square of m.
    """
    if tile.left is not None:
        raise NotImplementedError(f"{tile}: a window's left edge needs a kernel with bands.")
    if tile.is_full:
        yield tile
        return
    m, shared = tile.q_len - tile.right, tile.k_len - tile.q_len + tile.right
    if shared:
        yield tile._replace(q_len=m, k_len=shared, right=None)
    yield Tile(tile.q_start, m, tile.k_start + shared, m, None, 0)
    if tile.right:
        yield Tile(tile.q_start + m, tile.right, tile.k_start, tile.k_len, None, None)


def _fuse(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Joins neighbouring full tiles into larger rectangles: first along the keys, then along the queries."""
    return _fuse_axis(_fuse_axis(tiles, "k"), "q")


def _fuse_axis(tiles: Iterable[Tile], axis: str) -> Iterator[Tile]:
    previous: Tile | None = None
    for tile in tiles:
        joined = _join(previous, tile, axis) if previous is not None else None
        if joined is None and previous is not None:
            yield previous
        previous = joined or tile
    if previous is not None:
        yield previous


def _join(a: Tile, b: Tile, axis: str) -> Tile | None:
    """Both as one full tile, if they lie side by side along `axis`."""
    if not (a.is_full and b.is_full):
        return None
    if axis == "k" and a[:2] == b[:2] and a.k_start + a.k_len == b.k_start:
        return a._replace(k_len=a.k_len + b.k_len)
    if axis == "q" and a[2:4] == b[2:4] and a.q_start + a.q_len == b.q_start:
        return a._replace(q_len=a.q_len + b.q_len)
    return None


def attention_plan(layout: SequenceLayout, *, causal: bool = True, window: int | None = None) -> AttentionPlan:
    """The plan of a layout, made once and kept on it, so that all layers (and the backward pass) share it."""
    plans = layout.__dict__.setdefault("_plans", {})
    key = (causal, window)
    if key not in plans:
        plans[key] = AttentionPlan(layout, causal=causal, window=window)
    return plans[key]
