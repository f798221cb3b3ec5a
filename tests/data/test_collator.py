"""A sample and its parts: targets shifted before sharding, never across documents, each on exactly one rank."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel, WholeSample
from hf_cp.data.documents import to_documents
from hf_cp.distributed.mesh import ContextParallelMesh

LAYOUTS = ("zigzag", "contiguous", "striped")
TENSORS = ("input_ids", "position_ids", "labels", "shift_labels")


def collate_all(features: list, config: ContextParallelConfig, **kwargs) -> list[dict]:
    """Every rank's batch."""
    return [DataCollatorForContextParallel(config, r, **kwargs)(features) for r in range(config.cp_size)]


def lists(batch: dict, *names: str) -> list[list[int]]:
    return [batch[name].tolist() for name in names]


def documents_of(lengths: list[int], first: int = 10) -> list[list[int]]:
    tokens = iter(range(first, first + sum(lengths)))
    return [[next(tokens) for _ in range(length)] for length in lengths]


def test_shift_before_sharding_zigzag() -> None:
    """Local slots 1 and 2 are not neighbours in the sample: a shift after sharding would pair them."""
    rank0, rank1 = collate_all([list(range(10, 18))], ContextParallelConfig(ring_degree=2, layout="zigzag"))
    assert lists(rank0, *TENSORS) == [
        [[10, 11, 16, 17]],
        [[0, 1, 6, 7]],
        [[10, 11, 16, 17]],
        [[11, 12, 17, -100]],
    ]
    assert lists(rank1, "input_ids", "shift_labels") == [[[12, 13, 14, 15]], [[13, 14, 15, 16]]]


def test_shift_before_sharding_contiguous() -> None:
    """The target of a shard's last token is the first token of the next rank."""
    ranks = collate_all([list(range(10, 18))], ContextParallelConfig(ring_degree=2, layout="contiguous"))
    assert [batch["shift_labels"].tolist() for batch in ranks] == [[[11, 12, 13, 14]], [[15, 16, 17, -100]]]


@pytest.mark.parametrize(
    "features",
    [
        documents_of([3, 5]),
        [{"input_ids": list(range(10, 18)), "seq_lengths": [3, 5]}],
        [{"input_ids": list(range(10, 18)), "position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}],
    ],
    ids=["two features", "seq_lengths", "restarting positions"],
)
def test_no_target_crosses_a_document_border(features: list) -> None:
    """However the documents are given: as two features, or as one that is packed already."""
    (whole,) = collate_all(features, ContextParallelConfig())
    assert whole["shift_labels"].tolist() == [[11, 12, -100, 14, 15, 16, 17, -100]]
    assert int((whole["shift_labels"] != -100).sum()) == 6
    ranks = collate_all(features, ContextParallelConfig(ring_degree=2, layout="contiguous"))
    assert [batch["shift_labels"].tolist() for batch in ranks] == [[[11, 12, -100, 14]], [[15, 16, 17, -100]]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[1, 2, 13], [1] * 8, [2, 2], [7], [1]])
def test_documents_shorter_than_shards(layout: str, lengths: list[int]) -> None:
    """Every real token is on exactly one of 4 ranks; a rank may hold nothing but padding."""
    features = documents_of(lengths)
    for degrees in ((4, 1), (2, 2), (1, 4)):
        config = ContextParallelConfig(ring_degree=degrees[0], ulysses_degree=degrees[1], layout=layout)
        ranks = collate_all(features, config)
        held = [batch["input_ids"][batch["input_ids"] != 0] for batch in ranks]
        assert sorted(torch.cat(held).tolist()) == list(range(10, 10 + sum(lengths)))
        assert len({batch["input_ids"].shape for batch in ranks}) == 1
        num_targets = sum(int((batch["shift_labels"] != -100).sum()) for batch in ranks)
        assert num_targets == sum(length - 1 for length in lengths)


@pytest.mark.parametrize(
    ("length", "ring_degree", "ulysses_degree", "local_length"),
    [(7, 2, 1, 4), (8, 2, 1, 4), (10, 4, 1, 3), (1, 2, 1, 1), (3, 4, 1, 2), (7, 2, 2, 2), (10, 2, 2, 3)],
)
def test_padding_is_at_the_end_of_shards_only(
    length: int, ring_degree: int, ulysses_degree: int, local_length: int
) -> None:
    """Pad tokens have position 0, label -100, and come after a shard's last token."""
    config = ContextParallelConfig(ring_degree=ring_degree, ulysses_degree=ulysses_degree, layout="zigzag")
    ranks = collate_all([list(range(10, 10 + length))], config, pad_token_id=9)
    for ring_rank in range(ring_degree):
        pieces = ranks[ring_rank * ulysses_degree : (ring_rank + 1) * ulysses_degree]
        assert {batch["input_ids"].shape for batch in pieces} == {(1, local_length)}
        shard = {name: torch.cat([batch[name][0] for batch in pieces]) for name in TENSORS}
        is_pad = shard["input_ids"] == 9
        assert is_pad.tolist() == sorted(is_pad.tolist())
        assert (shard["position_ids"][is_pad] == 0).all()
        assert (shard["labels"][is_pad] == -100).all()
        assert (shard["shift_labels"][is_pad] == -100).all()
    assert sum(int((batch["input_ids"] == 9).sum()) for batch in ranks) == local_length * config.cp_size - length


@pytest.mark.parametrize(
    ("positions", "expected"),
    [(None, [[0, 3, 0, 3], [1, 2, 1, 2]]), ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 3, 4, 7], [1, 2, 5, 6]])],
)
def test_positions_of_two_documents(positions: list | None, expected: list) -> None:
    """Counted inside each document, unless the user brings running ones."""
    features = [{"input_ids": ids} for ids in documents_of([4, 4])]
    if positions:
        features = [{**feature, "position_ids": p} for feature, p in zip(features, positions, strict=True)]
    ranks = collate_all(features, ContextParallelConfig(ring_degree=2, layout="zigzag"))
    assert [batch["position_ids"][0].tolist() for batch in ranks] == expected
    if positions is None:
        for cp_rank, batch in enumerate(ranks):
            assert batch["position_ids"][0].tolist() == batch["hf_cp_sample"].layout.position_ids(cp_rank).tolist()


