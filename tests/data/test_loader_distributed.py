"""The packed loader over processes: who gets which sample, and that one rank's trouble ends the run on all."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel, WholeSample
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree
from hf_cp.distributed.mesh import ContextParallelMesh

CP2 = ContextParallelConfig(ring_degree=2)
# Packed into samples of at most 8: 8 full samples, some with several documents.
FEATURES = [[10 + i] * length for i, length in enumerate([5, 8, 3, 6, 2, 7, 4, 4, 8, 5, 3, 7, 1, 1])]

pytestmark = pytest.mark.distributed


def make_loader(features=FEATURES, *, max_tokens: int | None = 8, **kwargs) -> ContextParallelDataLoader:
    collator = DataCollatorForContextParallel(CP2, max_tokens=max_tokens)
    return ContextParallelDataLoader(
        features, collator=collator, comm=Communicator(ContextParallelMesh(CP2)), **kwargs
    )


def whole_sample(batch: dict, mesh: ContextParallelMesh) -> tuple[int, ...]:
    """The ids of the sample, put together from the shards of this context-parallel group."""
    shards = [torch.empty_like(batch["input_ids"]) for _ in range(mesh.cp_size)]
    dist.all_gather(shards, batch["input_ids"], group=mesh.cp_group)
    return tuple(batch["hf_cp_sample"].layout.unshard(shards, dim=1)[0].tolist())


def hash_samples(monkeyed: list[int], loader: ContextParallelDataLoader) -> None:
    """Notes the digest of every sample that `loader` makes in this process, before it is sharded."""
    collate = loader.dataset.collator.collate

    def noting(documents: list) -> tuple[dict, int]:
        monkeyed.append(WholeSample.from_documents(documents, CP2).digest)
        return collate(documents)

    loader.dataset.collator.collate = noting


def deal_two_epochs(num_workers: int) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Per epoch and micro-step: the digest before sharding (0 workers only), and the sample put together again."""
    multiprocessing.set_start_method("fork", force=True)  # quick; pickling is tested in test_loader.py
    loader = make_loader(shuffle=True, seed=7, num_workers=num_workers)
    mesh, hashes, epochs = loader.comm.mesh, [], []
    if num_workers == 0:
        hash_samples(hashes, loader)
    for epoch in range(2):
        hashes.clear()
        loader.set_epoch(epoch)
        samples = [whole_sample(batch, mesh) for batch in loader]
        assert len(samples) == len(loader)
        epochs.append(list(zip(hashes or [hash(sample) for sample in samples], samples, strict=True)))
    return epochs


def test_same_sample_inside_a_group_and_every_sample_once_an_epoch(world4) -> None:
    """On dp 2 x cp 2, 8 samples, shuffled, 2 epochs, without and with workers."""
    by_workers = [world4.run(deal_two_epochs, num_workers) for num_workers in (0, 2)]
    samples = samples_of_one_process()
    assert len(samples) == 8
    for ranks in by_workers:
        assert ranks[0] == ranks[1]
        assert ranks[2] == ranks[3]
        for epoch in range(2):
            dp0, dp1 = ranks[0][epoch], ranks[2][epoch]
            assert len(dp0) == len(dp1) == 4
            assert all(ours != theirs for (ours, _), (theirs, _) in zip(dp0, dp1, strict=True))
            assert sorted(sample for _, sample in dp0 + dp1) == sorted(samples)
        assert ranks[0][0] != ranks[0][1]
    without, with_workers = ([[sample for _, sample in e] for e in by_workers[i][0]] for i in range(2))
    assert without == with_workers


def samples_of_one_process() -> list[tuple[int, ...]]:
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=8)
    loader = ContextParallelDataLoader(
        FEATURES, collator=collator, comm=Communicator(ContextParallelMesh(collator.config))
    )
    return [tuple(batch["input_ids"][0].tolist()) for batch in loader]


