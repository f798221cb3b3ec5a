"""Documents: one feature of a data set in, token arrays with aligned labels out.

A document is the unit that attention, positions and labels know: attention does not cross its borders, positions count
inside it, and the next-token targets are shifted inside it, so its last token has none. Everything a data set may hold
(padding, several documents in one feature, text, chats) is resolved here, once; later stages only concatenate.

>>> [doc.shift_labels.tolist() for doc in to_documents({"input_ids": [10, 11, 12, 13, 14], "seq_lengths": [3, 2]})]
[[11, 12, -100], [14, -100]]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hf_cp.config import IGNORE_INDEX
from hf_cp.data.columns import as_int32, masked_labels, present_columns, token_arrays
from hf_cp.data.manifest import DocumentCounts
from hf_cp.data.text import tokenize_feature

OVERFLOWS = ("error", "truncate", "split", "drop")


@dataclass(frozen=True, eq=False)
class Document:
    """One document: at least one token, and a label for each.

    Args:
        input_ids (`np.ndarray`): int32 [length].
        labels (`np.ndarray`): int32 [length], aligned with `input_ids` (not shifted); -100 where there is no loss.
            May be the very array `input_ids`, so that a plain corpus is held once.
        position_ids (`np.ndarray`, *optional*): int32 [length], rising by 1; `None` counts from 0.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def positions(self) -> np.ndarray:
        """int32 [length]: `position_ids`, or 0, 1, 2, ..."""
        return np.arange(len(self), dtype=np.int32) if self.position_ids is None else self.position_ids

    @property
    def shift_labels(self) -> np.ndarray:
        """int32 [length]: the target of each token, `labels[i + 1]`; -100 for the last one, whatever follows it.

        The label of the first token is nobody's target: a document of n tokens has at most n - 1 targets.
        """
        return np.append(self.labels[1:], np.int32(IGNORE_INDEX))

    def feed(self, digest: Any) -> None:
        """Adds ids, and labels and positions of the document's own, to a hash."""
        digest.update(self.input_ids)
        if self.labels is not self.input_ids:
            digest.update(self.labels)
        if self.position_ids is not None:
            digest.update(self.position_ids)

    def cut(self, start: int, stop: int) -> Document:
        """Tokens `start` to `stop` as a document; positions given by the user stay as they are."""
        return replace(
            self,
            input_ids=self.input_ids[start:stop],
            labels=self.labels[start:stop],
            position_ids=None if self.position_ids is None else self.position_ids[start:stop],
        )


@dataclass(frozen=True)
class PreparedDocuments:
    """Documents that are ready to be packed.

    Args:
        documents (`tuple[Document, ...]`): in the order of the data set; none is empty or too long.
        sources (`tuple[int, ...]`): index of the feature that each one came from.
        counts (`DocumentCounts`): how many were left out or cut.
    """

    documents: tuple[Document, ...]
    sources: tuple[int, ...]
    counts: DocumentCounts

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(len(document) for document in self.documents)


def prepare_documents(
    features: Iterable[Any],
    *,
    max_tokens: int | None = None,
    overflow: str = "error",
    tokenizer: Any = None,
    assistant_only_loss: bool = True,
    allow_none: bool = False,
) -> PreparedDocuments:
    """Turns features into documents of at most `max_tokens` tokens.

    Args:
        features (iterable): what [`to_documents`] takes.
        max_tokens (`int`, *optional*): longest document allowed; `None` allows any.
        overflow (`str`, *optional*, defaults to `"error"`): what happens to a longer document. `"truncate"` keeps its
            first `max_tokens` tokens; `"split"` cuts it into pieces of `max_tokens` that become documents of their
            own (attention does not cross the cut, positions counted from 0 restart, the token before the cut has no
            target); `"drop"` leaves it out.
        tokenizer, assistant_only_loss: see [`to_documents`].
        allow_none (`bool`, *optional*, defaults to `False`): the features are a part of a data set, of which no
            document may be left.

    Raises:
        ValueError: a feature cannot be read (the message names it), a document is too long with `overflow="error"`, or
            no document is left without `allow_none`.
    """
    documents: list[Document] = []
    sources: list[int] = []
    counts = DocumentCounts()
    for index, feature in enumerate(features):
        name = f"Feature {index}"
        found = to_documents(feature, tokenizer=tokenizer, assistant_only_loss=assistant_only_loss, name=name)
        counts += DocumentCounts(empty=not found)
        for document in found:
            kept, changed = _fit(document, max_tokens=max_tokens, overflow=overflow, name=name)
            counts += changed
            documents += kept
            sources += [index] * len(kept)
    if not documents and not allow_none:
        raise ValueError(none_left(counts, max_tokens))
    return PreparedDocuments(tuple(documents), tuple(sources), counts)


def none_left(counts: DocumentCounts, max_tokens: int | None) -> str:
    """The message for a data set of which no document is left."""
    return (
        f"No document is left to train on: {counts.empty:,} empty, {counts.dropped:,} longer than "
        f"max_tokens={max_tokens}.\n  Pass at least one document with a token in it, or raise max_tokens."
    )


