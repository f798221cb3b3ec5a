"""Which documents share a row: best-fit packing, and the manifest that records it.

Every document lands in exactly one row, whole, and no row holds more than `max_tokens`. Documents are placed longest
first, each into the fullest row that still has room. While documents of one length are being placed, only the newest
rows are nearly empty, so neighbours in length end up together and only the last gaps are filled by short documents:
rows are length buckets without a bucket width to choose.

>>> pack_documents([5, 2, 4, 1], max_tokens=6)
[[0, 3], [1, 2]]
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.layout import SequenceLayout


def pack_documents(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Places documents in rows of at most `max_tokens` tokens (best-fit decreasing).

    Deterministic: documents are placed by falling length, equal lengths in the order given; among rows with equally
    little room the one that was filled last takes the document. Takes O(n log n) steps for n documents.

    Args:
        lengths (`Sequence[int]`): tokens of each document.
        max_tokens (`int`): capacity of a row.

    Returns:
        `list[list[int]]`: the documents of each row, in rising order; rows in the order of their first documents.

    Raises:
        ValueError: there is no document, `max_tokens` is not positive, or a length is below 1 or above `max_tokens`.

    >>> pack_documents([3, 3, 3], max_tokens=6)
    [[0, 1], [2]]
    """
    lengths = [int(length) for length in lengths]  # numpy integers would wrap when negated below
    _check_lengths(lengths, max_tokens)
    rows: list[list[int]] = []
    rooms: list[int] = []  # the different amounts of room that open rows have, rising
    rows_with_room: dict[int, list[int]] = {}
    for document in sorted(
        range(len(lengths)), key=lambda d: -lengths[d]
    ):  # sorted() is stable: ties keep their order
        slot = bisect_left(rooms, lengths[document])
        if slot == len(rooms):
            room, row = max_tokens, len(rows)
            rows.append([])
        else:
            room = rooms[slot]
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                del rows_with_room[room], rooms[slot]
        rows[row].append(document)
        room -= lengths[document]
        if room and room not in rows_with_room:
            insort(rooms, room)
            rows_with_room[room] = []
        if room:
            rows_with_room[room].append(row)
    return sorted(sorted(row) for row in rows)


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} leaves no room in a row. Use a positive number of tokens.")
    if len(lengths) == 0:
        raise ValueError("There is no document to pack: got an empty list of lengths. Pass at least one document.")
    for document, length in enumerate(lengths):
        if length < 1:
            raise ValueError(
                f"Document {document} has {length} tokens; every document needs at least 1. Drop empty ones first."
            )
        if length > max_tokens:
            raise ValueError(
                f"Document {document} has {length:,} tokens, more than the {max_tokens:,} of a row.\n"
                "  Raise max_tokens, or shorten documents: overflow='truncate', 'split' or 'drop' in the collator."
            )


@dataclass(frozen=True)
class DocumentCounts:
    """Documents that did not reach the rows as they were given.

    Args:
        empty (`int`): dropped because they had no token.
        truncated (`int`): cut to `max_tokens`.
        split (`int`): cut into pieces of `max_tokens` that became documents of their own.
        dropped (`int`): dropped because they were longer than `max_tokens`.
    """

    empty: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        return DocumentCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __bool__(self) -> bool:
        return any(asdict(self).values())

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in asdict(self).items() if count) or "none changed"