def take_odd_samples(drop_last: bool) -> tuple[list[tuple[int, ...]], int, int]:
    loader = make_loader([[i] * 6 for i in range(10, 15)], drop_last=drop_last)
    samples, targets = [], 0
    for batch in loader:
        samples.append(whole_sample(batch, loader.comm.mesh))
        targets += int((batch["shift_labels"] != -100).sum())
    return samples, targets, len(loader)


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_that_do_not_divide(world4, drop_last: bool) -> None:
    """5 samples over dp 2; the short side gets a sample without targets, no sample comes twice."""
    ranks = world4.run(take_odd_samples, drop_last)
    steps = 2 if drop_last else 3
    assert [length for _, _, length in ranks] == [steps] * 4
    assert all(len(samples) == steps for samples, _, _ in ranks)
    assert sum(targets for _, targets, _ in ranks) == 5 * (4 if drop_last else 5)
    first_ids = [sample[0] for rank in (0, 2) for sample in ranks[rank][0]]
    assert sorted(first_ids) == ([10, 11, 12, 13] if drop_last else [0, 10, 11, 12, 13, 14])


class FailingFeatures:
    """Reading feature 3 fails on one rank."""

    def __init__(self, bad_rank: int):
        self.bad_rank = bad_rank

    def __len__(self) -> int:
        return len(FEATURES)

    def __getitem__(self, index: int) -> list[int]:
        if index == 3 and int(os.environ["RANK"]) == self.bad_rank:
            raise OSError("disk of this host is gone")
        return FEATURES[index]


def fail_in_dataset() -> None:
    make_loader(FailingFeatures(bad_rank=2))


def fail_in_collator(num_workers: int) -> None:
    multiprocessing.set_start_method("fork", force=True)
    loader = make_loader(num_workers=num_workers)
    if int(os.environ["RANK"]) == 3:
        loader.dataset.collator.max_tokens = 6
    for _ in loader:
        pass


def end_process(documents: list) -> None:
    os._exit(7)


def lose_a_worker(start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)
    loader = make_loader(num_workers=int(os.environ["RANK"] == "1"))
    if os.environ["RANK"] == "1" and start_method == "fork":
        loader.dataset.collator.collate = end_process
    elif os.environ["RANK"] == "1":
        loader.dataset.collator.collate = lambda documents: None  # cannot be pickled, so the worker cannot start
    for _ in loader:
        pass


