"""The columns of one feature: which may be there, and what they say for every token, as arrays of one length.

Zeros of an attention mask may only be at the ends; there they are padding and are cut off:

>>> arrays = token_arrays({"input_ids": [0, 7, 8, 9], "attention_mask": [0, 1, 1, 1]}, "Feature 0")
>>> arrays["input_ids"].tolist()
[7, 8, 9]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_cp.config import IGNORE_INDEX
from hf_cp.data.text import TEXT_COLUMNS

# TRL's names; 1 where a token carries loss.
LOSS_MASK_COLUMNS = ("completion_mask", "assistant_masks")
# Columns that change what a token means or where a document ends; ignoring them would train on something else.
REFUSED_COLUMNS = ("inputs_embeds", "pixel_values", "seq_idx", "cu_seq_lens_q")


def present_columns(feature: Mapping, name: str) -> dict[str, Any]:
    """The columns that are not `None`, if there are tokens or text and nothing that must not be ignored."""
    columns = {key: value for key, value in feature.items() if value is not None}
    check_columns(columns, name=name)
    refused = [column for column in REFUSED_COLUMNS if column in columns]
    if refused:
        raise ValueError(
            f"{name} has the column {refused[0]!r}, which context-parallel packing does not support.\n"
            "  Pass input_ids (with seq_lengths or restarting position_ids where a feature holds several documents), "
            f"and remove {refused[0]!r}."
        )
    if "input_ids" not in columns and not any(column in columns for column in TEXT_COLUMNS):
        raise ValueError(
            f"{name} has no tokens: its columns are {sorted(columns)}.\n"
            "  Pass input_ids, text, messages, or prompt and completion (Trainer: set remove_unused_columns=False if "
            "they were dropped)."
        )
    return columns


def check_columns(columns: Mapping[str, Any], *, name: str) -> None:
    """Refuses data for preference and reward training, whatever else it holds.

    Raises:
        ValueError: there is a chosen or rejected answer, or a true/false label beside an answer.
    """
    found = [column for column in columns if {"chosen", "rejected"} & set(column.split("_"))]
    if isinstance(columns.get("label"), bool) and {"completion", "completion_ids"} & columns.keys():
        found.append("label")
    if found:
        raise ValueError(
            f"{name} has the column{'s' * (len(found) > 1)} {', '.join(map(repr, found))}: data for preference or "
            "reward training, whose loss compares whole sequences; a rank holds only parts of them.\n"
            "  Train it without context parallelism, or pass the answers to learn from as prompt and completion."
        )


def token_arrays(columns: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    """The per-token columns as int32 arrays of one length, padding at either end cut off."""
    known = ("input_ids", "labels", "position_ids", "attention_mask", "shift_labels", *LOSS_MASK_COLUMNS)
    arrays = {column: as_int32(columns[column], column, name) for column in known if column in columns}
    length = len(arrays["input_ids"])
    for column, array in arrays.items():
        if len(array) != length:
            raise ValueError(
                f"{name}: {column} has {len(array):,} entries, input_ids has {length:,}. Give one entry per token."
            )
    if length and arrays["input_ids"].min() < 0:
        raise ValueError(
            f"{name}: input_ids holds {arrays['input_ids'].min()}; token ids start at 0. Mask labels, not input_ids."
        )
    mask = arrays.pop("attention_mask", None)
    if mask is None:
        return arrays
    kept = _real_tokens(mask, name)
    return {column: array[kept] for column, array in arrays.items()}


def as_int32(values: Any, column: str, name: str) -> np.ndarray:
    """int32 [length]: token ids fit, and a corpus takes 4 bytes a token."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name}: {column} is not one flat list of numbers ({error}). Give one per token.") from None
    if array.ndim != 1:
        raise ValueError(
            f"{name}: {column} has shape {array.shape}; a feature is one sequence, with one entry per token.\n"
            "  Pass flat lists, one feature per sequence (a class number as label is not causal language modelling)."
        )
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iub":
        raise ValueError(f"{name}: {column} holds {array.dtype} values; it needs integers. Convert the column.")
    if array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min:
        raise ValueError(f"{name}: {column} reaches {array.max()}, beyond 32 bits. Check the tokenizer's output.")
    return array.astype(np.int32)


def _real_tokens(mask: np.ndarray, name: str) -> slice:
    """Where the attention mask is 1; zeros may only be at the ends."""
    ones = np.flatnonzero(mask)
    if not set(np.unique(mask)) <= {0, 1}:
        raise ValueError(
            f"{name}: attention_mask holds {np.unique(mask).tolist()[:8]}; only 0 and 1 are understood.\n"
            "  Mark several documents in one feature by seq_lengths or by position_ids that restart at 0."
        )
    if len(ones) == 0:
        return slice(0, 0)
    if ones[-1] - ones[0] + 1 != len(ones):
        hole = ones[0] + int(np.argmin(mask[ones[0] :]))
        raise ValueError(
            f"{name}: attention_mask has a 0 at token {hole}, between tokens with 1. Zeros may only pad the ends.\n"
            "  Remove masked tokens from input_ids, or take them out of the loss with labels of -100."
        )
    return slice(ones[0], ones[-1] + 1)


def masked_labels(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """int32 [length]: the labels (default: the ids), -100 where a mask takes a token out of the loss."""
    labels = arrays.get("labels", arrays["input_ids"])
    wrong = labels[(labels < 0) & (labels != IGNORE_INDEX)]
    if len(wrong):
        raise ValueError(f"{name}: labels holds {wrong[0]}; a label is a token id, or {IGNORE_INDEX} for no loss.")
    for column in LOSS_MASK_COLUMNS:
        if column in arrays:
            labels = np.where(arrays[column] != 0, labels, np.int32(IGNORE_INDEX))
    return labels