def test_running_positions_without_context_parallelism_are_refused() -> None:
    """An unpatched model would take the two documents for one and let attention leak."""
    features = [{"input_ids": [1, 2], "position_ids": [0, 1]}, {"input_ids": [3, 4], "position_ids": [2, 3]}]
    with pytest.raises(ValueError, match=r"Documents 0 and 1 .* running position_ids \(1 is followed by 2\)"):
        DataCollatorForContextParallel(ContextParallelConfig())(features)
    forced = DataCollatorForContextParallel(ContextParallelConfig(force=True))(features)
    assert forced["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert forced["hf_cp_sample"].layout.doc_lengths == (2, 2)


def test_batch_without_context_parallelism_is_plain_hugging_face() -> None:
    (batch,) = collate_all(documents_of([3, 5]), ContextParallelConfig())
    assert set(batch) == {*TENSORS, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache"}
    assert batch["use_cache"] is False  # else transformers would take the sample for one document
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 8]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"]) == (5, 5)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


def test_batch_with_context_parallelism() -> None:
    for config in (ContextParallelConfig(force=True), ContextParallelConfig(ring_degree=2)):
        batch = collate_all(documents_of([3, 5]), config)[0]
        assert set(batch) == {*TENSORS, "hf_cp_sample"}
        assert all(batch[name].dtype == torch.int64 for name in TENSORS)
        assert batch["hf_cp_sample"].layout.doc_lengths == (3, 5)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    degrees=st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 2)]),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
@settings(deadline=None)
def test_shards_put_together_are_the_sample(lengths: list[int], degrees: tuple, layout: str, data) -> None:
    """Every real target is on exactly one rank, next to the token that must predict it."""
    config = ContextParallelConfig(ring_degree=degrees[0], ulysses_degree=degrees[1], layout=layout, force=True)
    features = []
    for ids in documents_of(lengths):
        keep = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        labels = [token if k else -100 for token, k in zip(ids, keep, strict=True)]
        features.append({"input_ids": ids, "labels": labels})
    ranks = collate_all(features, config)
    unshard = ranks[0]["hf_cp_sample"].layout.unshard
    sample = {name: unshard([batch[name][0] for batch in ranks]).tolist() for name in TENSORS}
    assert sample["input_ids"] == list(range(10, 10 + sum(lengths)))
    assert sample["labels"] == sum((feature["labels"] for feature in features), [])
    assert sample["position_ids"] == [position for length in lengths for position in range(length)]
    assert sample["shift_labels"] == sum((feature["labels"][1:] + [-100] for feature in features), [])
    local_targets = torch.cat([batch["shift_labels"][0] for batch in ranks])
    assert sorted(t for t in sample["shift_labels"] if t >= 0) == sorted(local_targets[local_targets >= 0].tolist())