def differ_in_content(bad_rank: int) -> None:
    loader = make_loader()
    if int(os.environ["RANK"]) == bad_rank:
        loader.packed.documents[bad_rank // 2].input_ids[4] += 1  # document 0 is in sample 0, document 1 in sample 1
    for _ in loader:
        pass


def differ_in_lengths() -> None:
    features = FEATURES[: len(FEATURES) - int(os.environ["RANK"]) // 2]  # peers agree, the two groups do not
    make_loader(features)


def split_by_user() -> None:
    """Each group was given its own half of the documents, of equal lengths: half of each half would never be seen."""
    group = int(os.environ["RANK"]) // 2
    make_loader([[10 * group + i] * 6 for i in range(8)])


def differ_in_steps() -> None:
    loader = make_loader()
    for _ in loader.skip(int(os.environ["RANK"]) % 2):
        pass


def wrong_cp_rank() -> None:
    collator = DataCollatorForContextParallel(CP2, cp_rank=0, max_tokens=8)
    ContextParallelDataLoader(FEATURES, collator=collator, comm=Communicator(ContextParallelMesh(CP2)))


def all_empty() -> None:
    make_loader([[], []])


def assert_raises_everywhere(world4, fn, *args, type_name: str = "RuntimeError", says: tuple[str, ...]) -> None:
    errors = world4.run(fn, *args, expect_error=True, timeout=30)
    assert [error.type_name for error in errors] == [type_name] * 4
    for error in errors:
        assert all(text in error.message for text in says), error.message


def test_error_in_one_ranks_dataset_is_raised_on_all(world4) -> None:
    assert_raises_everywhere(
        world4,
        fail_in_dataset,
        says=(
            "1 of 4 ranks could not make their packing of the data set",
            "rank 2: OSError: disk of this host is gone",
        ),
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_in_one_ranks_collator_is_raised_on_all(world4, num_workers: int) -> None:
    assert_raises_everywhere(
        world4,
        fail_in_collator,
        num_workers,
        says=("could not make their sample for micro-step 0", "rank 3: ValueError: The sample has 8 tokens"),
    )


@pytest.mark.parametrize(
    ("start_method", "message"), [("fork", "RuntimeError: DataLoader worker"), ("spawn", "Can't pickle local object")]
)
def test_lost_worker_process_is_raised_on_all(world4, start_method: str, message: str) -> None:
    assert_raises_everywhere(
        world4, lose_a_worker, start_method, says=("sample for micro-step 0", "rank 1: ", message)
    )


@pytest.mark.parametrize(("bad_rank", "peers"), [(1, (0, 1)), (2, (2, 3))])
def test_different_documents_on_cp_peers_are_raised_on_all(world4, bad_rank: int, peers: tuple[int, int]) -> None:
    """A token changes after the data sets were compared."""
    group = f"Context-parallel group {bad_rank // 2} (dp_rank) disagrees on its sample for micro-step 0"
    says = (group, f"rank {peers[0]} has digest", f"rank {peers[1]} has")
    assert_raises_everywhere(world4, differ_in_content, bad_rank, says=says)


def test_different_packing_is_raised_on_all(world4) -> None:
    assert_raises_everywhere(
        world4, differ_in_lengths, says=("The world disagrees on its packing of the data set", "rank 0", "rank 2")
    )


def test_data_set_split_by_rank_is_raised_on_all(world4) -> None:
    assert_raises_everywhere(
        world4, split_by_user, says=("The world disagrees on its packing of the data set", "rank 0", "rank 2")
    )


def test_ranks_at_different_steps_are_raised_on_all(world4) -> None:
    assert_raises_everywhere(world4, differ_in_steps, says=("rank 0 is at micro-step 0, rank 1 at micro-step 1",))


def test_wrong_cp_rank_is_raised_on_all(world4) -> None:
    assert_raises_everywhere(
        world4, wrong_cp_rank, says=("rank 1: ValueError: The collator was made for cp_rank=0", "rank 3: ValueError")
    )


def test_mistake_that_every_rank_makes_keeps_its_type(world4) -> None:
    assert_raises_everywhere(
        world4, all_empty, type_name="ValueError", says=("No document is left to train on: 2 empty",)
    )


def count_collectives() -> int:
    calls = []
    original = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        for _ in make_loader():
            pass
    finally:
        dist.all_gather = original
    return len(calls)


def test_one_small_exchange_a_step(world4) -> None:
    """When the loader is made, before each of 4 batches, and at the end."""
    assert world4.run(count_collectives) == [6] * 4


def exchange_different_ends() -> None:
    mesh = ContextParallelMesh(CP2)
    agree("sample", comm=Communicator(mesh), step=3, is_exhausted=mesh.rank == 2)


def test_rank_that_runs_out_of_samples_is_raised_on_all(world4) -> None:
    assert_raises_everywhere(
        world4, exchange_different_ends, says=("rank 0 is at micro-step 3, rank 2 at micro-step 3 (no samples left)",)
    )


def write_manifest(path: str) -> bool:
    loader = make_loader()
    if loader.comm.mesh.rank != 0:
        loader.manifest.__class__.save = None  # a second writer would fail
    loader.save_manifest(path)
    return True


def test_one_writer(world4, tmp_path) -> None:
    assert world4.run(write_manifest, str(tmp_path / "manifest.json")) == [True] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
