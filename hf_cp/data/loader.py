"""Rows for training: packed once, dealt to data-parallel ranks, the same for every rank of a context-parallel group.

In micro-step s of an epoch, the group with `dp_rank` d works on row `order[s * dp_size + d]`, where `order` is a
permutation given by (seed, epoch). All ranks compute it alone; before a batch is handed out they compare
(hf_cp/parallel/status.py). With 5 rows and dp_size 2, without shuffling:

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.packed import PackedDataset
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.parallel.status import exchange_status

logger = logging.getLogger(__name__)

MASKED_ROW = -1  # stands for a row without targets, where rows do not divide over dp ranks


class RowSampler(BatchSampler):
    """The rows of one dp rank in step order, as `[(step, row)]`; each micro-step has one row.

    The epoch lives here because whoever rebuilds a loader around its sampler (accelerate's `skip_first_batches`) calls
    `set_epoch` on the sampler.
    """

    def __init__(self, num_rows: int, *, dp_rank: int, dp_size: int, shuffle: bool, seed: int, drop_last: bool):
        if drop_last and num_rows < dp_size:
            raise ValueError(
                f"drop_last leaves no step: {num_rows} rows for dp_size={dp_size}.\n"
                "  Use drop_last=False, a smaller max_tokens (more rows), or fewer data-parallel ranks."
            )
        self.num_rows, self.dp_rank, self.dp_size = num_rows, dp_rank, dp_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows // self.dp_size if self.drop_last else -(-self.num_rows // self.dp_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows).tolist()
        else:
            order = list(range(self.num_rows))
        order += [MASKED_ROW] * (len(self) * self.dp_size - self.num_rows)
        for step in range(len(self)):
            yield [(step, order[step * self.dp_size + self.dp_rank])]


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
            return RowOutcome(step, error=_plain(error))
        return RowOutcome(step, batch, digest)


def _plain(error: Exception) -> Exception:
    """The error, in a type that is certain to survive the way out of a worker process."""
    if type(error) in (ValueError, RuntimeError):
        return error
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    plain.__cause__ = error
    return plain


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
        mesh (`ContextParallelMesh`): gives dp and cp ranks, and carries the status exchange.
        batch_size (`int`, *optional*, defaults to 1): features of a row when the collator has no `max_tokens`.
        shuffle (`bool`, *optional*, defaults to `False`): permute rows by (seed, epoch); otherwise natural order.
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

    _is_accelerate_prepared = True  # rows are dealt to dp and cp ranks already; accelerate must not deal them again
    use_stateful_dataloader = True  # accelerate's save_state and load_state keep the position

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        collator: DataCollatorForContextParallel,
        mesh: ContextParallelMesh,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
    ):
        self._mesh, self._worker_processes = mesh, num_workers
        rows = _pack_on_all_ranks(
            dataset, mesh, collator=collator, batch_size=batch_size, seed=seed if shuffle else None
        )
        self.packed, self.manifest = rows.packed, rows.packed.manifest
        self._start_step = self._next_step = 0
        sampler = RowSampler(
            len(self.packed),
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        # Whoever rebuilds the loader from these parts (skip_first_batches) gets the status exchange with collate_fn,
        # and no workers, because the exchange must run in this process.
        super().__init__(rows, batch_sampler=sampler, collate_fn=self._collate_rows)
        if mesh.rank == 0:
            logger.info("Packed %s", self.manifest)

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
                f"Cannot skip {num_steps} micro-steps: an epoch has {len(self)} ({len(self.packed)} rows over "
                f"dp_size={self._mesh.dp_size}). Count micro-steps within the epoch, per dp rank."
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
                    exchange_status("row", mesh=self._mesh, step=outcome.step, is_exhausted=True)
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
        layout = outcome.batch.get("hf_cp_layout") if outcome.batch is not None else None
        longest = exchange_status(
            "row",
            mesh=self._mesh,
            step=outcome.step,
            digest=outcome.digest,
            error=outcome.error,
            scope="cp",
            size=0 if layout is None else layout.local_length,
        )
        self._next_step = outcome.step + 1
        if layout is not None:
            layout.is_agreed, layout.lockstep_length = True, longest
        return outcome.batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: epoch and next micro-step, with what they depend on. Equal on all ranks."""
        sampler = self.batch_sampler
        return {
            "epoch": self.epoch,
            "next_step": self._next_step,
            "manifest_digest": self.manifest.digest,
            "dp_size": sampler.dp_size,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
            "drop_last": sampler.drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where [`ContextParallelDataLoader.state_dict`] was taken; any cp_size will do.

        Raises:
            ValueError: the rows, their order or the number of dp ranks are not those of the saved run.
        """
        own = self.state_dict()
        for name in ("manifest_digest", "dp_size", "shuffle", "seed", "drop_last"):
            if state[name] != own[name]:
                raise ValueError(
                    f"The saved position does not fit this loader: {name} was {state[name]}, here it is {own[name]}.\n"
                    "  Resume with the same documents, max_tokens, seed and number of data-parallel ranks, or start "
                    "the epoch anew without load_state_dict."
                )
        self.set_epoch(state["epoch"])
        self.skip(state["next_step"])

    def save_manifest(self, path: str | os.PathLike) -> None:
        """Writes the packing manifest as JSON, with this run's padding per row; rank 0 writes, the others return."""
        if self._mesh.rank == 0:
            self.manifest.save(path, config=self._mesh.config)


def _pack_on_all_ranks(
    dataset: Sequence[Any], mesh: ContextParallelMesh, *, collator: DataCollatorForContextParallel, **kwargs: Any
) -> RankRows:
    """Packs the data set on this rank and compares with the others; an error on one rank is raised on all."""
    rows, digest, failure = None, 0, None
    try:
        rows = RankRows(PackedDataset(dataset, collator=collator, **kwargs), collator.for_rank(mesh))
        digest = int.from_bytes(bytes.fromhex(rows.packed.manifest.digest)[:8], "big", signed=True)
    except Exception as error:
        failure = error
    exchange_status("packing of the data set", mesh=mesh, digest=digest, error=failure, scope="world")
    return rows


def _next_outcome(outcomes: Iterator[RowOutcome], step: int) -> RowOutcome:
    """The next outcome; a worker process that cannot start or dies is an error like any other."""
    try:
        return next(outcomes, RowOutcome(step, is_exhausted=True))
    except Exception as error:
        return RowOutcome(step, error=error)
