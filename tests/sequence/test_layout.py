from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.layout import SequenceLayout
from tests.sequence.strategies import configs, doc_lengths


@pytest.mark.parametrize(("tokens", "ring_degree", "expected"), [(7, 2, 4), (8, 2, 4), (10, 4, 3), (1, 2, 1)])
def test_local_length_is_that_of_the_fullest_shard(tokens, ring_degree, expected):
    assert (
        SequenceLayout([tokens], ContextParallelConfig(ring_degree=ring_degree, layout="zigzag")).local_length
        == expected
    )


@pytest.mark.parametrize("tokens", [1, 7, 8, 10, 13])
def test_ring_shards_divide_by_the_ulysses_degree(tokens):
    layout = SequenceLayout([tokens], ContextParallelConfig(ring_degree=2, ulysses_degree=2, layout="zigzag"))
    assert layout.ring_shard_length % 2 == 0
    assert layout.local_length * 2 == layout.ring_shard_length


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("zigzag", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("striped", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
    ],
)
def test_where_sixteen_tokens_go(layout, expected):
    layout = SequenceLayout([16], ContextParallelConfig(ring_degree=4, layout=layout))
    assert [layout.indices(rank).tolist() for rank in range(4)] == expected


def test_ulysses_cuts_a_ring_shard_into_consecutive_pieces():
    layout = SequenceLayout([16], ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    pieces = [layout.indices(rank).tolist() for rank in range(4)]
    assert pieces == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_every_document_has_its_own_zigzag_and_positions():
    layout = SequenceLayout([4, 4], ContextParallelConfig(ring_degree=2, layout="zigzag"))
    assert layout.indices(0).tolist() == [0, 3, 4, 7]
    assert layout.position_ids(0).tolist() == [0, 3, 0, 3]
    assert layout.position_ids(1).tolist() == [1, 2, 1, 2]
    assert layout.document_ids(1).tolist() == [0, 0, 1, 1]


@given(doc_lengths, configs)
def test_each_token_is_on_one_rank_and_padding_only_at_the_end_of_shards(lengths, config):
    layout = SequenceLayout(lengths, config)
    seen = []
    for ring_rank in range(config.ring_degree):
        ranks = range(ring_rank * config.ulysses_degree, (ring_rank + 1) * config.ulysses_degree)
        shard = torch.cat([layout.indices(rank) for rank in ranks])
        tokens = shard[shard >= 0]
        assert (shard[len(tokens) :] == -1).all()
        assert (tokens.diff() > 0).all()
        seen += tokens.tolist()
    assert sorted(seen) == list(range(sum(lengths)))


@given(doc_lengths, configs)
def test_positions_and_documents_follow_the_indices(lengths, config):
    layout = SequenceLayout(lengths, config)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    for rank in range(config.cp_size):
        assert layout.document_ids(rank).equal(layout.shard(documents, rank, pad_value=-1))
        assert layout.position_ids(rank).equal(layout.shard(positions, rank, pad_value=0))


@given(doc_lengths, configs)
def test_unshard_is_the_inverse_of_shard(lengths, config):
    layout = SequenceLayout(lengths, config)
    row = torch.randn(2, sum(lengths), 3)
    shards = [layout.shard(row, rank, dim=1, pad_value=9.0) for rank in range(config.cp_size)]
    assert all(shard.shape == (2, layout.local_length, 3) for shard in shards)
    assert layout.unshard(shards, dim=1).equal(row)


def test_borders_and_digest():
    config = ContextParallelConfig(ring_degree=2)
    layout = SequenceLayout([3, 5], config)
    assert layout.cu_seqlens.tolist() == [0, 3, 8]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.max_seqlen == 5
    assert pickle.loads(pickle.dumps(layout)) == layout
    others = [
        SequenceLayout([5, 3], config),
        SequenceLayout([3, 5], ContextParallelConfig(ring_degree=1, ulysses_degree=2)),
        SequenceLayout([3, 5], ContextParallelConfig(ring_degree=2, layout="striped")),
    ]
    assert len({layout.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "at least one document"), ([3, 0], "Document 1 has 0 tokens"), ([-1], "has -1 tokens")],
)
def test_rows_without_tokens_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(lengths, ContextParallelConfig())


def test_wrong_sizes_are_refused_with_numbers():
    layout = SequenceLayout([8], ContextParallelConfig(ring_degree=2))
    with pytest.raises(ValueError, match="7 entries.*8 tokens"):
        layout.shard(torch.zeros(7), 0)
    with pytest.raises(ValueError, match="2 shards of 4"):
        layout.unshard([torch.zeros(4), torch.zeros(3)])
    with pytest.raises(ValueError, match="cp_rank=2"):
        layout.indices(2)


def test_auto_is_the_document_layout():
    layout = SequenceLayout([5, 5], ContextParallelConfig(ring_degree=2))
    assert layout.layout == "document"
    assert [layout.indices(rank).tolist() for rank in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_one_document_is_zigzagged():
    for length in (1, 7, 64):
        document, zigzag = (
            SequenceLayout([length], ContextParallelConfig(ring_degree=4, layout=name))
            for name in ("document", "zigzag")
        )
        assert all(document.indices(rank).equal(zigzag.indices(rank)) for rank in range(4))