@dataclass(frozen=True)
class PackingManifest:
    """What every row holds; equal on all ranks, and fixed for the whole run (epochs only permute rows).

    Args:
        lengths (`tuple[int, ...]`): tokens of each document.
        rows (`tuple[tuple[int, ...], ...]`): documents of each row; every document is in exactly one row.
        max_tokens (`int`, *optional*): capacity of a row; `None` when rows were not packed to a size.
        sources (`tuple[int, ...]`, *optional*): index in the data set that each document came from, as given.
        counts (`DocumentCounts`): documents that were cut or left out before packing.

    Raises:
        ValueError: there is no row, a document is missing or in two rows, a row is longer than `max_tokens`, or
            `sources` has another length.
    """

    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    max_tokens: int | None = None
    sources: tuple[int, ...] = ()
    counts: DocumentCounts = field(default_factory=DocumentCounts)

    def __post_init__(self):
        if not self.rows:
            raise ValueError("A manifest needs at least one row, got none. Pass at least one document.")
        if sorted(document for row in self.rows for document in row) != list(range(len(self.lengths))):
            raise ValueError(
                f"The rows do not hold each of the {len(self.lengths):,} documents exactly once. Pack them again."
            )
        if len(self.sources) not in (0, len(self.lengths)):
            raise ValueError(
                f"There are {len(self.sources):,} sources for {len(self.lengths):,} documents. Give one each, or none."
            )
        longest = max(self.row_tokens)
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(
                f"A row has {longest:,} tokens, more than max_tokens={self.max_tokens:,}. Pack the documents again."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, without padding."""
        return sum(self.lengths)

    @cached_property
    def row_tokens(self) -> tuple[int, ...]:
        """Tokens of each row, without padding."""
        return tuple(sum(self.lengths[document] for document in row) for row in self.rows)

    @property
    def fill(self) -> float:
        """Share of the rows' capacity (`max_tokens`, or the longest row) that holds tokens, 0 to 1."""
        return self.num_tokens / (len(self.rows) * (self.max_tokens or max(self.row_tokens)))

    @cached_property
    def digest(self) -> str:
        """The same for two manifests exactly if they put documents of the same lengths in the same rows."""
        return hashlib.sha256(f"{self.max_tokens}/{self.lengths}/{self.rows}".encode()).hexdigest()

    def padding(self, config: ContextParallelConfig) -> tuple[int, ...]:
        """Padding tokens of each row, summed over the ranks that share it."""
        layouts = (SequenceLayout([self.lengths[document] for document in row], config) for row in self.rows)
        return tuple(layout.local_length * layout.cp_size - layout.num_tokens for layout in layouts)

    def save(self, path: str | os.PathLike, *, config: ContextParallelConfig | None = None) -> None:
        """Writes the manifest as JSON, one row a line, complete or not at all.

        Call it on one process; the packed loader's `save_manifest` does that.

        Args:
            path (`str` or `os.PathLike`): the file; its folder is made if needed.
            config (`ContextParallelConfig`, *optional*): gives the padding of each row (default: none).
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {
            "max_tokens": self.max_tokens,
            "num_documents": len(self.lengths),
            "num_tokens": self.num_tokens,
            "fill": round(self.fill, 6),
            "counts": asdict(self.counts),
            "digest": self.digest,
        }
        lines = [json.dumps(row) for row in self._rows_to_json(config or ContextParallelConfig())]
        text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)

    def _rows_to_json(self, config: ContextParallelConfig) -> list[dict]:
        return [
            {
                "documents": list(row),
                "sources": [self.sources[document] for document in row] if self.sources else [],
                "lengths": [self.lengths[document] for document in row],
                "tokens": tokens,
                "padding": padding,
            }
            for row, tokens, padding in zip(self.rows, self.row_tokens, self.padding(config), strict=True)
        ]

    @classmethod
    def load(cls, path: str | os.PathLike) -> PackingManifest:
        """Reads what [`PackingManifest.save`] wrote.

        Raises:
            ValueError: the file's rows do not give the digest that it states (it was edited or cut).
        """
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        placed = [
            (document, length, source)
            for row in data["rows"]
            for document, length, source in zip(
                row["documents"], row["lengths"], row["sources"] or [None] * len(row["documents"]), strict=True
            )
        ]
        placed.sort()
        manifest = cls(
            lengths=tuple(length for _, length, _ in placed),
            rows=tuple(tuple(row["documents"]) for row in data["rows"]),
            max_tokens=data["max_tokens"],
            sources=tuple(source for _, _, source in placed if source is not None),
            counts=DocumentCounts(**data["counts"]),
        )
        if manifest.digest != data["digest"]:
            raise ValueError(
                f"{path} was changed after it was written: its rows give digest {manifest.digest[:12]}, it states "
                f"{data['digest'][:12]}. Pack the documents again."
            )
        return manifest

    def __str__(self) -> str:
        capacity = f"{self.max_tokens:,}" if self.max_tokens else f"{max(self.row_tokens):,}"
        return (
            f"{len(self.lengths):,} documents ({self.num_tokens:,} tokens) in {len(self.rows):,} rows of at most "
            f"{capacity} tokens, {self.fill:.2%} full; {self.counts}"
        )
