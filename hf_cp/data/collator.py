"""Features in, this rank's batch out.

All documents of the features form one sample. Targets are shifted inside each document first; only then does the
sample's `SequenceLayout` say which tokens this rank holds. So every target of the sample is on exactly one rank,
whatever the layout, and the local batch needs no knowledge of its neighbours:

>>> collator = DataCollatorForContextParallel(ContextParallelConfig(ring_degree=2), cp_rank=0)
>>> batch = collator([{"input_ids": [10, 11, 12, 13, 14, 15, 16, 17]}])
>>> batch["input_ids"].tolist(), batch["shift_labels"].tolist()
([[10, 11, 16, 17]], [[11, 12, 17, -100]])
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.data.documents import OVERFLOWS, Document, PreparedDocuments, prepare_documents
from hf_cp.data.manifest import DocumentCounts
from hf_cp.distributed.mesh import ContextParallelMesh, config_of
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import SAMPLE_KEY, PackedSample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class WholeSample:
    """A packed sample before it is split: int64 [num_tokens] each, and the layout that splits it.

    `shift_labels` are the next-token targets, -100 at the last token of every document.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    shift_labels: torch.Tensor
    layout: SequenceLayout

    @classmethod
    def from_documents(cls, documents: Sequence[Document], config: ContextParallelConfig) -> WholeSample:
        """Concatenates `documents` in order; positions count inside each document unless it brings its own."""

        def join(arrays: Iterable[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(list(arrays)).astype(np.int64))

        return cls(
            input_ids=join(document.input_ids for document in documents),
            position_ids=join(document.positions for document in documents),
            labels=join(document.labels for document in documents),
            shift_labels=join(document.shift_labels for document in documents),
            layout=SequenceLayout([len(document) for document in documents], config),
        )

    @cached_property
    def digest(self) -> int:
        """A signed 64-bit hash of ids, labels, positions and layout: equal on all ranks that share the sample."""
        digest = hashlib.blake2b(self.layout.digest.encode(), digest_size=8)
        for tensor in (self.input_ids, self.labels, self.position_ids):
            digest.update(tensor.numpy())
        return int.from_bytes(digest.digest(), "big", signed=True)

    def local_batch(self, cp_rank: int, *, pad_token_id: int = 0) -> dict[str, Any]:
        """The part of `cp_rank`, int64 [1, local_length] each, with the layout."""

        def local(tensor: torch.Tensor, pad_value: int) -> torch.Tensor:
            return self.layout.shard(tensor, cp_rank, pad_value=pad_value).unsqueeze(0)

        sample = PackedSample(
            self.layout, cp_rank=cp_rank, digest=self.digest, max_position=int(self.position_ids.max())
        )
        return {
            "input_ids": local(self.input_ids, pad_token_id),
            "position_ids": local(self.position_ids, 0),
            "labels": local(self.labels, IGNORE_INDEX),
            "shift_labels": local(self.shift_labels, IGNORE_INDEX),
            SAMPLE_KEY: sample,
        }

    def whole_batch(self) -> dict[str, Any]:
        """The sample as an unpatched Hugging Face model takes it: int64 [1, num_tokens] each, and document borders."""
        cu_seqlens, max_seqlen = self.layout.cu_seqlens, self.layout.max_seqlen
        return {
            "input_ids": self.input_ids.unsqueeze(0),
            "position_ids": self.position_ids.unsqueeze(0),
            "labels": self.labels.unsqueeze(0),
            "shift_labels": self.shift_labels.unsqueeze(0),
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_seqlen,
            "max_length_k": max_seqlen,
            "use_cache": False,  # with a cache transformers takes the sample for one document
        }


@dataclass
class DataCollatorForContextParallel:
    """Makes one sample of all features and returns this rank's part of it.

    Every rank of a context-parallel group must be given the same features; the packed loader checks it.

    Args:
        config (`ContextParallelConfig` or `ContextParallelMesh`): how samples are split; a mesh also gives `cp_rank`.
        cp_rank (`int`, *optional*): this process's rank in its group; by default `RANK` modulo `cp_size`, read when
            the first batch is made (consecutive ranks share a sample).
        max_tokens (`int`, *optional*): the longest sample allowed. The packed loader fills samples up to it; without
            it, it does not pack.
        overflow (`str`, *optional*, defaults to `"error"`): what to do with a document longer than `max_tokens`:
            `"error"`, `"truncate"`, `"split"` (into documents of their own) or `"drop"`.
        tokenizer (*optional*): a Hugging Face tokenizer, for features that hold text or chats.
        pad_token_id (`int`, *optional*, defaults to 0): fills the slots after a shard's last token; its value has no
            influence, but it must be in the vocabulary.
        assistant_only_loss (`bool`, *optional*, defaults to `True`): chats carry loss on the assistant's tokens only.

    Returns (when called):
        `dict`: `input_ids`, `position_ids`, `labels`, `shift_labels`, int64 [1, local tokens], and `hf_cp_sample`, the
        `PackedSample` that they are a part of. If context parallelism is off (`cp_size` 1 without `force`) the whole
        sample with `cu_seq_lens_q/k` (int32 [num_docs + 1]), `max_length_q/k` (`int`) and `use_cache=False` instead of
        it.

    Raises:
        ValueError: an argument is out of range, a feature cannot be read, or the sample is longer than `max_tokens`.
    """

    config: ContextParallelConfig | ContextParallelMesh
    cp_rank: int | None = None
    max_tokens: int | None = None
    overflow: str = "error"
    tokenizer: Any = None
    pad_token_id: int = 0
    assistant_only_loss: bool = True

    def __post_init__(self):
        if isinstance(self.config, ContextParallelMesh):  # process groups cannot travel to loader workers
            self.config, mesh = config_of(self.config), self.config
            self.cp_rank = mesh.cp_rank if self.cp_rank is None else self.cp_rank
        if self.overflow not in OVERFLOWS:
            raise ValueError(f"overflow={self.overflow!r} does not exist. Choose one of {', '.join(OVERFLOWS)}.")
        if self.max_tokens is not None and (not isinstance(self.max_tokens, int) or self.max_tokens < 1):
            raise ValueError(
                f"max_tokens={self.max_tokens!r} must be a positive integer, or None for samples of any length."
            )
        if self.overflow != "error" and self.max_tokens is None:
            raise ValueError(
                f"overflow={self.overflow!r} needs a limit, but max_tokens is None, so no document is ever too long. "
                "Set max_tokens, or leave overflow out."
            )
        cp_size = self.config.cp_size
        if self.cp_rank is not None and not 0 <= self.cp_rank < cp_size:
            raise ValueError(
                f"cp_rank={self.cp_rank} is outside of a group of cp_size={cp_size}. Use 0 to {cp_size - 1}."
            )
        self._has_reported = False

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        prepared = self.prepare(features)
        self.report(prepared.counts)
        return self.collate(prepared.documents)[0]

    def report(self, counts: DocumentCounts) -> None:
        """Rank 0 warns of documents that were left out or cut: of the first ones that this collator meets."""
        if counts and not self._has_reported:
            self._has_reported = True
            if os.environ.get("RANK", "0") == "0":
                logger.warning("Documents were left out or cut: %s (later ones are not reported).", counts)

    def prepare(self, features: Iterable[Any], *, allow_none: bool = False) -> PreparedDocuments:
        """Reads features by this collator's rules (tokenizer, `max_tokens`, `overflow`); see [`prepare_documents`]."""
        return prepare_documents(
            features,
            max_tokens=self.max_tokens,
            overflow=self.overflow,
            tokenizer=self.tokenizer,
            assistant_only_loss=self.assistant_only_loss,
            allow_none=allow_none,
        )

    def collate(self, documents: Sequence[Document]) -> tuple[dict[str, Any], int]:
        """This rank's batch of a sample of `documents`, and the digest of the whole ([`WholeSample.digest`])."""
        num_tokens = sum(len(document) for document in documents)
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise ValueError(
                f"The sample has {num_tokens:,} tokens in {len(documents)} documents, more than max_tokens="
                f"{self.max_tokens:,}.\n  Give the collator fewer features at a time (per_device_train_batch_size), "
                "raise max_tokens, or use the packed loader, which fills samples up to max_tokens."
            )
        whole = WholeSample.from_documents(documents, self.config)
        if self.config.enabled:
            return whole.local_batch(self._own_cp_rank(), pad_token_id=self.pad_token_id), whole.digest
        _check_borders_show_in_positions(documents)
        return whole.whole_batch(), whole.digest

    def dummy_sample(self) -> list[Document]:
        """The sample that trains nothing: every label is -100, and every rank gets a token or padding."""
        size = min(self.config.cp_size, self.max_tokens or self.config.cp_size)
        ids = np.full(size, self.pad_token_id, dtype=np.int32)
        return [Document(ids, np.full(size, IGNORE_INDEX, dtype=np.int32))]

    def is_dummy(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch of this collator is of the dummy sample: its digest says so, not its targets.

        A document may have no target and still be data. Where nothing is split a batch has no digest, and a sample of
        a single token, which has no target either, counts as a dummy.
        """
        sample = batch.get(SAMPLE_KEY)
        if sample is None:
            return batch["input_ids"].numel() <= 1
        return sample.digest == self._dummy_digest

    @cached_property
    def _dummy_digest(self) -> int:
        return WholeSample.from_documents(self.dummy_sample(), self.config).digest

    def for_rank(self, mesh: ContextParallelMesh) -> DataCollatorForContextParallel:
        """A copy that makes the batches of this process in `mesh`.

        Raises:
            ValueError: the mesh has other degrees, or `cp_rank` was set to another rank.
        """
        fault = mesh.degrees_fault(self.config, "The collator's config")
        if fault is not None:
            raise ValueError(fault)
        if self.cp_rank not in (None, mesh.cp_rank):
            raise ValueError(
                f"The collator was made for cp_rank={self.cp_rank}, but this process is cp_rank={mesh.cp_rank} of the "
                "mesh. Leave cp_rank out."
            )
        collator = copy.copy(self)
        collator.cp_rank = mesh.cp_rank
        return collator

    def _own_cp_rank(self) -> int:
        if self.cp_rank is not None or self.config.cp_size == 1:
            return self.cp_rank or 0
        if "RANK" not in os.environ:
            raise ValueError(
                f"cp_rank is unknown: it was not given and RANK is not set, but cp_size={self.config.cp_size}.\n"
                "  Start the script with accelerate launch or torchrun, or pass cp_rank or a ContextParallelMesh."
            )
        return int(os.environ["RANK"]) % self.config.cp_size


def _check_borders_show_in_positions(documents: Sequence[Document]) -> None:
    """An unpatched model tells documents apart where positions do not go on by 1; if they do, attention would leak."""
    for index, (document, following) in enumerate(zip(documents, documents[1:], strict=False)):
        if following.positions[0] == document.positions[-1] + 1:
            raise ValueError(
                f"Documents {index} and {index + 1} of the sample have running position_ids ({document.positions[-1]} "
                f"is followed by {following.positions[0]}), which an unpatched model takes for one document.\n"
                "  Leave position_ids out, or use ContextParallelConfig(force=True)."
            )
