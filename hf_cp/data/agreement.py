"""What both loaders are: they hand out a sample once all ranks have theirs, and know their place in the data.

A batch is made on this rank alone (maybe in a worker process), as a [`SampleOutcome`]: an error there is a value, so
that it can be told to all ranks before any of them waits in a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hf_cp._compat import mark_prepared
from hf_cp.data.order import LoaderPosition
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree
from hf_cp.sequence.sample import SAMPLE_KEY, replace


@dataclass(frozen=True)
class SampleOutcome:
    """A micro-step's batch for this rank, or what went wrong while it was made."""

    step: int
    batch: dict[str, Any] | None = None
    digest: int = 0
    is_exhausted: bool = False
    error: Exception | None = None


def plain_error(error: Exception) -> Exception:
    """The error, in a type that is certain to survive the way out of a worker process."""
    if type(error) in (ValueError, RuntimeError):
        return error
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    plain.__cause__ = error
    return plain


class AgreeingDataLoader(DataLoader):
    """A loader whose batches are agreed on by all ranks; the base of both loaders of this package.

    A subclass says which outcomes an iteration has (`_outcomes_from`) and where it is (`position`).

    Args:
        outcomes (`Dataset`): makes this rank's [`SampleOutcome`]s.
        comm (`Communicator`): over which the ranks agree.
        what (`str`): what the outcomes' digests are of, for messages.
        scope (`str`): who must have equal digests: `"cp"` or `"world"` (see [`agree`]).
        sampling: of torch's DataLoader.
    """

    use_stateful_dataloader = True  # accelerate's save_state and load_state keep the position

    def __init__(self, outcomes: Dataset, *, comm: Communicator, what: str, scope: str, **sampling: Any):
        self.comm, self._what, self._scope = comm, what, scope
        self._start_step = self._next_step = 0
        # Whoever rebuilds the loader from its parts (accelerate's skip_first_batches) gets the agreement with
        # collate_fn, and no workers, because ranks must agree in this process.
        super().__init__(outcomes, collate_fn=self._agreed, **sampling)
        mark_prepared(self)  # samples are split over dp and cp ranks already; accelerate must not do it again

    def skip(self, num_steps: int) -> AgreeingDataLoader:
        """The next iteration leaves out its first `num_steps` micro-steps; returns the loader.

        Raises:
            ValueError: the epoch has fewer steps.
        """
        if num_steps < 0:
            raise ValueError(f"Cannot skip {num_steps} micro-steps. Use 0 or more.")
        self._start_step = self._next_step = num_steps
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self._start_step = self._start_step, 0
        self._next_step = start
        return self._batches(self._outcomes_from(start))

    def _batches(self, outcomes: Generator[SampleOutcome]) -> Iterator[dict[str, Any]]:
        with contextlib.closing(outcomes):  # ends worker processes whatever happens
            for outcome in outcomes:
                batch = self._agreed([outcome])
                if batch is not None:
                    yield batch

    def _outcomes_from(self, start: int) -> Generator[SampleOutcome]:
        """Of an iteration that begins now, from micro-step `start` on."""
        raise NotImplementedError

    def _agreed(self, outcomes: list[SampleOutcome]) -> dict[str, Any] | None:
        """The batch of one outcome, once all ranks have said that they have theirs (see [`agree`]).

        At the end, the ranks agree on that too, and there is none; a loop that takes exactly `len(loader)` batches
        never comes there.
        """
        (outcome,) = outcomes
        sample = outcome.batch.get(SAMPLE_KEY) if outcome.batch is not None else None
        longest = agree(
            self._what,
            comm=self.comm,
            step=outcome.step,
            digest=outcome.digest,
            is_exhausted=outcome.is_exhausted,
            error=outcome.error,
            scope=self._scope,
            size=0 if sample is None else sample.layout.local_length,
        )
        if outcome.is_exhausted:
            return None
        self._next_step = outcome.step + 1
        if sample is None:
            return outcome.batch
        agreed = replace(sample, is_agreed=True, common_length=longest, micro_step=outcome.step)
        return {**outcome.batch, SAMPLE_KEY: agreed}

    @property
    def position(self) -> LoaderPosition:
        """Where the loader is, with what that depends on; equal on all ranks."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The `position` as plain values."""
        return asdict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where [`AgreeingDataLoader.state_dict`] was taken; any cp_size will do.

        With another number of dp ranks the same samples are left, if the saved position is at the end of an optimizer
        step of both runs. A stream is read again up to that place.

        Raises:
            ValueError: the documents, their order, or the samples of a step are not those of the saved run.
        """
        saved = LoaderPosition.load(state)
        self._go_on(saved.epoch, saved.next_step_in(self.position))

    def _go_on(self, epoch: int, step: int) -> None:
        self.skip(step)
