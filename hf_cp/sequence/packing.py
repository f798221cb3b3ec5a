"""Which documents share a sample: best-fit packing.

Every document lands in exactly one sample, whole, and no sample holds more than `max_tokens`. Documents are placed
longest first, each into the fullest sample that still has room. While documents of one length are being placed, only
the newest samples are nearly empty, so neighbours in length end up together and only the last gaps are filled by short
documents: samples are length buckets without a bucket width to choose.

>>> pack_documents([5, 2, 4, 1], max_tokens=6)
[[0, 3], [1, 2]]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_documents(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Places documents in samples of at most `max_tokens` tokens (best-fit decreasing).

    Deterministic: documents are placed by falling length, equal lengths in the order given; among samples with equally
    little room the one that was filled last takes the document. Takes O(n log n) steps for n documents.

    Args:
        lengths (`Sequence[int]`): tokens of each document.
        max_tokens (`int`): capacity of a sample.

    Returns:
        `list[list[int]]`: the documents of each sample, rising; samples in the order of their first documents.

    Raises:
        ValueError: there is no document, `max_tokens` is not positive, or a length is below 1 or above `max_tokens`.

    >>> pack_documents([3, 3, 3], max_tokens=6)
    [[0, 1], [2]]
    """
    lengths = [int(length) for length in lengths]  # numpy integers would wrap when negated below
    _check_lengths(lengths, max_tokens)
    samples: list[list[int]] = []
    rooms: list[int] = []  # the different amounts of room that open samples have, rising
    samples_with_room: dict[int, list[int]] = {}
    for document in sorted(
        range(len(lengths)), key=lambda d: -lengths[d]
    ):  # sorted() is stable: ties keep their order
        slot = bisect_left(rooms, lengths[document])
        if slot == len(rooms):
            room, sample = max_tokens, len(samples)
            samples.append([])
        else:
            room = rooms[slot]
            sample = samples_with_room[room].pop()
            if not samples_with_room[room]:
                del samples_with_room[room], rooms[slot]
        samples[sample].append(document)
        room -= lengths[document]
        if room and room not in samples_with_room:
            insort(rooms, room)
            samples_with_room[room] = []
        if room:
            samples_with_room[room].append(sample)
    return sorted(sorted(sample) for sample in samples)


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} leaves no room in a sample. Use a positive number of tokens.")
    if len(lengths) == 0:
        raise ValueError("There is no document to pack: got an empty list of lengths. Pass at least one document.")
    for document, length in enumerate(lengths):
        if length < 1:
            raise ValueError(
                f"Document {document} has {length} tokens; every document needs at least 1. Drop empty ones first."
            )
        if length > max_tokens:
            raise ValueError(
                f"Document {document} has {length:,} tokens, more than the {max_tokens:,} of a sample.\n"
                "  Raise max_tokens, or shorten documents: overflow='truncate', 'split' or 'drop' in the collator."
            )