def test_digest_is_of_the_whole_sample() -> None:
    """Equal on all ranks of a group; changes with any id, label, position or border."""
    config = ContextParallelConfig(ring_degree=2)

    def digest(features: list, cp_rank: int = 0, config: ContextParallelConfig = config) -> int:
        collator = DataCollatorForContextParallel(config, cp_rank)
        return collator.collate(collator.prepare(features).documents)[1]

    base = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}]
    assert digest(base, 0) == digest(base, 1)
    others = [
        [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 7]}],
        [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6], "labels": [4, 5, -100]}],
        [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6], "position_ids": [3, 4, 5]}],
        [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6]}],
    ]
    digests = [digest(features) for features in (base, *others)]
    digests.append(digest(base, config=ContextParallelConfig(ring_degree=2, layout="contiguous")))
    assert len(set(digests)) == 6
    assert all(-(2**63) <= value < 2**63 for value in digests)


def test_rank_comes_from_the_environment(monkeypatch) -> None:
    config = ContextParallelConfig(ring_degree=2)
    expected = collate_all([list(range(8))], config)
    collator = DataCollatorForContextParallel(config)
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        assert collator([list(range(8))])["input_ids"].tolist() == expected[rank % 2]["input_ids"].tolist()
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="cp_rank is unknown"):
        collator([list(range(8))])


def test_collator_of_a_mesh_can_be_pickled() -> None:
    collator = DataCollatorForContextParallel(ContextParallelMesh(ContextParallelConfig()))
    assert collator.config == ContextParallelConfig() and collator.cp_rank == 0
    with pytest.raises(ValueError, match="from a config that sets force, but a mesh carries groups and ranks only"):
        DataCollatorForContextParallel(ContextParallelMesh(ContextParallelConfig(force=True)))
    collator = DataCollatorForContextParallel(ContextParallelConfig(force=True), cp_rank=0)
    copy = pickle.loads(pickle.dumps(collator))
    batch = copy([[1, 2, 3]])
    assert batch["input_ids"].tolist() == [[1, 2, 3]]
    assert pickle.loads(pickle.dumps(batch["hf_cp_sample"])) == batch["hf_cp_sample"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cp_rank": 2}, "cp_rank=2 is outside of a group of cp_size=2"),
        ({"overflow": "wrap"}, "overflow='wrap' does not exist. Choose one of error, truncate, split, drop"),
        ({"overflow": "drop"}, "overflow='drop' needs a limit"),
        ({"max_tokens": 0}, "max_tokens=0 must be a positive integer"),
    ],
)
def test_bad_arguments_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataCollatorForContextParallel(ContextParallelConfig(ring_degree=2), **kwargs)


def test_sample_that_is_too_long_is_refused() -> None:
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=7)
    with pytest.raises(ValueError, match="8 tokens in 2 documents, more than max_tokens=7"):
        collator(documents_of([3, 5]))
    assert collator(documents_of([3, 4]))["input_ids"].shape == (1, 7)


def test_changed_documents_are_reported_once(caplog) -> None:
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=4, overflow="truncate")
    collator([[], [1, 2, 3]])
    collator([[1, 2, 3, 4, 5]])
    assert [record.getMessage() for record in caplog.records] == [
        "Documents were left out or cut: 1 empty (later ones are not reported)."
    ]


def test_packed_sample_sums_targets_like_single_samples() -> None:
    """Packing changes no target."""
    features = documents_of([3, 5, 2, 6])
    sample = WholeSample.from_documents(sum(map(to_documents, features), []), ContextParallelConfig())
    single = [DataCollatorForContextParallel(ContextParallelConfig())([f])["shift_labels"][0] for f in features]
    assert sample.shift_labels.tolist() == torch.cat(single).tolist()


def test_import_needs_no_tokenizer_library() -> None:
    code = "import sys; sys.modules['tokenizers'] = sys.modules['transformers'] = None; import hf_cp.data"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
