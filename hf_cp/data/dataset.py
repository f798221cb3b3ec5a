"""Samples of documents, made once for the whole run.

Reading, tokenizing and packing happen here, in one pass and alike on every rank; epochs only permute the samples, so
their number never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.documents import Document
from hf_cp.data.manifest import PackingManifest
from hf_cp.sequence.packing import pack_documents


class PackedDataset(Dataset):
    """Samples of documents, made once: `dataset[sample]` is the list of documents of a sample.

    The features are read and tokenized here, one pass, and kept as int32 arrays (4 bytes a token, 8 with own labels).

    Args:
        features (sequence): anything with `len()` and integer indexing: a list, a `datasets.Dataset`, ...
        collator (`DataCollatorForContextParallel`): its rules read the features; with `max_tokens`, documents are
            packed into samples of at most that many tokens.
        batch_size (`int`, *optional*, defaults to 1): features of a sample when the collator has no `max_tokens`.
        seed (`int`, *optional*): shuffles which features share a sample when these are not packed; `None` keeps order.

    Attributes:
        manifest (`PackingManifest`): what every sample holds.
        documents (`tuple[Document, ...]`): in the order of the data set.
        num_features (`int`): length of the data set, features without a document included.

    Raises:
        ValueError: `features` has no length, a feature cannot be read, none has a token, or `batch_size` is not 1
            although samples are packed.
    """

    def __init__(
        self,
        features: Sequence[Any],
        *,
        collator: DataCollatorForContextParallel,
        batch_size: int = 1,
        seed: int | None = None,
    ):
        _check_features(features, max_tokens=collator.max_tokens, batch_size=batch_size)
        self.num_features = len(features)
        prepared = collator.prepare(features[index] for index in range(len(features)))
        self.documents = prepared.documents
        if collator.max_tokens is not None:
            samples = pack_documents(prepared.lengths, collator.max_tokens)
        else:
            samples = _group_by_feature(prepared.sources, batch_size, seed)
        self.manifest = PackingManifest(
            lengths=prepared.lengths,
            samples=tuple(tuple(sample) for sample in samples),
            max_tokens=collator.max_tokens,
            sources=prepared.sources,
            counts=prepared.counts,
        )

    def __len__(self) -> int:
        return len(self.manifest.samples)

    def __getitem__(self, sample: int) -> list[Document]:
        return [self.documents[document] for document in self.manifest.samples[sample]]

    @cached_property
    def digest(self) -> str:
        """Hex hash of the manifest and of every document's ids, labels and positions; equal on all ranks."""
        digest = hashlib.blake2b(self.manifest.digest.encode(), digest_size=16)
        for document in self.documents:
            document.feed(digest)
        return digest.hexdigest()


def _check_features(features: Any, *, max_tokens: int | None, batch_size: int) -> None:
    if isinstance(features, Mapping):
        raise ValueError(
            f"{type(features).__name__} maps {sorted(map(str, features))[:5]} to something, but a list of "
            "documents is needed. Pass one split of a dataset, or a list with one mapping per document."
        )
    if not hasattr(features, "__len__") or not hasattr(features, "__getitem__"):
        raise ValueError(
            f"{type(features).__name__} has no length or no index, so its documents cannot be packed into samples.\n"
            "  Pass a list or a map-style dataset (datasets: load it without streaming=True)."
        )
    if batch_size < 1 or (max_tokens is not None and batch_size != 1):
        raise ValueError(
            f"batch_size={batch_size} with max_tokens={max_tokens}: a packed sample holds as many documents "
            "as fit.\n  Use batch_size=1 (per_device_train_batch_size) and set the size of a sample with max_tokens."
        )


def _group_by_feature(sources: Sequence[int], batch_size: int, seed: int | None) -> list[list[int]]:
    """Samples of `batch_size` features each; a feature that holds several documents brings them all."""
    documents: dict[int, list[int]] = {}
    for document, source in enumerate(sources):
        documents.setdefault(source, []).append(document)
    features = list(documents.values())
    if seed is not None:
        features = [features[i] for i in np.random.default_rng(seed).permutation(len(features))]
    return [sum(features[start : start + batch_size], []) for start in range(0, len(features), batch_size)]
