"""In which order an epoch visits the samples, who gets which, and how a run finds its place again.

An epoch is a permutation of the samples, given by (seed, epoch) alone, cut into optimizer steps. Which samples share a
step does not depend on the number of dp ranks, so a run may go on with another cp_size (and thus dp_size) and see the
same samples in the same steps; a [`LoaderPosition`] counts them over all dp ranks. *Inside* a step the order is free,
since gradients are added up; it is used to even out the work: costly samples of a step meet in one micro-step, where
dp ranks wait for each other. With samples of cost 1 to 4, dp_size 2 and 4 samples a step:

| micro-step | dp 0 | dp 1 |
|---|---|---|
| 0 | cost 4 | cost 3 |
| 1 | cost 1 | cost 2 |

Every second micro-step is given out backwards, so that no rank gets the costlier sample each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_cp.data.manifest import PackingManifest
from hf_cp.sequence.placement import causal_area

DUMMY = -1  # the number of the dummy sample, which fills up where samples do not divide over dp ranks
MAX_STEPS_PER_POOL = 50  # samples are sorted by cost inside pools of this many optimizer steps
# If any of these differs, the samples of an epoch come in another order, or are other samples.
SAME = ("data_digest", "shuffle", "seed", "group_by_cost", "samples_per_epoch")
EARLIER_NAMES = {"rows_per_step": "samples_per_step", "rows_per_epoch": "samples_per_epoch"}  # in saved files


def with_todays_names(saved: dict[str, Any]) -> dict[str, Any]:
    """What a run of an earlier version saved, under the names that its entries have now."""
    return {EARLIER_NAMES.get(name, name): value for name, value in saved.items()}


def attention_areas(manifest: PackingManifest) -> tuple[int, ...]:
    """Visible (query, key) pairs of each sample: the cost in which samples of about equally many tokens differ."""
    return tuple(sum(causal_area(manifest.lengths[document]) for document in sample) for sample in manifest.samples)


def check_samples_per_step(samples_per_step: int, dp_size: int) -> None:
    """Raises ValueError unless the samples of an optimizer step fill whole micro-steps."""
    if samples_per_step < 1 or samples_per_step % dp_size:
        raise ValueError(
            f"samples_per_step={samples_per_step} is not a multiple of dp_size={dp_size}.\n"
            "  An optimizer step has dp_size samples per micro-step: use dp_size * gradient_accumulation_steps."
        )


def even_out(samples: Sequence[int], costs: Sequence[int], dp_size: int) -> list[int]:
    """Gives out the samples of one step: similar costs in a micro-step, every second micro-step backwards.

    Returns:
        `list[int]`: as [`SampleOrder.samples`], filled up to whole micro-steps with `DUMMY`.
    """
    if len(samples) > dp_size > 1:  # one rank, or one micro-step: nothing to even out
        samples = sorted(samples, key=lambda sample: -costs[sample])
    steps = [list(samples[start : start + dp_size]) for start in range(0, len(samples), dp_size)]
    steps[-1] += [DUMMY] * (dp_size - len(steps[-1]))
    return [sample for number, step in enumerate(steps) for sample in (step[::-1] if number % 2 else step)]


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples for every epoch; equal on all ranks.

    Args:
        costs (`Sequence[int]`): of each sample, in any unit.
        dp_size (`int`): samples of a micro-step.
        samples_per_step (`int`): samples of an optimizer step, a multiple of `dp_size`.
        shuffle (`bool`): permute by (seed, epoch), and even out costs; otherwise natural order.
        seed (`int`): not negative.
        drop_last (`bool`): leave out a last micro-step that has too few samples.
        group_by_cost (`bool`): samples of an optimizer step have similar costs, so that dp ranks are even although it
            has one micro-step. Steps are then homogeneous, which changes what one of them averages over.

    Raises:
        ValueError: `samples_per_step` is not a multiple of `dp_size`, costs are grouped without `shuffle`, or no step
            is left.
    """

    costs: Sequence[int]
    dp_size: int
    samples_per_step: int
    shuffle: bool
    seed: int
    drop_last: bool
    group_by_cost: bool = False

    def __post_init__(self):
        check_samples_per_step(self.samples_per_step, self.dp_size)
        if self.group_by_cost and not self.shuffle:
            raise ValueError("group_by_cost=True needs shuffle=True: natural order cannot be grouped.")
        if self.drop_last and self.num_samples < self.dp_size:
            raise ValueError(
                f"drop_last leaves no step: {self.num_samples} samples for dp_size={self.dp_size}.\n"
                "  Use drop_last=False, a smaller max_tokens (more samples), or fewer data-parallel ranks."
            )

    @property
    def num_samples(self) -> int:
        """Samples of the data set."""
        return len(self.costs)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch visits."""
        return self.num_samples // self.dp_size * self.dp_size if self.drop_last else self.num_samples

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of an epoch, the same for every dp rank."""
        return -(-self.samples_per_epoch // self.dp_size)

    def samples(self, epoch: int) -> list[int]:
        """Numbers of samples in the order of the epoch: micro-step s, dp rank d gets entry s * dp_size + d.

        >>> order = SampleOrder([9] * 5, dp_size=2, samples_per_step=2, shuffle=False, seed=0, drop_last=False)
        >>> order.samples(0)  # 3 micro-steps; the last one is filled up with DUMMY
        [0, 1, 2, 3, 4, -1]
        """
        if not self.shuffle:
            order = list(range(self.samples_per_epoch))
            return order + [DUMMY] * (self.num_micro_steps * self.dp_size - self.samples_per_epoch)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.num_samples)[: self.samples_per_epoch]
        if self.group_by_cost:
            order = self._grouped(order, rng)
        size = self.samples_per_step
        steps = (order[start : start + size] for start in range(0, len(order), size))
        return [sample for step in steps for sample in even_out(step.tolist(), self.costs, self.dp_size)]

    @cached_property
    def _costs(self) -> np.ndarray:
        return np.asarray(self.costs)

    def _falling(self, order: np.ndarray) -> np.ndarray:
        """Sorted by falling cost; equal costs keep their (random) order."""
        return order[np.argsort(-self._costs[order], kind="stable")]

    def _grouped(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Steps of similar samples in random order, the costliest first: if memory is short, it shows in step 1.

        With costs 1 to 8 and 2 samples a step, in one pool:

            permuted       3 8 | 1 5 | 7 2 | 6 4
            sorted         8 7 | 6 5 | 4 3 | 2 1      neighbours in cost share a step
            steps at random  4 3 | 8 7 | 2 1 | 6 5
            costliest first  8 7 | 4 3 | 2 1 | 6 5
        """
        size = self.samples_per_step
        num_steps = len(order) // size
        if num_steps == 0:
            return order
        # few steps: at least 4 pools, so that epochs still differ in who shares a step
        pool = size * max(1, min(MAX_STEPS_PER_POOL, num_steps // 4))
        order = np.concatenate([self._falling(order[start : start + pool]) for start in range(0, len(order), pool)])
        whole, rest = order[: num_steps * size].reshape(num_steps, size), order[num_steps * size :]
        whole = whole[rng.permutation(num_steps)]
        first = int(self._costs[whole].max(axis=1).argmax())
        whole[[0, first]] = whole[[first, 0]]
        return np.concatenate([whole.reshape(-1), rest])


@dataclass(frozen=True)
class LoaderPosition:
    """A place in the data that outlives the run: which samples are done, whoever has done them.

    It can be found again with another cp_size or dp_size: both runs take the same samples in the same optimizer step,
    as long as a step has as many of them.

    Args:
        epoch (`int`): the epoch that is being read.
        next_step (`int`): micro-steps of it that are done.
        dp_size (`int`): samples of a micro-step.
        samples_per_step (`int`): samples of an optimizer step.
        samples_per_epoch (`int`, *optional*): samples that an epoch visits; `None` for a stream, which never ends.
        shuffle, seed, group_by_cost: of the [`SampleOrder`].
        data_digest (`str`): of the documents and of how they are packed ([`PackedDataset.digest`]).
    """

    epoch: int
    next_step: int
    dp_size: int
    samples_per_step: int
    samples_per_epoch: int | None
    shuffle: bool
    seed: int
    group_by_cost: bool
    data_digest: str

    @classmethod
    def of(cls, order: SampleOrder, *, data_digest: str, epoch: int, step: int) -> LoaderPosition:
        """Micro-step `step` of `epoch` in `order`."""
        names = ("dp_size", "samples_per_step", "samples_per_epoch", "shuffle", "seed", "group_by_cost")
        of_order = {name: getattr(order, name) for name in names}
        return cls(epoch=epoch, next_step=step, data_digest=data_digest, **of_order)

    @classmethod
    def load(cls, state: dict[str, Any]) -> LoaderPosition:
        """From `dataclasses.asdict`, maybe through JSON; earlier versions had other names for two fields.

        Raises:
            ValueError: it was written by another version.
        """
        state = with_todays_names(state)
        known = {field.name for field in dataclasses.fields(cls)}
        if known != set(state):
            raise ValueError(
                f"The saved position of the data loader has the fields {sorted(state)}, this version of hf_cp needs "
                f"{sorted(known)}.\n  Resume with the version that wrote it, or start the epoch anew."
            )
        return cls(**state)

    @property
    def samples_done(self) -> int:
        """Samples of the epoch that are done, over all dp ranks."""
        done = self.next_step * self.dp_size
        return done if self.samples_per_epoch is None else min(done, self.samples_per_epoch)

    def next_step_in(self, current: LoaderPosition) -> int:
        """The micro-step of another loader that continues here.

        Args:
            current (`LoaderPosition`): any position of that loader.

        Raises:
            ValueError: the other loader has other samples or another order, or this is not the end of a step of both.
        """
        self.check_same_samples(current)
        if (self.dp_size, self.samples_per_step) == (current.dp_size, current.samples_per_step):
            return self.next_step
        if self.samples_done == self.samples_per_epoch:
            return -(-self.samples_per_epoch // current.dp_size)
        done, sizes = self.samples_done, {self.samples_per_step, current.samples_per_step}
        # grouped by cost, steps of another size hold other samples from the first one on
        if any(done % size for size in sizes) or (len(sizes) > 1 and self.group_by_cost):
            raise ValueError(
                f"The saved position cannot be continued in this layout: {done} samples of epoch {self.epoch} are "
                f"done with dp_size={self.dp_size} and {self.samples_per_step} samples per optimizer step; here "
                f"dp_size={current.dp_size}, {current.samples_per_step} samples per step.\n"
                "  Resume with gradient_accumulation_steps such that a step has "
                f"{self.samples_per_step} samples, from the end of a step or of an epoch."
            )
        return done // current.dp_size

    def check_same_samples(self, current: LoaderPosition) -> None:
        """Raises ValueError unless both runs have the same samples in the same order."""
        for name in SAME:
            saved, own = getattr(self, name), getattr(current, name)
            if saved != own:
                raise ValueError(
                    f"The saved position does not fit this data: {name} was {saved}, here it is {own}.\n"
                    "  Resume with the same documents, max_tokens, overflow, seed, shuffling and drop_last, or start "
                    "the epoch anew."
                )
