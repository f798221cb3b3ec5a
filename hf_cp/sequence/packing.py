"""Which documents share a sample: best-fit packing, and the manifest that records it.

Every document lands in exactly one sample, whole, and no sample holds more than `max_tokens`. Documents are placed
longest first, each into the fullest sample that still has room. While documents of one length are being placed, only
the newest samples are nearly empty, so neighbours in length end up together and only the last gaps are filled by short
documents: samples are length buckets without a bucket width to choose.

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
    """Places documents in samples of at most `max_tokens` tokens (best-fit decreasing).

    Deterministic: documents are placed by falling length, equal lengths in the order given; among samples with equally
    little room the one that was filled last takes the document. Takes O(n log n) steps for n documents.

    Args:
        lengths (`Sequence[int]`): tokens of each document.
        max_tokens (`int`): capacity of a sample.

    Returns:
        `list[list[int]]`: the documents of each sample, rising; samples in the order of their first documents.

    Raises:
        ValueError: there is no document, `max_tokens` is not positive, or a length is below 1 or above `max_tokens`.

    >>> pack_documents([3, 3, 3], max_tokens=6)
    [[0, 1], [2]]
    """
    lengths = [int(length) for length in lengths]  # numpy integers would wrap when negated below
    _check_lengths(lengths, max_tokens)
    samples: list[list[int]] = []
    rooms: list[int] = []  # the different amounts of room that open samples have, rising
    samples_with_room: dict[int, list[int]] = {}
    for document in sorted(
        range(len(lengths)), key=lambda d: -lengths[d]
    ):  # sorted() is stable: ties keep their order
        slot = bisect_left(rooms, lengths[document])
        if slot == len(rooms):
            room, sample = max_tokens, len(samples)
            samples.append([])
        else:
            room = rooms[slot]
            sample = samples_with_room[room].pop()
            if not samples_with_room[room]:
                del samples_with_room[room], rooms[slot]
        samples[sample].append(document)
        room -= lengths[document]
        if room and room not in samples_with_room:
            insort(rooms, room)
            samples_with_room[room] = []
        if room:
            samples_with_room[room].append(sample)
    return sorted(sorted(sample) for sample in samples)


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} leaves no room in a sample. Use a positive number of tokens.")
    if len(lengths) == 0:
        raise ValueError("There is no document to pack: got an empty list of lengths. Pass at least one document.")
    for document, length in enumerate(lengths):
        if length < 1:
            raise ValueError(
                f"Document {document} has {length} tokens; every document needs at least 1. Drop empty ones first."
            )
        if length > max_tokens:
            raise ValueError(
                f"Document {document} has {length:,} tokens, more than the {max_tokens:,} of a sample.\n"
                "  Raise max_tokens, or shorten documents: overflow='truncate', 'split' or 'drop' in the collator."
            )


@dataclass(frozen=True)
class DocumentCounts:
    """Documents that did not reach the samples as they were given.

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
    """What every sample holds; equal on all ranks, and fixed for the whole run (epochs only permute samples).

    Args:
        lengths (`tuple[int, ...]`): tokens of each document.
        samples (`tuple[tuple[int, ...], ...]`): documents of each sample; every document is in exactly one sample.
        max_tokens (`int`, *optional*): capacity of a sample; `None` when samples were not packed to a size.
        sources (`tuple[int, ...]`, *optional*): index in the data set that each document came from, as given.
        counts (`DocumentCounts`): documents that were cut or left out before packing.

    Raises:
        ValueError: there is no sample, a document is missing or in two samples, a sample is longer than `max_tokens`,
            or `sources` has another length.
    """

    lengths: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    max_tokens: int | None = None
    sources: tuple[int, ...] = ()
    counts: DocumentCounts = field(default_factory=DocumentCounts)

    def __post_init__(self):
        if not self.samples:
            raise ValueError("A manifest needs at least one sample, got none. Pass at least one document.")
        if sorted(document for sample in self.samples for document in sample) != list(range(len(self.lengths))):
            raise ValueError(
                f"The samples do not hold each of the {len(self.lengths):,} documents exactly once. Pack them again."
            )
        if len(self.sources) not in (0, len(self.lengths)):
            raise ValueError(
                f"There are {len(self.sources):,} sources for {len(self.lengths):,} documents. Give one each, or none."
            )
        longest = max(self.sample_tokens)
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(
                f"A sample has {longest:,} tokens, more than max_tokens={self.max_tokens:,}. Pack the documents again."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, without padding."""
        return sum(self.lengths)

    @cached_property
    def sample_tokens(self) -> tuple[int, ...]:
        """Tokens of each sample, without padding."""
        return tuple(sum(self.lengths[document] for document in sample) for sample in self.samples)

    @property
    def fill(self) -> float:
        """Share of the samples' capacity (`max_tokens`, or the longest sample) that holds tokens, 0 to 1."""
        return self.num_tokens / (len(self.samples) * (self.max_tokens or max(self.sample_tokens)))

    @cached_property
    def digest(self) -> str:
        """The same for two manifests exactly if they put documents of the same lengths in the same samples."""
        return hashlib.sha256(f"{self.max_tokens}/{self.lengths}/{self.samples}".encode()).hexdigest()

    def padding(self, config: ContextParallelConfig) -> tuple[int, ...]:
        """Padding tokens of each sample, summed over the ranks that share it."""
        layouts = (SequenceLayout([self.lengths[document] for document in sample], config) for sample in self.samples)
        return tuple(layout.local_length * layout.cp_size - layout.num_tokens for layout in layouts)

    def save(self, path: str | os.PathLike, *, config: ContextParallelConfig | None = None) -> None:
        """Writes the manifest as JSON, one sample a line, complete or not at all.

        Call it on one process; the packed loader's `save_manifest` does that.

        Args:
            path (`str` or `os.PathLike`): the file; its folder is made if needed.
            config (`ContextParallelConfig`, *optional*): gives the padding of each sample (default: none).
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
        lines = [json.dumps(sample) for sample in self._samples_to_json(config or ContextParallelConfig())]
        text = json.dumps(head, indent=1)[:-2] + ',\n "samples": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)

    def _samples_to_json(self, config: ContextParallelConfig) -> list[dict]:
        return [
            {
                "documents": list(sample),
                "sources": [self.sources[document] for document in sample] if self.sources else [],
                "lengths": [self.lengths[document] for document in sample],
                "tokens": tokens,
                "padding": padding,
            }
            for sample, tokens, padding in zip(self.samples, self.sample_tokens, self.padding(config), strict=True)
        ]

    @classmethod
    def load(cls, path: str | os.PathLike) -> PackingManifest:
        """Reads what [`PackingManifest.save`] wrote.

        Raises:
            ValueError: the file's samples do not give the digest that it states (it was edited or cut).
        """
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        samples = data["samples"] if "samples" in data else data["rows"]  # their name in earlier versions
        placed = [
            (document, length, source)
            for sample in samples
            for document, length, source in zip(
                sample["documents"],
                sample["lengths"],
                sample["sources"] or [None] * len(sample["documents"]),
                strict=True,
            )
        ]
        placed.sort()
        manifest = cls(
            lengths=tuple(length for _, length, _ in placed),
            samples=tuple(tuple(sample["documents"]) for sample in samples),
            max_tokens=data["max_tokens"],
            sources=tuple(source for _, _, source in placed if source is not None),
            counts=DocumentCounts(**data["counts"]),
        )
        if manifest.digest != data["digest"]:
            raise ValueError(
                f"{path} was changed after it was written: its samples give digest {manifest.digest[:12]}, it states "
                f"{data['digest'][:12]}. Pack the documents again."
            )
        return manifest

    def __str__(self) -> str:
        capacity = f"{self.max_tokens:,}" if self.max_tokens else f"{max(self.sample_tokens):,}"
        return (
            f"{len(self.lengths):,} documents ({self.num_tokens:,} tokens) in {len(self.samples):,} samples of at "
            f"most {capacity} tokens, {self.fill:.2%} full; {self.counts}"
        )