def _fit(
    document: Document, *, max_tokens: int | None, overflow: str, name: str
) -> tuple[list[Document], DocumentCounts]:
    """The document, or what `overflow` makes of it when it is too long."""
    length = len(document)
    if max_tokens is None or length <= max_tokens:
        return [document], DocumentCounts()
    if overflow == "truncate":
        return [document.cut(0, max_tokens)], DocumentCounts(truncated=1)
    if overflow == "drop":
        return [], DocumentCounts(dropped=1)
    if overflow == "split":
        pieces = [document.cut(start, start + max_tokens) for start in range(0, length, max_tokens)]
        return pieces, DocumentCounts(split=1)
    raise ValueError(
        f"{name} has {length:,} tokens, more than max_tokens={max_tokens:,}.\n"
        f"  Raise max_tokens, or choose overflow='truncate', 'split' or 'drop'."
    )


def to_documents(
    feature: Any, *, tokenizer: Any = None, assistant_only_loss: bool = True, name: str = "The feature"
) -> list[Document]:
    """Reads one feature of a data set.

    Args:
        feature (`Mapping`, token list or [`Document`]): a mapping has one of

            - `input_ids`, with optional `labels` (aligned, not shifted; default: the ids), `attention_mask` (zeros at
              either end are padding and are cut off), `completion_mask` / `assistant_masks` (0 takes a token out of
              the loss), `seq_lengths` (several documents, back to back) and `position_ids`. Positions that rise by 1
              from any start are kept as they are; where they restart at 0, a new document begins;
            - `prompt` and `completion`, both strings or both token lists: loss on the completion only;
            - `messages` (and `tools`): a chat, through the tokenizer's template;
            - `text`.

            Columns that are `None` count as absent; other columns are not read.
        tokenizer (*optional*): a Hugging Face tokenizer; needed for text and chats.
        assistant_only_loss (`bool`, *optional*, defaults to `True`): chats carry loss on the assistant's tokens only.
        name (`str`): how error messages call the feature.

    Returns:
        `list[Document]`: usually one; none if the feature has no token.

    Raises:
        ValueError: the feature cannot be read; the message says what, with the numbers.
    """
    if isinstance(feature, Document):
        return [feature]
    if isinstance(feature, str):
        raise ValueError(f"{name} is a bare string of {len(feature)} characters. Pass {{'text': ...}} instead.")
    columns = present_columns(feature if isinstance(feature, Mapping) else {"input_ids": feature}, name)
    if "input_ids" not in columns:
        ids, labels = tokenize_feature(
            columns, tokenizer=tokenizer, assistant_only_loss=assistant_only_loss, name=name
        )
        columns = {"input_ids": ids} if labels is None else {"input_ids": ids, "labels": labels}
    arrays = token_arrays(columns, name)
    if not len(arrays["input_ids"]):
        return []
    borders = _document_borders(arrays, columns.get("seq_lengths"), name)
    whole = Document(arrays["input_ids"], masked_labels(arrays, name), arrays.get("position_ids"))
    documents = [whole.cut(a, b) for a, b in zip(borders[:-1], borders[1:], strict=True) if b > a]
    if "shift_labels" in arrays:
        _check_shift_labels(documents, arrays["shift_labels"], name)
    return [_without_default_positions(document) for document in documents]


def _document_borders(arrays: Mapping[str, np.ndarray], seq_lengths: Any, name: str) -> np.ndarray:
    """Token numbers at which documents begin and end, [num_docs + 1], from `seq_lengths` or restarting positions."""
    length = len(arrays["input_ids"])
    borders = np.array([0, length])
    if seq_lengths is not None:
        lengths = as_int32(seq_lengths, "seq_lengths", name)
        if lengths.sum() != length or (lengths < 0).any():
            raise ValueError(
                f"{name}: seq_lengths {lengths.tolist()[:8]} add up to {lengths.sum():,}, but input_ids has "
                f"{length:,} tokens (without padding). Give the length of each document in the feature."
            )
        borders = np.append(0, np.cumsum(lengths))
    if "position_ids" not in arrays:
        return borders
    positions = arrays["position_ids"]
    jumps = np.flatnonzero(np.diff(positions) != 1) + 1
    allowed = np.isin(jumps, borders) if seq_lengths is not None else positions[jumps] == 0
    if not allowed.all() or positions.min() < 0:
        at = int(jumps[~allowed][0]) if not allowed.all() else int(np.argmin(positions))
        raise ValueError(
            f"{name}: position_ids goes from {positions[at - 1] if at else 'the start'} to {positions[at]} at token "
            f"{at}; positions must rise by 1 inside a document and restart at 0 where the next one begins.\n"
            "  Leave position_ids out to have them counted from 0, or give seq_lengths."
        )
    return borders if seq_lengths is not None else np.concatenate([[0], jumps, [length]])


def _check_shift_labels(documents: Sequence[Document], given: np.ndarray, name: str) -> None:
    """A `shift_labels` column is derived from `labels` here; accept it only if it says the same."""
    expected = np.concatenate([document.shift_labels for document in documents])
    differing = np.flatnonzero(expected != given)
    if len(differing):
        at = int(differing[0])
        raise ValueError(
            f"{name}: shift_labels is {given[at]} at token {at}, but labels moved by one inside each document give "
            f"{expected[at]}.\n  Remove the shift_labels column; it is made from labels."
        )


def _without_default_positions(document: Document) -> Document:
    if document.position_ids is None or document.position_ids[0] != 0:
        return document
    return replace(document, position_ids=None)
