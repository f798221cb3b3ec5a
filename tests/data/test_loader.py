"""The packed loader in one process: samples, epochs, positions to resume from, and how accelerate sees it."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.loader import ContextParallelDataLoader, RankSampler
from hf_cp.data.manifest import PackingManifest
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from tests.data.orders import make_order

CONFIG = ContextParallelConfig()
# First tokens tell documents apart; lengths pack into 5 samples of at most 8.
FEATURES = [[10 * i] * length for i, length in enumerate([5, 8, 3, 6, 2, 7, 4, 4], start=1)]
SAMPLES = ((0, 2), (1,), (3, 4), (5,), (6, 7))


def make_loader(features=FEATURES, *, max_tokens: int | None = 8, **kwargs) -> ContextParallelDataLoader:
    collator = DataCollatorForContextParallel(CONFIG, max_tokens=max_tokens)
    return ContextParallelDataLoader(
        features, collator=collator, comm=Communicator(ContextParallelMesh(CONFIG)), **kwargs
    )


def samples_of(batches) -> list[tuple[int, ...]]:
    """The documents (by number) in each batch."""
    return [tuple((batch["input_ids"][0].unique() // 10 - 1).tolist()) for batch in batches]


def test_samples_in_natural_order() -> None:
    loader = make_loader()
    assert loader.manifest.samples == SAMPLES
    assert samples_of(loader) == list(SAMPLES)
    assert len(loader) == 5
    assert loader.batch_size == 1
    lengths = [[len(document) for document in loader.packed[sample]] for sample in range(5)]
    assert lengths == [[5, 3], [8], [6, 2], [7], [4, 4]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_permute_whole_samples(num_workers: int) -> None:
    loader = make_loader(shuffle=True, seed=3, num_workers=num_workers)
    epochs = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        epochs.append(samples_of(loader))
        assert sorted(epochs[-1]) == sorted(SAMPLES)
    assert len({tuple(order) for order in epochs}) > 1
    again = make_loader(shuffle=True, seed=3)
    again.set_epoch(2)
    assert samples_of(again) == epochs[2]
    assert samples_of(make_loader(shuffle=True, seed=4)) != epochs[0]


def test_a_finished_iteration_moves_the_epoch_on() -> None:
    loader = make_loader(shuffle=True)
    first, second = samples_of(loader), samples_of(loader)
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert samples_of(loader) == first
    loader.set_epoch(1)
    assert samples_of(loader) == second


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_make_the_same_batches(num_workers: int) -> None:
    for ours, other in zip(make_loader(num_workers=num_workers), make_loader(), strict=True):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[name], other[name]) for name in ours if isinstance(ours[name], torch.Tensor))


def test_what_workers_need_can_be_pickled() -> None:
    loader = make_loader()
    samples = pickle.loads(pickle.dumps(loader.dataset))
    assert torch.equal(samples[(0, 2)].batch["input_ids"], loader.dataset[(0, 2)].batch["input_ids"])


def test_without_max_tokens_a_sample_is_a_batch_of_features() -> None:
    assert samples_of(make_loader(max_tokens=None, batch_size=3)) == [(0, 1, 2), (3, 4, 5), (6, 7)]
    packed_feature = {"input_ids": [10, 10, 20], "seq_lengths": [2, 1]}
    loader = make_loader([packed_feature, [30]], max_tokens=None)
    assert loader.manifest.samples == ((0, 1), (2,))
    assert loader.manifest.sources == (0, 0, 1)
    shuffled = make_loader(max_tokens=None, batch_size=3, shuffle=True, seed=1)
    assert sorted(sum(samples_of(shuffled), ())) == list(range(8))
    assert shuffled.manifest.samples != ((0, 1, 2), (3, 4, 5), (6, 7))


def test_loader_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    list(make_loader(shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_any_map_style_dataset() -> None:
    datasets = pytest.importorskip("datasets")

    class Torch(Dataset):
        def __len__(self) -> int:
            return len(FEATURES)

        def __getitem__(self, index: int) -> dict:
            if not 0 <= index < len(FEATURES):
                raise KeyError(index)  # a dataset need not raise IndexError at its end
            return {"input_ids": torch.tensor(FEATURES[index])}

    for features in (datasets.Dataset.from_dict({"input_ids": FEATURES}), Torch()):
        assert samples_of(make_loader(features)) == list(SAMPLES)


def test_stream_and_mapping_are_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(FEATURES)

    with pytest.raises(ValueError, match="Stream has no length"):
        make_loader(Stream())
    with pytest.raises(ValueError, match=r"dict maps \['test', 'train'\] to something"):
        make_loader({"train": FEATURES, "test": FEATURES})


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [8, 5, 1])
def test_every_sample_goes_to_one_dp_rank(num_samples: int, drop_last: bool) -> None:
    if drop_last and num_samples == 1:
        with pytest.raises(ValueError, match="1 samples for dp_size=2"):
            make_order([1], dp_size=2, samples_per_step=2, drop_last=True)
        return
    order = make_order([1] * num_samples, dp_size=2, samples_per_step=2, drop_last=drop_last)
    samplers = [RankSampler(order, dp_rank=r) for r in range(2)]
    steps = [[step for (step,) in sampler] for sampler in samplers]
    expected = num_samples // 2 if drop_last else -(-num_samples // 2)
    assert [len(sampler) for sampler in samplers] == [len(s) for s in steps] == [expected] * 2
    assert all([number for number, _ in s] == list(range(expected)) for s in steps)
    dealt = [sample for s in steps for _, sample in s if sample >= 0]
    assert len(dealt) == len(set(dealt)) == (num_samples // 2 * 2 if drop_last else num_samples)


def test_dummy_sample_has_no_targets() -> None:
    for config in (ContextParallelConfig(), ContextParallelConfig(ring_degree=2, ulysses_degree=2)):
        collator = DataCollatorForContextParallel(config, 0, max_tokens=8)
        batch, _ = collator.collate(collator.dummy_sample())
        assert (batch["labels"] == -100).all()
        assert (batch["shift_labels"] == -100).all()
        assert batch["input_ids"].numel() > 0


def test_dummy_sample_is_known_by_its_content() -> None:
    """On every rank; a document that has no target is not one."""
    config = ContextParallelConfig(ring_degree=2)
    for rank in range(2):
        collator = DataCollatorForContextParallel(config, rank, max_tokens=8, pad_token_id=3)
        assert collator.is_dummy(collator.collate(collator.dummy_sample())[0])
        assert not collator.is_dummy(collator([{"input_ids": [4, 5], "labels": [-100, -100]}]))
        assert not collator.is_dummy(collator([[3, 3]]))
    whole = DataCollatorForContextParallel(CONFIG, max_tokens=8)
    assert whole.is_dummy(whole.collate(whole.dummy_sample())[0])
    assert not whole.is_dummy(whole([{"input_ids": [4, 5], "labels": [-100, -100]}]))


@pytest.mark.parametrize("start", [0, 2, 5])
def test_resumed_position_gives_the_remaining_samples(start: int) -> None:
    """The position survives JSON and another loader object."""
    loader = make_loader(shuffle=True, seed=5)
    samples_of(loader)
    batches = iter(loader)
    for _ in range(start):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["next_step"]) == (1, start)
    remaining = samples_of(batches)
    resumed = make_loader(shuffle=True, seed=5, num_workers=2)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)  # what the Trainer does at the start of an epoch
    assert samples_of(resumed) == remaining
    assert resumed.epoch == 2
    assert len(samples_of(resumed)) == 5  # only the next iteration was shortened


def test_another_epoch_starts_at_its_beginning() -> None:
    loader = make_loader().skip(3)
    loader.set_epoch(1)
    assert len(samples_of(loader)) == 5
    assert samples_of(loader.skip(3)) == list(SAMPLES[3:])
    with pytest.raises(ValueError, match="Cannot skip 6 micro-steps: an epoch has 5"):
        loader.skip(6)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"features": FEATURES[:-1]}, "data_digest was"),
        ({"features": [[1 + token for token in feature] for feature in FEATURES]}, "data_digest was"),
        ({"max_tokens": 9}, "data_digest was"),
        ({"seed": 1}, "seed was 0, here it is 1"),
        ({"shuffle": False}, "shuffle was True, here it is False"),
    ],
)
def test_position_of_another_run_is_refused(other: dict, message: str) -> None:
    state = make_loader(shuffle=True).state_dict()
    with pytest.raises(ValueError, match=message):
        make_loader(**{"shuffle": True, **other}).load_state_dict(state)


@pytest.mark.parametrize("epoch", [0, 2])
def test_skip_first_batches_of_accelerate(epoch: int) -> None:
    """The Trainer resumes inside an epoch with this; it rebuilds the loader from its parts."""
    loader = make_loader(shuffle=True, num_workers=2)
    loader.set_epoch(epoch)
    expected = samples_of(loader)
    loader.set_epoch(0)
    rebuilt = skip_first_batches(loader, 2)
    rebuilt.batch_sampler.batch_sampler.set_epoch(epoch)  # as transformers' Trainer does
    batches = iter(rebuilt)
    assert samples_of([next(batches)]) == expected[2:3]
    assert loader.state_dict()["next_step"] == 3  # the loader still knows where it is
    assert samples_of(batches) == expected[3:]


def test_skip_first_batches_keeps_the_status_exchange(monkeypatch) -> None:
    steps = []
    loader = make_loader(num_workers=2)
    monkeypatch.setattr("hf_cp.data.agreement.agree", lambda what, **kwargs: steps.append(kwargs["step"]))
    list(skip_first_batches(loader, 3))
    assert steps == [3, 4]


def test_accelerate_takes_the_loader_as_it_is(tmp_path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = make_loader(shuffle=True)
    assert isinstance(loader, DataLoader)
    assert accelerator.prepare(loader) is loader
    batches = iter(loader)
    next(batches), next(batches)
    accelerator.save_state(str(tmp_path))
    remaining = samples_of(batches)
    loader.set_epoch(7)
    accelerator.load_state(str(tmp_path))
    assert samples_of(loader) == remaining
    accelerator.free_memory()


def test_errors_in_one_process_keep_their_type() -> None:
    with pytest.raises(ValueError, match="Feature 1: input_ids holds float64"):
        make_loader([[1], [0.5]])
    with pytest.raises(ValueError, match="batch_size=2 with max_tokens=8"):
        make_loader(batch_size=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_while_a_batch_is_made(num_workers: int) -> None:
    loader = make_loader(num_workers=num_workers)
    loader.dataset.collator.max_tokens = 7
    batches = iter(loader)
    with pytest.raises(ValueError, match="8 tokens in 2 documents, more than max_tokens=7"):
        next(batches)


def test_other_errors_name_their_type() -> None:
    """An error that might not survive pickling becomes a RuntimeError that says what it was."""
    loader = make_loader()
    loader.dataset.packed.documents = {}
    with pytest.raises(RuntimeError, match="KeyError: 0") as caught:
        next(iter(loader))
    assert isinstance(caught.value.__cause__, KeyError)


def test_mesh_and_collator_must_agree() -> None:
    config = ContextParallelConfig(ring_degree=2)
    with pytest.raises(ValueError, match="ring x ulysses = 2 x 1, the mesh is 1 x 1. Make both from one config"):
        ContextParallelDataLoader(
            FEATURES,
            collator=DataCollatorForContextParallel(config),
            comm=Communicator(ContextParallelMesh(CONFIG)),
        )
    mesh = SimpleNamespace(cp_rank=1, degrees_fault=lambda config, name: None)
    assert DataCollatorForContextParallel(config).for_rank(mesh).cp_rank == 1
    with pytest.raises(ValueError, match="made for cp_rank=0, but this process is cp_rank=1"):
        DataCollatorForContextParallel(config, cp_rank=0).for_rank(mesh)


def test_packing_is_reported_once(caplog) -> None:
    """What was lost is a warning, which is seen without any logging set up; else it is information."""
    for features in (FEATURES, [*FEATURES, []]):
        list(make_loader(features))
    assert [record.getMessage() for record in caplog.records] == [
        "Packed 8 documents (39 tokens) in 5 samples of at most 8 tokens, 97.50% full; 1 empty"
    ]
    caplog.clear()
    with caplog.at_level("INFO", logger="hf_cp.data"):
        make_loader()
    assert "97.50% full; none changed" in caplog.text


def test_manifest_is_written(tmp_path) -> None:
    loader = make_loader()
    loader.save_manifest(tmp_path / "manifest.json")
    assert PackingManifest.load(tmp_path / "manifest.json") == loader.manifest


def test_packed_dataset_holds_4_bytes_a_token() -> None:
    packed = PackedDataset(FEATURES, collator=DataCollatorForContextParallel(CONFIG, max_tokens=8))
    assert sum(document.input_ids.nbytes for document in packed.documents) == 4 * packed.manifest.num_tokens
    assert all(np.shares_memory(document.labels, document.input_ids) for document in packed.documents)
