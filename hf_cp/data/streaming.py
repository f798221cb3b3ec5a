"""Samples from a stream: a data set that can only be read forwards, and is too large to be held or packed as a whole.

Every rank reads the same stream. It takes `buffer_documents` documents at a time, packs them (best fit), maybe
permutes the samples by (seed, buffer number), and gives them out as the packed loader does. So which samples an
optimizer step sees depends on the stream and the seed, and not on the number of ranks. Before a micro-step all ranks
compare a hash of the samples that *all* of them are about to take: a stream that is split by rank, or read in another
order somewhere, ends the run at once.

A stream that ends begins again (with `set_epoch`, if it has that); samples are carried over, so none is left out and
none is made up. Training ends with `max_steps`. To resume, the stream is read again up to the saved place.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from hf_cp.data.agreement import AgreeingDataLoader, SampleOutcome, plain_error
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.documents import Document, PreparedDocuments, none_left
from hf_cp.data.manifest import DocumentCounts
from hf_cp.data.order import LoaderPosition, check_samples_per_step, even_out
from hf_cp.distributed.communicator import Communicator
from hf_cp.sequence.packing import pack_documents
from hf_cp.sequence.placement import causal_area

logger = logging.getLogger(__name__)

BUFFER_DOCUMENTS = 1000


@dataclass(frozen=True)
class StreamSettings:
    """What decides which samples come out of a stream, beside the stream itself.

    Args:
        max_tokens (`int`): the longest sample.
        overflow (`str`): what happens to longer documents.
        buffer_documents (`int`): features that are read and packed at a time.
        shuffle (`bool`): permute the samples of a buffer.
        seed (`int`): not negative.

    Raises:
        ValueError: samples are not packed, or the buffer is empty.
    """

    max_tokens: int
    overflow: str
    buffer_documents: int
    shuffle: bool
    seed: int

    def __post_init__(self):
        if self.max_tokens is None:
            raise ValueError(
                "A stream needs max_tokens: its documents are packed into samples as they come.\n"
                "  Set max_tokens in DataCollatorForContextParallel."
            )
        if self.buffer_documents < 1:
            raise ValueError(
                f"buffer_documents={self.buffer_documents} leaves nothing to pack. Use a positive number, e.g. "
                f"{BUFFER_DOCUMENTS}."
            )

    @property
    def digest(self) -> str:
        """Equal for two runs exactly if they make the same samples of one stream."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


