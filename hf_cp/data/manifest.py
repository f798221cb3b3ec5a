"""What the documents of a data set have become: which sample holds which, and how many were cut or left out."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.layout import SequenceLayout


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
