"""Rows for training: packed once, given to data-parallel ranks, the same on all ranks of a context-parallel group.

In micro-step s of an epoch, the group with `dp_rank` d works on row `order[s * dp_size + d]`, where (seed, epoch) give
the `order` (hf_cp/data/order.py). All ranks compute it alone; before a batch is handed out they compare
(hf_cp/distributed/host.py). With 5 rows and dp_size 2, without shuffling:

| micro-step | dp 0 | dp 1 |
|---|---|---|
| 0 | row 0 | row 1 |
| 1 | row 2 | row 3 |
| 2 | row 4 | a row without targets |

So every row appears exactly once in an epoch, and all ranks take the same number of steps.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.order import MASKED_ROW, RowOrder, attention_areas
from hf_cp.data.packed import PackedDataset
from hf_cp.data.position import LoaderPosition
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree
from hf_cp.sequence.sample import SAMPLE_KEY, replace

logger = logging.getLogger(__name__)


class RowSampler(BatchSampler):
    """The rows of one dp rank in step order, as `[(step, row)]`; each micro-step has one row.

    The epoch lives here because whoever rebuilds a loader around its sampler (accelerate's `skip_first_batches`) calls
    `set_epoch` on the sampler.
    """

    def __init__(self, order: RowOrder, *, dp_rank: int):
        self.order, self.dp_rank = order, dp_rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.order.num_micro_steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        own = self.order.rows(self.epoch)[self.dp_rank :: self.order.dp_size]
        yield from ([step_and_row] for step_and_row in enumerate(own))


@dataclass(frozen=True)
class RowOutcome:
    """A micro-step's batch for this rank, or what went wrong while it was made."""

    step: int
    batch: dict[str, Any] | None = None
    digest: int = 0
    is_exhausted: bool = False
    error: Exception | None = None


class RankRows(Dataset):
    """Makes this rank's batch of a row, maybe in a worker. An error is returned, so that all ranks can be told."""

    def __init__(self, packed: PackedDataset, collator: DataCollatorForContextParallel):
        self.packed, self.collator = packed, collator

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, step_and_row: tuple[int, int]) -> RowOutcome:
        step, row = step_and_row
        try:
            documents = self.collator.masked_row() if row == MASKED_ROW else self.packed[row]
            batch, digest = self.collator.collate(documents)
        except Exception as error:
            return RowOutcome(step, error=plain_error(error))
        return RowOutcome(step, batch, digest)


def plain_error(error: Exception) -> Exception:
    """The error, in a type that is certain to survive the way out of a worker process."""
    if type(error) in (ValueError, RuntimeError):
        return error
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    plain.__cause__ = error
    return plain


def agreed_batch(what: str, outcome: RowOutcome, *, comm: Communicator, scope: str) -> dict[str, Any]:
    """The outcome's batch, once all ranks have said that they have theirs (see [`agree`])."""
    sample = outcome.batch.get(SAMPLE_KEY) if outcome.batch is not None else None
    longest = agree(
        what,
        comm=comm,
        step=outcome.step,
        digest=outcome.digest,
        error=outcome.error,
        scope=scope,
        size=0 if sample is None else sample.layout.local_length,
    )
    if sample is None:
        return outcome.batch
    agreed = replace(sample, is_agreed=True, common_length=longest, micro_step=outcome.step)
    return {**outcome.batch, SAMPLE_KEY: agreed}


def _as_is(outcome: RowOutcome) -> RowOutcome:
    return outcome


