"""Samples for training: packed once, one per data-parallel rank, the same for every rank of a context-parallel group.

In micro-step s of an epoch, the group with `dp_rank` d works on sample `order[s * dp_size + d]`, where (seed, epoch)
give the `order` (hf_cp/data/order.py). All ranks compute it alone; before a batch is handed out they compare
(hf_cp/data/agreement.py). With 5 samples and dp_size 2, without shuffling:

| micro-step | dp 0 | dp 1 |
|---|---|---|
| 0 | sample 0 | sample 1 |
| 1 | sample 2 | sample 3 |
| 2 | sample 4 | the dummy sample |

So every sample appears exactly once in an epoch, and all ranks take the same number of steps.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from hf_cp.data.agreement import AgreeingDataLoader, SampleOutcome, plain_error
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.order import DUMMY, LoaderPosition, SampleOrder, attention_areas
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree

logger = logging.getLogger(__name__)


class RankSampler(BatchSampler):
    """The samples of one dp rank in step order, as `[(step, sample)]`; each micro-step has one sample.

    The epoch lives here because whoever rebuilds a loader around its sampler (accelerate's `skip_first_batches`) calls
    `set_epoch` on the sampler.
    """

    def __init__(self, order: SampleOrder, *, dp_rank: int):
        self.order, self.dp_rank = order, dp_rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.order.num_micro_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        own = self.order.samples(self.epoch)[self.dp_rank :: self.order.dp_size]
        yield from ([step_and_sample] for step_and_sample in enumerate(own))


class RankSamples(Dataset):
    """Makes this rank's batch of a sample, maybe in a worker. An error is returned, so that all ranks can be told."""

    def __init__(self, packed: PackedDataset, collator: DataCollatorForContextParallel):
        self.packed, self.collator = packed, collator

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, step_and_sample: tuple[int, int]) -> SampleOutcome:
        step, sample = step_and_sample
        try:
            documents = self.collator.dummy_sample() if sample == DUMMY else self.packed[sample]
            batch, digest = self.collator.collate(documents)
        except Exception as error:
            return SampleOutcome(step, error=plain_error(error))
        return SampleOutcome(step, batch, digest)


def _as_is(outcome: SampleOutcome) -> SampleOutcome:
    return outcome