def is_stream(dataset: Any) -> bool:
    """Whether `dataset` can only be read forwards."""
    return isinstance(dataset, IterableDataset) or (
        dataset is not None and hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


class StreamSamples(IterableDataset):
    """This rank's outcome of every micro-step, for ever.

    Args:
        stream (iterable): features; every iteration must give the same ones.
        collator (`DataCollatorForContextParallel`): of this rank.
        settings (`StreamSettings`): how samples are made.
        dp_rank, dp_size, samples_per_step: see [`SampleOrder`].
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        collator: DataCollatorForContextParallel,
        settings: StreamSettings,
        dp_rank: int,
        dp_size: int,
        samples_per_step: int,
    ):
        self.stream, self.collator, self.settings = stream, collator, settings
        self.dp_rank, self.dp_size, self.samples_per_step = dp_rank, dp_size, samples_per_step
        check_samples_per_step(samples_per_step, dp_size)

    def __iter__(self) -> Iterator[SampleOutcome]:
        return self.outcomes(0)

    def outcomes(self, start: int) -> Generator[SampleOutcome]:
        """From micro-step `start` on; samples before it are read and packed, but no batch is made of them.

        (A Trainer that resumes skips through the loader instead, which makes the batches, too.)
        """
        step = 0
        try:
            for samples in self._micro_steps():
                if step >= start:
                    batch, _ = self.collator.collate(samples[self.dp_rank])
                    yield SampleOutcome(step, batch, _digest(samples))
                step += 1
        except Exception as error:
            yield SampleOutcome(step, error=plain_error(error))

    def _micro_steps(self) -> Iterator[list[list[Document]]]:
        """The samples of each micro-step, one per dp rank."""
        samples = self._samples()
        while True:
            step = list(itertools.islice(samples, self.samples_per_step))
            costs = [sum(causal_area(len(document)) for document in sample) for sample in step]
            order = even_out(range(len(step)), costs, self.dp_size)
            for start in range(0, len(order), self.dp_size):
                yield [step[number] for number in order[start : start + self.dp_size]]

    def _samples(self) -> Iterator[list[Document]]:
        for number, documents in enumerate(self._buffers()):
            samples = pack_documents([len(document) for document in documents], self.settings.max_tokens)
            if self.settings.shuffle:
                order = np.random.default_rng([self.settings.seed, number]).permutation(len(samples))
                samples = [samples[index] for index in order]
            for sample in samples:
                yield [documents[index] for index in sample]

    def _buffers(self) -> Iterator[Sequence[Document]]:
        """Documents of one buffer after the other; a last short one ends a pass over the stream.

        A buffer whose documents are all left out (empty, or dropped) is passed over; a pass must give one document.
        """
        for epoch in itertools.count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            features, counts, has_given = iter(self.stream), DocumentCounts(), False
            for number in itertools.count():
                buffer = list(itertools.islice(features, self.settings.buffer_documents))
                if not buffer and number == 0:
                    raise ValueError(
                        f"The stream {type(self.stream).__name__} gives no document in pass {epoch}.\n  Pass a data "
                        "set that can be iterated again, not an iterator that is used up."
                    )
                if not buffer:
                    break
                prepared = self._prepare(buffer, first=number * self.settings.buffer_documents, epoch=epoch)
                counts += prepared.counts
                if prepared.documents:
                    has_given = True
                    yield prepared.documents
            if not has_given:
                name = type(self.stream).__name__
                raise ValueError(f"In pass {epoch} of {name}: {none_left(counts, self.settings.max_tokens)}")

    def _prepare(self, buffer: list[Any], *, first: int, epoch: int) -> PreparedDocuments:
        try:
            prepared = self.collator.prepare(buffer, allow_none=True)
        except ValueError as error:
            place = f"In the {len(buffer)} features of the stream from number {first:,} on (pass {epoch}): "
            raise ValueError(place + str(error)) from error
        self.collator.report(prepared.counts)
        return prepared


def _digest(samples: Sequence[Sequence[Document]]) -> int:
    """A signed 64-bit hash of the samples of all dp ranks."""
    digest = hashlib.blake2b(digest_size=8)
    for document in itertools.chain.from_iterable(samples):
        has_labels, has_positions = document.labels is not document.input_ids, document.position_ids is not None
        digest.update(len(document).to_bytes(8, "big") + bytes([has_labels, has_positions]))
        document.feed(digest)
    return int.from_bytes(digest.digest(), "big", signed=True)


class StreamDataLoader(AgreeingDataLoader):
    """Batches of this process from a stream, for ever; one sample per micro-step and dp rank.

    Taking a batch is collective, as with [`ContextParallelDataLoader`]. The stream is read in this process (a worker
    would read it a second time).

    Args:
        stream (iterable): features, the same in the same order on every rank and in every iteration: an
            `IterableDataset` of torch or `datasets`, not split by rank.
        collator (`DataCollatorForContextParallel`): with `max_tokens`.
        comm (`Communicator`): its mesh gives dp and cp ranks; the ranks agree over it.
        shuffle (`bool`, *optional*, defaults to `False`): permute the samples of each buffer; documents further apart
            do not meet (let the stream shuffle itself with a seed for that).
        seed (`int`, *optional*, defaults to 0): not negative, the same on all ranks.
        samples_per_step (`int`, *optional*): dp_size x accumulation steps (default: dp_size).
        buffer_documents (`int`, *optional*, defaults to 1000): features that are read, held and packed at a time.

    Raises:
        ValueError: the collator has no `max_tokens`, or an argument is out of range.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        collator: DataCollatorForContextParallel,
        comm: Communicator,
        shuffle: bool = False,
        seed: int = 0,
        samples_per_step: int | None = None,
        buffer_documents: int = BUFFER_DOCUMENTS,
    ):
        samples = StreamSamples(
            stream,
            collator=collator.for_rank(comm.mesh),
            settings=StreamSettings(collator.max_tokens, collator.overflow, buffer_documents, shuffle, seed),
            dp_rank=comm.mesh.dp_rank,
            dp_size=comm.mesh.dp_size,
            samples_per_step=comm.mesh.dp_size if samples_per_step is None else samples_per_step,
        )
        super().__init__(samples, comm=comm, what="part of the stream", scope="world", batch_size=1)

    def _outcomes_from(self, start: int) -> Generator[SampleOutcome]:
        return self.dataset.outcomes(start)

    @property
    def position(self) -> LoaderPosition:
        """Where the loader is, with what that depends on; equal on all ranks. (A stream's contents are not known.)"""
        samples = self.dataset
        return LoaderPosition(
            epoch=0,
            next_step=self._next_step,
            dp_size=samples.dp_size,
            samples_per_step=samples.samples_per_step,
            samples_per_epoch=None,
            shuffle=samples.settings.shuffle,
            seed=samples.settings.seed,
            group_by_cost=False,
            data_digest=samples.settings.digest,
        )
