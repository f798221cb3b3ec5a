"""Samples from a stream: the same samples in every layout, for ever, and found again when a run goes on."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.documents import Document
from hf_cp.data.streaming import StreamDataLoader, StreamSamples, StreamSettings, _digest, is_stream
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh

CP1, CP2 = ContextParallelConfig(force=True), ContextParallelConfig(ring_degree=2)
LENGTHS = np.random.default_rng(0).integers(1, 9, 50).tolist()


class Stream(IterableDataset):
    """Documents whose tokens are their number; the second pass has another order."""

    def __init__(self, lengths=LENGTHS, *, shift: int = 0, fails_at: int | None = None):
        self.lengths, self.shift, self.fails_at = lengths, shift, fails_at
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(len(self.lengths)))
        for number in numbers[self.epoch :] + numbers[: self.epoch]:
            if number == self.fails_at:
                raise OSError("the store is gone")
            yield [number + self.shift] * self.lengths[number]


def make_loader(
    stream=None, *, config=CP1, max_tokens: int | None = 16, overflow: str = "error", **settings
) -> StreamDataLoader:
    collator = DataCollatorForContextParallel(config, max_tokens=max_tokens, overflow=overflow)
    stream = Stream() if stream is None else stream
    return StreamDataLoader(
        stream,
        collator=collator,
        comm=Communicator(ContextParallelMesh(config)),
        **{"shuffle": True, "buffer_documents": 20, **settings},
    )


def samples_of(batches) -> list[tuple[int, ...]]:
    return [tuple(batch["input_ids"][0].unique().tolist()) for batch in batches]


def steps_of(dp_size: int, samples_per_step: int, num_samples: int, **settings) -> list[list[tuple[int, ...]]]:
    """The samples (as numbers of their documents) of each optimizer step, made by all dp ranks."""
    collator = DataCollatorForContextParallel(CP1, max_tokens=16)
    ranks = [
        StreamSamples(
            Stream(),
            collator=collator,
            settings=StreamSettings(16, "error", 20, True, 3),
            dp_rank=rank,
            dp_size=dp_size,
            samples_per_step=samples_per_step,
        )
        for rank in range(dp_size)
    ]
    outcomes = [list(itertools.islice(samples.outcomes(0), num_samples // dp_size)) for samples in ranks]
    per_step = samples_per_step // dp_size
    return [
        sorted(samples_of(outcome.batch for own in outcomes for outcome in own[start : start + per_step]))
        for start in range(0, num_samples // dp_size, per_step)
    ]


def test_steps_have_the_same_samples_in_every_layout():
    steps = [steps_of(dp_size, 8, 48) for dp_size in (1, 2, 4, 8)]
    assert all(other == steps[0] for other in steps)
    assert len(steps[0]) == 6 and all(len(step) == 8 for step in steps[0])


def test_every_document_once_a_pass_and_no_sample_is_made_up():
    """Samples go on from one pass to the next; a pass is short of one sample at most where a buffer ends."""
    batches = itertools.islice(make_loader(), 100)
    seen = Counter()
    for batch in batches:
        assert (batch["labels"] != -100).any()
        seen.update(batch["input_ids"][batch["position_ids"] == 0].tolist())
        if len(seen) == len(LENGTHS) and len(set(seen.values())) == 1:
            break
    assert set(seen.values()) == {1}


def test_samples_are_full():
    loader = make_loader()
    fill = [batch["hf_cp_sample"].layout.num_tokens for batch in itertools.islice(loader, 12)]
    assert np.mean(fill) > 14


def test_shuffle_permutes_the_samples_of_a_buffer():
    natural = samples_of(itertools.islice(make_loader(shuffle=False), 12))
    shuffled = [samples_of(itertools.islice(make_loader(seed=seed), 12)) for seed in (0, 0, 1)]
    assert natural != shuffled[0] == shuffled[1] != shuffled[2]


@pytest.mark.parametrize("start", [0, 3, 25])  # 25: inside the second pass
def test_resumed_position(start):
    expected = samples_of(itertools.islice(make_loader(), start + 6))[start:]
    loader = make_loader()
    batches = iter(loader)
    for _ in range(start):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["next_step"] == start
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert samples_of(itertools.islice(resumed, 6)) == expected


def test_position_of_another_run_is_refused():
    state = make_loader().state_dict()
    for other in ({"max_tokens": 17}, {"buffer_documents": 10}, {"seed": 1}, {"shuffle": False}):
        with pytest.raises(ValueError, match="does not fit this data: data_digest was"):
            make_loader(**other).load_state_dict(state)
    with pytest.raises(ValueError, match="cannot be continued in this layout: 3 samples"):
        make_loader(samples_per_step=2).load_state_dict(state | {"next_step": 3})


def test_datasets_stream():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(LENGTHS)]}).to_iterable_dataset()
    assert is_stream(stream) and not is_stream([1]) and not is_stream(None)
    # set_epoch changes nothing of a data set that is not shuffled, so only the first pass is that of Stream
    assert samples_of(itertools.islice(make_loader(stream), 12)) == samples_of(itertools.islice(make_loader(), 12))
    shuffled = stream.shuffle(seed=1, buffer_size=10)
    first, again = (samples_of(itertools.islice(make_loader(shuffled), 40)) for _ in range(2))
    assert first == again


def test_refusals():
    with pytest.raises(ValueError, match="A stream needs max_tokens"):
        make_loader(max_tokens=None)
    with pytest.raises(ValueError, match="buffer_documents=0"):
        make_loader(buffer_documents=0)
    with pytest.raises(ValueError, match="Cannot skip -1"):
        make_loader().skip(-1)
    with pytest.raises(ValueError, match="gives no document in pass 0"):
        next(iter(make_loader(Stream([]))))
    with pytest.raises(ValueError, match="gives no document in pass 1"):
        list(make_loader(Once()))
    with pytest.raises(ValueError, match=r"features of the stream from number 20 on \(pass 0\): Feature 3"):
        list(make_loader(Stream([1] * 23 + [99] + [1] * 5)))


def test_buffers_of_which_nothing_is_left_are_passed_over(caplog):
    """Of 6 buffers of 2 documents the second and the fourth hold only long or empty ones."""
    lengths = [3, 3, 40, 50, 4, 4, 0, 30, 5, 5, 6, 6]

    def make(lengths):
        return make_loader(
            OneOrder(lengths), overflow="drop", buffer_documents=2, shuffle=False
        )  # fmt: skip

    numbers = {number for sample in samples_of(itertools.islice(make(lengths), 4)) for number in sample}
    assert numbers == {0, 1, 4, 5, 8, 9, 10, 11}
    assert caplog.text.count("left out or cut") == 1
    with pytest.raises(ValueError, match=r"In pass 0 of OneOrder: No document is left .*: 1 empty, 3 longer than"):
        next(iter(make([40, 50, 0, 30])))


class OneOrder(Stream):
    def set_epoch(self, epoch: int) -> None:
        pass


def test_digests_know_labels_and_positions():
    ids, other = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32) + 7
    samples = [Document(ids, ids), Document(ids, other), Document(ids, ids, other), Document(ids, ids, ids)]
    assert len({_digest([[document]]) for document in samples}) == 4


class Once:
    """Can be read a single time."""

    def __init__(self):
        self.features = iter([[1, 2, 3]] * 4)

    def __iter__(self):
        return self.features


def deal(num_steps: int, accumulation: int) -> list[tuple[int, ...]]:
    """The samples that this rank's group took, put together from the shards."""
    mesh = ContextParallelMesh(CP2)
    loader = make_loader(config=CP2, samples_per_step=mesh.dp_size * accumulation)
    samples = []
    for batch in itertools.islice(loader, num_steps):
        shards = [torch.empty_like(batch["input_ids"]) for _ in range(mesh.cp_size)]
        dist.all_gather(shards, batch["input_ids"], group=mesh.cp_group)
        samples.append(tuple(batch["hf_cp_sample"].layout.unshard(shards, dim=1)[0].unique().tolist()))
    return samples