class ContextParallelDataLoader(AgreeingDataLoader):
    """One sample per micro-step and dp rank, as this process's batch.

    Documents are packed once (when the collator has `max_tokens`); epochs permute whole samples, so `len(loader)` is
    constant. Where samples do not divide over the dp ranks, the short side gets samples whose labels are all -100.
    Making a loader and taking a batch are collective: all ranks must do both. accelerate takes the loader as it is
    (`prepare` changes nothing).

    Args:
        dataset (sequence): features (see [`PackedDataset`]), equal on all ranks.
        collator (`DataCollatorForContextParallel`): reads features and makes batches.
        comm (`Communicator`): its mesh gives dp and cp ranks; the ranks agree over it.
        batch_size (`int`, *optional*, defaults to 1): features of a sample when the collator has no `max_tokens`.
        shuffle (`bool`, *optional*, defaults to `False`): permute samples by (seed, epoch); otherwise natural order.
        samples_per_step (`int`, *optional*): samples of an optimizer step, dp_size x accumulation steps (default:
            dp_size). Which samples these are depends on nothing but (seed, epoch); among them, samples of similar cost
            meet in one micro-step.
        group_by_cost (`bool`, *optional*, defaults to `False`): with `shuffle`, the samples of an optimizer step have
            similar costs, so that dp ranks are even without accumulation too ([`SampleOrder`]).
        seed (`int`, *optional*, defaults to 0): not negative, the same on all ranks.
        drop_last (`bool`, *optional*, defaults to `False`): leave out a last step that has too few samples.
        num_workers (`int`, *optional*, defaults to 0): processes that make batches ahead; the batches are the same.

    Attributes:
        manifest (`PackingManifest`): what every sample holds.
        packed (`PackedDataset`): the samples.
        batch_size (`int`): 1, the micro batch of a process.
        epoch (`int`): the epoch of the next iteration; a finished iteration moves it on.

    Raises:
        ValueError: on every rank alike, for the reasons given at [`PackedDataset`].
        RuntimeError: ranks have different samples, or a rank has an error; on all ranks, naming them.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        collator: DataCollatorForContextParallel,
        comm: Communicator,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        samples_per_step: int | None = None,
        group_by_cost: bool = False,
    ):
        samples = _pack_on_all_ranks(
            dataset, comm, collator=collator, batch_size=batch_size, seed=seed if shuffle else None
        )
        self._worker_processes = num_workers
        self.packed, self.manifest = samples.packed, samples.packed.manifest
        order = SampleOrder(
            attention_areas(self.manifest),
            dp_size=comm.mesh.dp_size,
            samples_per_step=comm.mesh.dp_size if samples_per_step is None else samples_per_step,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            group_by_cost=group_by_cost,
        )
        sampler = RankSampler(order, dp_rank=comm.mesh.dp_rank)
        super().__init__(samples, comm=comm, what="sample", scope="cp", batch_sampler=sampler)
        if comm.mesh.rank == 0:
            # Documents that do not reach a sample as they were given must be seen, whatever the log level.
            logger.log(logging.WARNING if self.manifest.counts else logging.INFO, "Packed %s", self.manifest)

    @property
    def batch_size(self) -> int:
        """Samples per process and micro-step; DeepSpeed's micro batch size."""
        return 1

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """torch's DataLoader writes `None` here when it is given a batch sampler."""

    @property
    def order(self) -> SampleOrder:
        """In which order samples are taken."""
        return self.batch_sampler.order

    @property
    def epoch(self) -> int:
        return self.batch_sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration. A change of epoch also undoes `skip`."""
        if epoch != self.epoch:
            self._start_step = self._next_step = 0
        self.batch_sampler.set_epoch(epoch)

    def skip(self, num_steps: int) -> ContextParallelDataLoader:
        """The next iteration leaves out its first `num_steps` micro-steps; returns the loader.

        Raises:
            ValueError: the epoch has fewer steps.
        """
        if not 0 <= num_steps <= len(self):
            raise ValueError(
                f"Cannot skip {num_steps} micro-steps: an epoch has {len(self)} ({self.order.samples_per_epoch} "
                f"samples over dp_size={self.order.dp_size}). Count micro-steps within the epoch, per dp rank."
            )
        return super().skip(num_steps)

    def _outcomes_from(self, start: int) -> Generator[SampleOutcome]:
        """No generator itself: order and epoch are those of the moment in which the iteration is begun."""
        return self._epoch_from(start, [step for (step,) in self.batch_sampler][start:], self.epoch)

    def _epoch_from(self, start: int, steps: list[tuple[int, int]], epoch: int) -> Generator[SampleOutcome]:
        with contextlib.closing(self._made(steps)) as made:
            for step in range(start, len(self) + 1):  # one more: all ranks must be at the end together
                outcome = _next_outcome(made, step)
                yield outcome
                if outcome.is_exhausted:
                    break
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def _made(self, steps: list[tuple[int, int]]) -> Generator[SampleOutcome]:
        """A generator, so that worker processes start with the first `next`, where an error is caught."""
        if self._worker_processes:
            # A process group that is garbage must end here: in a forked worker, its destructor would wait for threads
            # that were not forked.
            gc.collect()
        yield from DataLoader(
            self.dataset,
            sampler=steps,
            batch_size=None,
            collate_fn=_as_is,
            num_workers=self._worker_processes,
            generator=torch.Generator(),  # the user's random state (dropout) is left alone
        )

    @property
    def position(self) -> LoaderPosition:
        """Where the loader is, with what that depends on; equal on all ranks."""
        return LoaderPosition.of(self.order, data_digest=self.packed.digest, epoch=self.epoch, step=self._next_step)

    def _go_on(self, epoch: int, step: int) -> None:
        self.set_epoch(epoch)
        self.skip(step)

    def save_manifest(self, path: str | os.PathLike) -> None:
        """Writes the packing manifest as JSON, with this run's padding per sample; rank 0 does, the others return."""
        if self.comm.mesh.rank == 0:
            self.manifest.save(path, config=self.dataset.collator.config)


def _pack_on_all_ranks(
    dataset: Sequence[Any], comm: Communicator, *, collator: DataCollatorForContextParallel, **kwargs: Any
) -> RankSamples:
    """Packs the data set on this rank and compares with the others; an error on one rank is raised on all."""
    samples, digest, failure = None, 0, None
    try:
        samples = RankSamples(PackedDataset(dataset, collator=collator, **kwargs), collator.for_rank(comm.mesh))
        digest = int.from_bytes(bytes.fromhex(samples.packed.digest)[:8], "big", signed=True)
    except Exception as error:
        failure = error
    agree("packing of the data set", comm=comm, digest=digest, error=failure, scope="world")
    return samples


def _next_outcome(outcomes: Iterator[SampleOutcome], step: int) -> SampleOutcome:
    """The next outcome; a worker process that cannot start or dies is an error like any other."""
    try:
        return next(outcomes, SampleOutcome(step, is_exhausted=True))
    except Exception as error:
        return SampleOutcome(step, error=error)
