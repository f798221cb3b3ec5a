"""Tiles: rectangles of attention scores with a band of visible entries, and how they are made, joined and cut.

A tile of 3 queries and 5 keys with left=2, right=0, and what [`cut_for_causal_kernel`] makes of it:

              keys 0 1 2 3 4
    query 0        m m c . .        m: a mirrored causal square (queries 0 and 1, keys 0 and 1: its upper triangle)
    query 1        . m c c .        c: a causal square (queries 0 to 2, keys 2 to 4)
    query 2        . . c c c

>>> tile = Tile(q_start=0, q_len=2, k_start=0, k_len=4, left=None, right=0)
>>> tile.area                                    # the two queries see 3 and 4 keys
7
>>> [tuple(t) for t in cut_for_causal_kernel(tile)]   # the first 2 keys are seen by all, the rest is a causal square
[(0, 2, 0, 2, None, None), (0, 2, 2, 2, None, 0)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hf_cp.sequence.layout import Segments, ranges

UNBOUNDED = 2**60  # stands for None in arrays; longer than any sample
MOST_JOINED = 256  # tiles of one kernel call; flash-attn's workspace grows by 128 fp32 queries with each of them


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
        """Number of visible (query, key) pairs."""
        return TileTable.from_tiles([self]).area


class TileTable(NamedTuple):
    """Many tiles as int64 arrays [num_tiles]; `left` and `right` are `UNBOUNDED` instead of `None`."""

    q_start: np.ndarray
    q_len: np.ndarray
    k_start: np.ndarray
    k_len: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @classmethod
    def from_tiles(cls, tiles: list[Tile]) -> TileTable:
        rows = [[UNBOUNDED if value is None else value for value in tile] for tile in tiles]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)

    def to_tiles(self) -> list[Tile]:
        columns = [column.tolist() for column in self]
        for bound in columns[4:]:
            bound[:] = [None if value == UNBOUNDED else value for value in bound]
        return [Tile(*row) for row in zip(*columns, strict=True)]

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs of all tiles."""
        shift = self.k_len - self.q_len
        above = _triangle(self.k_len - 1 - shift - self.right, self.q_len)
        below = _triangle(self.q_len - 1 + shift - self.left, self.q_len)
        return int((self.q_len * self.k_len - above - below).sum())

    def select(self, index: np.ndarray) -> TileTable:
        return TileTable(*(column[index] for column in self))


def _triangle(rows: np.ndarray, max_rows: np.ndarray) -> np.ndarray:
    """rows + (rows - 1) + ... , at most `max_rows` terms, none below zero."""
    rows = np.maximum(rows, 0)
    rest = np.maximum(rows - max_rows, 0)
    return (rows * (rows + 1) - rest * (rest + 1)) // 2


def run_tiles(queries: Segments, keys: Segments, *, causal: bool, window: int | None) -> TileTable:
    """One tile for every pair of runs of the same document that see each other, in slots of the two shards.

    With positions p + i*step of the queries and c + j*step of the keys, query i sees keys i + low .. i + high:
    causal gives high = floor((p - c) / step); a window of w keys has distance p + i*step - c - j*step < w, so
    low = floor((p - c - w) / step) + 1.
    """
    first, last = np.searchsorted(keys.doc, queries.doc, "left"), np.searchsorted(keys.doc, queries.doc, "right")
    q = np.repeat(np.arange(len(first)), last - first)
    k = ranges(first, last - first)
    distance = queries.start[q] - keys.start[k]
    high = distance // queries.step if causal else np.full_like(distance, UNBOUNDED)
    low = (distance - window) // queries.step + 1 if window is not None else np.full_like(distance, -UNBOUNDED)
    slots = [np.cumsum(s.length) - s.length for s in (queries, keys)]
    return trim(slots[0][q], queries.length[q], slots[1][k], keys.length[k], low, high)


def trim(
    q_slot: np.ndarray, q_len: np.ndarray, k_slot: np.ndarray, k_len: np.ndarray, low: np.ndarray, high: np.ndarray
) -> TileTable:
    """Tiles in which query i sees keys i + low .. i + high, cut down to queries that see a key and keys that are seen.

    Pairs that see nothing are left out (low > high: a window narrower than the stride steps over the keys).
    """
    q_begin = np.maximum(0, -high)
    q_end = np.minimum(q_len, k_len - low)
    k_begin = np.maximum(0, q_begin + low)
    k_end = np.minimum(k_len, q_end + high)
    q_num, k_num = q_end - q_begin, k_end - k_begin
    # bottom-right alignment counts j - i from (k_num - q_num) of the trimmed rectangle
    shift = q_begin - k_begin - (k_num - q_num)
    right = np.where(high >= k_end - 1 - q_begin, UNBOUNDED, high + shift)
    left = np.where(low <= k_begin - (q_end - 1), UNBOUNDED, -(low + shift))
    table = TileTable(q_slot + q_begin, q_num, k_slot + k_begin, k_num, left, right)
    return table.select((low <= high) & (q_num > 0) & (k_num > 0))


def fuse(table: TileTable) -> TileTable:
    """Joins neighbouring full tiles into larger rectangles: first along the keys, then along the queries."""
    return _fuse_queries(_fuse_keys(table))