class ContextParallelDataLoader(DataLoader):
    """One row per micro-step and dp rank, as this process's batch.

    Documents are packed once (when the collator has `max_tokens`); epochs permute whole rows, so `len(loader)` is
    constant. Where rows do not divide over the dp ranks, the short side gets rows whose labels are all -100. Making a
    loader and taking a batch are collective: all ranks must do both. accelerate takes the loader as it is (`prepare`
    changes nothing).

    Args:
        dataset (sequence): features (see [`PackedDataset`]), equal on all ranks.
        collator (`DataCollatorForContextParallel`): reads features and makes batches.
        comm (`Communicator`): its mesh gives dp and cp ranks; the ranks agree over it.
        batch_size (`int`, *optional*, defaults to 1): features of a row when the collator has no `max_tokens`.
        shuffle (`bool`, *optional*, defaults to `False`): permute rows by (seed, epoch); otherwise natural order.
        rows_per_step (`int`, *optional*): rows of an optimizer step, dp_size x accumulation steps (default: dp_size).
            Which rows these are depends on nothing but (seed, epoch); among them, rows of similar cost meet in one
            micro-step.
        group_by_cost (`bool`, *optional*, defaults to `False`): with `shuffle`, the rows of an optimizer step have
            similar costs, so that dp ranks are even without accumulation too ([`RowOrder`]).
        seed (`int`, *optional*, defaults to 0): not negative, the same on all ranks.
        drop_last (`bool`, *optional*, defaults to `False`): leave out a last step that has too few rows.
        num_workers (`int`, *optional*, defaults to 0): processes that make batches ahead; the batches are the same.

    Attributes:
        manifest (`PackingManifest`): what every row holds.
        packed (`PackedDataset`): the rows.
        batch_size (`int`): 1, the micro batch of a process.
        epoch (`int`): the epoch of the next iteration; a finished iteration moves it on.

    Raises:
        ValueError: on every rank alike, for the reasons given at [`PackedDataset`].
        RuntimeError: ranks have different rows, or a rank has an error; on all ranks, naming them.
    """

    _is_accelerate_prepared = True  # rows are split over dp and cp ranks already; accelerate must not split them again
    use_stateful_dataloader = True  # accelerate's save_state and load_state keep the position

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
        rows_per_step: int | None = None,
        group_by_cost: bool = False,
    ):
        self._comm, self._worker_processes, mesh = comm, num_workers, comm.mesh
        rows = _pack_on_all_ranks(
            dataset, comm, collator=collator, batch_size=batch_size, seed=seed if shuffle else None
        )
        self.packed, self.manifest = rows.packed, rows.packed.manifest
        self._start_step = self._next_step = 0
        order = RowOrder(
            attention_areas(self.manifest),
            dp_size=mesh.dp_size,
            rows_per_step=mesh.dp_size if rows_per_step is None else rows_per_step,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            group_by_cost=group_by_cost,
        )
        sampler = RowSampler(order, dp_rank=mesh.dp_rank)
        # Whoever rebuilds the loader from these parts (skip_first_batches) gets the status exchange with collate_fn,
        # and no workers, because the exchange must run in this process.
        super().__init__(rows, batch_sampler=sampler, collate_fn=self._collate_rows)
        if mesh.rank == 0:
            # Documents that do not reach a row as they were given must be seen, whatever the log level.
            logger.log(logging.WARNING if self.manifest.counts else logging.INFO, "Packed %s", self.manifest)

    @property
    def batch_size(self) -> int:
        """Rows per process and micro-step; DeepSpeed's micro batch size."""
        return 1

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """torch's DataLoader writes `None` here when it is given a batch sampler."""

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
                f"Cannot skip {num_steps} micro-steps: an epoch has {len(self)} ({self.order.num_given} rows over "
                f"dp_size={self._comm.mesh.dp_size}). Count micro-steps within the epoch, per dp rank."
            )
        self._start_step = self._next_step = num_steps
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self._start_step = self._start_step, 0
        self._next_step = start
        return self._iterate(start, [step for (step,) in self.batch_sampler][start:], self.epoch)

    def _iterate(self, start: int, steps: list[tuple[int, int]], epoch: int) -> Iterator[dict[str, Any]]:
        with contextlib.closing(self._outcomes(steps)) as outcomes:  # ends worker processes whatever happens
            for step in range(start, len(self) + 1):
                outcome = _next_outcome(outcomes, step)
                if outcome.is_exhausted:
                    # The ranks agree on the end too; a loop that takes exactly len(loader) batches never comes here.
                    agree("sample", comm=self._comm, step=outcome.step, is_exhausted=True)
                    break
                yield self._collate_rows([outcome])
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def _outcomes(self, steps: list[tuple[int, int]]) -> Iterator[RowOutcome]:
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

    def _collate_rows(self, outcomes: list[RowOutcome]) -> dict[str, Any]:
        """Hands out a batch, after all ranks have said that they have theirs."""
        (outcome,) = outcomes
        batch = agreed_batch("sample", outcome, comm=self._comm, scope="cp")
        self._next_step = outcome.step + 1
        return batch

    @property
    def order(self) -> RowOrder:
        """In which order rows are given out."""
        return self.batch_sampler.order

    @property
    def position(self) -> LoaderPosition:
        """Where the loader is, with what that depends on; equal on all ranks."""
        return LoaderPosition.of(self.order, data_digest=self.packed.digest, epoch=self.epoch, step=self._next_step)

    def state_dict(self) -> dict[str, Any]:
        """[`ContextParallelDataLoader.position`] as plain values."""
        return asdict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where [`ContextParallelDataLoader.state_dict`] was taken; any cp_size will do.

        With another number of dp ranks the same rows are left, if the saved position is at the end of an optimizer
        step of both runs.

        Raises:
            ValueError: the documents, their order, or the rows of a step are not those of the saved run.
        """
        next_step = LoaderPosition.load(state).next_step_in(self.position)
        self.set_epoch(state["epoch"])
        self.skip(next_step)

    def save_manifest(self, path: str | os.PathLike) -> None:
        """Writes the packing manifest as JSON, with this run's padding per row; rank 0 writes, the others return."""
        if self._comm.mesh.rank == 0:
            self.manifest.save(path, config=self.dataset.collator.config)


def _pack_on_all_ranks(
    dataset: Sequence[Any], comm: Communicator, *, collator: DataCollatorForContextParallel, **kwargs: Any
) -> RankRows:
    """Packs the data set on this rank and compares with the others; an error on one rank is raised on all."""
    rows, digest, failure = None, 0, None
    try:
        rows = RankRows(PackedDataset(dataset, collator=collator, **kwargs), collator.for_rank(comm.mesh))
        digest = int.from_bytes(bytes.fromhex(rows.packed.digest)[:8], "big", signed=True)
    except Exception as error:
        failure = error
    agree("packing of the data set", comm=comm, digest=digest, error=failure, scope="world")
    return rows


def _next_outcome(outcomes: Iterator[RowOutcome], step: int) -> RowOutcome:
    """The next outcome; a worker process that cannot start or dies is an error like any other."""
    try:
        return next(outcomes, RowOutcome(step, is_exhausted=True))
    except Exception as error:
        return RowOutcome(step, error=error)