@pytest.mark.distributed
def test_ranks_share_samples(world4):
    """dp 2 x ring 2, 4 samples a step: equal inside a group, and together the samples of one process."""
    ranks = world4.run(deal, 8, 2)
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    single = samples_of(itertools.islice(make_loader(samples_per_step=4), 16))
    for step in range(4):
        together = ranks[0][2 * step : 2 * step + 2] + ranks[2][2 * step : 2 * step + 2]
        assert sorted(together) == sorted(single[4 * step : 4 * step + 4])


def differ(case: str) -> None:
    rank = int(os.environ["RANK"])
    streams = {
        "split by group": Stream(shift=100 * (rank // 2)),
        "split by rank": Stream(shift=100 * rank),
        "other order": Stream(LENGTHS[::-1] if rank == 3 else LENGTHS),
        "fails": Stream(fails_at=30 if rank == 1 else None),
        "ends": Stream(LENGTHS[:5] if rank == 2 else LENGTHS),
    }
    for _ in itertools.islice(make_loader(streams[case], config=CP2), 100):
        pass


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("split by group", ("The world disagrees on its part of the stream", "rank 0", "rank 2")),
        ("split by rank", ("The world disagrees on its part of the stream", "rank 0", "rank 1")),
        ("other order", ("The world disagrees on its part of the stream", "rank 3")),
        ("fails", ("1 of 4 ranks could not make their part of the stream", "rank 1: ", "OSError: the store is gone")),
        ("ends", ("The world disagrees on its part of the stream", "rank 2")),
    ],
)
def test_ranks_with_other_streams_stop_together(world4, case, words):
    errors = world4.run(differ, case, expect_error=True, timeout=30)
    assert [error.type_name for error in errors] == ["RuntimeError"] * 4
    for error in errors:
        assert all(word in error.message for word in words), error.message


def test_steps_hold_whole_micro_steps():
    with pytest.raises(ValueError, match="samples_per_step=3 is not a multiple of dp_size=2"):
        StreamSamples(
            Stream(),
            collator=DataCollatorForContextParallel(CP1, max_tokens=32),
            settings=StreamSettings(32, "error", 100, True, 3),
            dp_rank=0,
            dp_size=2,
            samples_per_step=3,
        )


def test_dp_ranks_are_even():
    """Samples of a step are dealt by falling cost, so those that meet in a micro-step are similar."""
    samples = StreamSamples(
        Stream(np.random.default_rng(1).integers(1, 33, 200).tolist()),
        collator=DataCollatorForContextParallel(CP1, max_tokens=32),
        settings=StreamSettings(32, "error", 100, True, 3),
        dp_rank=0,
        dp_size=2,
        samples_per_step=8,
    )
    costs = [
        [sum(len(document) * (len(document) + 1) for document in sample) for sample in micro_step]
        for micro_step in itertools.islice(samples._micro_steps(), 20)
    ]
    for start in range(0, 20, 4):
        step = costs[start : start + 4]
        assert all(min(one) >= max(following) for one, following in itertools.pairwise(step))