def _fuse_keys(t: TileTable) -> TileTable:
    same_queries = (t.q_start[1:] == t.q_start[:-1]) & (t.q_len[1:] == t.q_len[:-1])
    joined = _both_full(t) & same_queries & (t.k_start[1:] == t.k_start[:-1] + t.k_len[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined])) if len(t.q_len) else np.empty(0, dtype=np.int64)
    return t.select(first)._replace(k_len=np.add.reduceat(t.k_len, first) if len(first) else t.k_len)


def _fuse_queries(t: TileTable) -> TileTable:
    swapped = _fuse_keys(TileTable(t.k_start, t.k_len, t.q_start, t.q_len, t.left, t.right))
    return TileTable(swapped.k_start, swapped.k_len, swapped.q_start, swapped.q_len, swapped.left, swapped.right)


def _both_full(t: TileTable) -> np.ndarray:
    full = (t.left == UNBOUNDED) & (t.right == UNBOUNDED)
    return full[1:] & full[:-1]


def cut_for_causal_kernel(tile: Tile) -> Iterator[Tile]:
    """Cuts a tile into full rectangles, causal squares (None, 0) and mirrored causal squares (0, None).

    A kernel that knows only "full" and "causal" computes a mirrored square with queries and keys in reverse order. A
    band of `width` keys is cut into blocks of at most `width` queries; in a block the left edge of the band lies left
    of the right edge, so a cut between them leaves one edge on each side. Nothing is computed twice or in vain.
    """
    if tile.left is None or tile.right is None:
        yield from _cut_one_edge(tile)
        return
    shift = tile.k_len - tile.q_len
    low, high = shift - tile.left, shift + tile.right
    width = high - low + 1
    for begin in range(0, tile.q_len, width):
        rows = min(width, tile.q_len - begin)
        middle = min(max(begin + rows - 1 + low, 0), tile.k_len)  # the left edge has passed by here
        for k_begin, k_end in ((0, middle), (middle, tile.k_len)):
            q_slot, k_slot = tile.q_start + begin, tile.k_start + k_begin
            bounds = (low + begin - k_begin, high + begin - k_begin)
            for part in trim(*map(np.atleast_1d, (q_slot, rows, k_slot, k_end - k_begin, *bounds))).to_tiles():
                yield from _cut_one_edge(part)


def join_for_varlen_kernel(tiles: Iterable[Tile]) -> list[list[Tile]]:
    """Groups of tiles that one call can compute: they have the same band, and their rows differ and keep the order.

    A call starts blocks of work for every tile as if it were the longest, and its backward pass has a workspace per
    tile: so a group has tiles of similar length, and not too many.
    """
    groups: list[list[Tile]] = []
    by_kind: dict[tuple, list[list[Tile]]] = {}
    for tile in tiles:
        alike = by_kind.setdefault((tile.left, tile.right, _size_class(tile.q_len), _size_class(tile.k_len)), [])
        group = next((group for group in alike if _can_follow(group, tile)), None)
        if group is None:
            group = []
            alike.append(group)
            groups.append(group)
        group.append(tile)
    return groups


def _size_class(length: int) -> int:
    """Lengths up to 511, 4095, 32767, ... tokens are of one class."""
    return max(0, length.bit_length() - 7) // 3


def _can_follow(group: list[Tile], tile: Tile) -> bool:
    last = group[-1]
    is_behind = last.q_start + last.q_len <= tile.q_start and last.k_start + last.k_len <= tile.k_start
    return is_behind and len(group) < MOST_JOINED


def are_side_by_side(slots: Sequence[slice]) -> bool:
    """Whether each of these ranges begins where the one before ends."""
    return all(a.stop == b.start for a, b in pairwise(slots))


def _cut_one_edge(tile: Tile) -> Iterator[Tile]:
    if tile.is_full:
        yield tile
    elif tile.left is None:
        yield from _cut_right_edge(tile)
    else:
        # in reverse order (i' = q_len - 1 - i, j' = k_len - 1 - j) the edge j >= i + shift - left is j' <= i' + left
        assert tile.right is None, tile
        shift = tile.k_len - tile.q_len
        mirrored = Tile(0, tile.q_len, 0, tile.k_len, None, tile.left - shift)
        for part in _cut_right_edge(mirrored):
            q_start = tile.q_start + tile.q_len - part.q_start - part.q_len
            k_start = tile.k_start + tile.k_len - part.k_start - part.k_len
            yield Tile(q_start, part.q_len, k_start, part.k_len, part.right, None)


def _cut_right_edge(tile: Tile) -> Iterator[Tile]:
    """The last `right` queries see every key. Of the m = q_len - right others the first sees k_len - m + 1 keys.

    So all of these see the first k_len - m keys, and the rest is a causal square of m.
    """
    m, shared = tile.q_len - tile.right, tile.k_len - tile.q_len + tile.right
    if shared:
        yield tile._replace(q_len=m, k_len=shared, right=None)
    yield Tile(tile.q_start, m, tile.k_start + shared, m, None, 0)
    if tile.right:
        yield Tile(tile.q_start + m, tile.right, tile.k_start, tile.k_len, None, None)
