"""Features become documents: borders, padding, positions, labels, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cp.data.documents import prepare_documents, to_documents
from hf_cp.data.manifest import DocumentCounts


def ids(documents: list) -> list[list[int]]:
    return [document.input_ids.tolist() for document in documents]


def targets(documents: list) -> list[list[int]]:
    return [document.shift_labels.tolist() for document in documents]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, tuple])
def test_tokens_of_any_kind(make) -> None:
    for feature in ({"input_ids": make([10, 11, 12])}, make([10, 11, 12])):
        (document,) = to_documents(feature)
        assert document.input_ids.tolist() == document.labels.tolist() == [10, 11, 12]
        assert document.shift_labels.tolist() == [11, 12, -100]
        assert document.positions.tolist() == [0, 1, 2]
        assert document.input_ids.dtype == document.shift_labels.dtype == document.positions.dtype == np.int32


def test_default_labels_take_no_memory() -> None:
    (document,) = to_documents([10, 11, 12])
    assert np.shares_memory(document.labels, document.input_ids)


def test_label_of_the_first_token_is_no_target() -> None:
    """8 tokens, all labels valid, are 7 targets."""
    (document,) = to_documents({"input_ids": list(range(8)), "labels": list(range(8))})
    assert int((document.shift_labels != -100).sum()) == 7


def test_labels_are_aligned_not_shifted() -> None:
    (document,) = to_documents({"input_ids": [10, 11, 12, 13], "labels": [-100, -100, 12, 13]})
    assert document.shift_labels.tolist() == [-100, 12, 13, -100]


def test_one_token_document_has_no_target() -> None:
    assert targets(to_documents([7])) == [[-100]]


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
def test_padding_at_the_ends_is_cut_off(mask: list[int]) -> None:
    padded = np.full(5, 99)
    padded[np.array(mask, dtype=bool)] = [10, 11, 12]
    positions = np.where(mask, np.cumsum(mask) - 1, 1)  # Hugging Face fills padding with 1
    (document,) = to_documents({"input_ids": padded, "attention_mask": mask, "position_ids": positions})
    assert document.input_ids.tolist() == document.labels.tolist() == [10, 11, 12]
    assert document.positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], [0, 1, 0, 1]])
def test_holes_in_the_mask_are_refused(mask: list[int]) -> None:
    hole = 1 if mask[0] else 2
    with pytest.raises(ValueError, match=f"attention_mask has a 0 at token {hole}"):
        to_documents({"input_ids": [1, 2, 3, 4], "attention_mask": mask})


def test_mask_with_document_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask holds \[1, 2\]"):
        to_documents({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 2]})


@pytest.mark.parametrize(
    "borders", [{"position_ids": [0, 1, 2, 0, 1]}, {"seq_lengths": [3, 2]}, {"seq_lengths": [3, 0, 2]}]
)
def test_feature_that_holds_several_documents_is_split(borders: dict) -> None:
    """Packed features must not become one document."""
    documents = to_documents({"input_ids": [10, 11, 12, 13, 14], **borders})
    assert ids(documents) == [[10, 11, 12], [13, 14]]
    assert targets(documents) == [[11, 12, -100], [14, -100]]
    assert [document.positions.tolist() for document in documents] == [[0, 1, 2], [0, 1]]


def test_running_positions_are_kept() -> None:
    """The user's positions win over counting from 0, whatever the start."""
    documents = to_documents({"input_ids": [1, 2, 3, 4], "position_ids": [4, 5, 6, 7]})
    assert [document.positions.tolist() for document in documents] == [[4, 5, 6, 7]]
    two = to_documents({"input_ids": [1, 2, 3, 4], "position_ids": [4, 5, 6, 7], "seq_lengths": [1, 3]})
    assert [document.positions.tolist() for document in two] == [[4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 1, 3, 4], "goes from 1 to 3 at token 2"),
        ([0, 1, 6, 7], "goes from 1 to 6 at token 2"),  # a zigzag shard is not a document
        ([3, 4, 3, 4], "goes from 4 to 3 at token 2"),
        ([3, 2, 1, 0], "goes from 3 to 2 at token 1"),
        ([-1, 0, 1, 2], "goes from the start to -1 at token 0"),
    ],
)
def test_other_positions_are_refused(positions: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_documents({"input_ids": [1, 2, 3, 4], "position_ids": positions})


def test_restart_outside_of_the_given_borders_is_refused() -> None:
    with pytest.raises(ValueError, match="goes from 1 to 0 at token 2"):
        to_documents({"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1], "seq_lengths": [3, 1]})


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks"])
def test_loss_masks_take_tokens_out_of_the_loss(column: str) -> None:
    (document,) = to_documents({"input_ids": [10, 11, 12, 13], column: [0, 0, 1, 1]})
    assert document.shift_labels.tolist() == [-100, 12, 13, -100]


def test_shift_labels_must_agree_with_labels() -> None:
    feature = {"input_ids": [10, 11, 12, 13], "seq_lengths": [2, 2]}
    good = to_documents({**feature, "shift_labels": [11, -100, 13, -100]})
    assert targets(good) == [[11, -100], [13, -100]]
    with pytest.raises(ValueError, match=r"shift_labels is 12 at token 1, .* give -100"):
        to_documents({**feature, "shift_labels": [11, 12, 13, -100]})


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"input_ids": [1, 2], "labels": 3}, r"labels has shape \(\); a feature is one sequence"),
        ({"input_ids": [[1, 2]]}, r"input_ids has shape \(1, 2\)"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids is not one flat list"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "labels has 2 entries, input_ids has 3"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1]}, "attention_mask has 1 entries"),
        ({"input_ids": [1.0, 2.0]}, "input_ids holds float64 values"),
        ({"input_ids": ["a"]}, "it needs integers"),
        ({"input_ids": [1, -100]}, "input_ids holds -100"),
        ({"input_ids": [1, 2**31]}, "beyond 32 bits"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels holds -1"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [1, 1]}, "add up to 2, but input_ids has 3"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [4, -1]}, "add up to 3, but input_ids has 3"),
        ({"input_ids": None, "labels": [1]}, r"has no tokens: its columns are \['labels'\]"),
        ({"input_ids": [1], "inputs_embeds": [[0.5]]}, "column 'inputs_embeds'"),
        ({"chosen": [1], "rejected": [2]}, "columns 'chosen', 'rejected'"),
        ("hello", "bare string of 5 characters"),
    ],
)
def test_unreadable_features_are_refused(feature, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_documents(feature)


def test_empty_documents_are_counted_and_left_out() -> None:
    """Lengths 0, 1, 4, and a feature that is all padding."""
    features = [[], [5], [1, 2, 3, 4], {"input_ids": [9, 9], "attention_mask": [0, 0]}]
    prepared = prepare_documents(features)
    assert ids(prepared.documents) == [[5], [1, 2, 3, 4]]
    assert prepared.sources == (1, 2)
    assert prepared.counts == DocumentCounts(empty=2)


@pytest.mark.parametrize("features", [[], [[]], [[], {"input_ids": []}]])
def test_nothing_left_is_refused(features: list) -> None:
    with pytest.raises(ValueError, match="No document is left to train on"):
        prepare_documents(features)


@pytest.mark.parametrize(
    ("overflow", "expected", "counts"),
    [
        ("truncate", [[0, 1, 2, 3], [7, 8, 9]], DocumentCounts(truncated=1)),
        ("split", [[0, 1, 2, 3], [4, 5, 6, 7], [8], [7, 8, 9]], DocumentCounts(split=1)),
        ("drop", [[7, 8, 9]], DocumentCounts(dropped=1)),
    ],
)
def test_overflow(overflow: str, expected: list, counts: DocumentCounts) -> None:
    prepared = prepare_documents([list(range(9)), [7, 8, 9]], max_tokens=4, overflow=overflow)
    assert ids(prepared.documents) == expected
    assert prepared.counts == counts
    assert all(document.shift_labels[-1] == -100 for document in prepared.documents)
    assert prepared.lengths == tuple(map(len, expected))


def test_overflow_keeps_labels_and_positions_with_their_tokens() -> None:
    feature = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5], "position_ids": [7, 8, 9, 10, 11]}
    first, second = prepare_documents([feature], max_tokens=3, overflow="split").documents
    assert (first.labels.tolist(), second.labels.tolist()) == ([-100, 2, 3], [4, 5])
    assert (first.positions.tolist(), second.positions.tolist()) == ([7, 8, 9], [10, 11])


def test_too_long_document_names_its_feature() -> None:
    with pytest.raises(ValueError, match=r"Feature 1 has 9 tokens, more than max_tokens=4[\s\S]*overflow='truncate'"):
        prepare_documents([[1], list(range(9))], max_tokens=4)


def test_errors_name_the_feature() -> None:
    with pytest.raises(ValueError, match="Feature 2: labels has 1 entries"):
        prepare_documents([[1], [2], {"input_ids": [1, 2], "labels": [1]}])


def test_everything_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="1 longer than max_tokens=2"):
        prepare_documents([[1, 2, 3]], max_tokens=2, overflow="drop")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_borders_from_lengths_and_from_positions_agree(lengths: list[int]) -> None:
    tokens = list(range(sum(lengths)))
    positions = [position for length in lengths for position in range(length)]
    by_length = to_documents({"input_ids": tokens, "seq_lengths": lengths})
    by_position = to_documents({"input_ids": tokens, "position_ids": positions})
    assert ids(by_length) == ids(by_position)
    assert sum(ids(by_length), []) == tokens
