"""Documents of a file or a folder: for training, and for commands that look at data before it.

Invariant: what is read here is what the collator reads: features with `input_ids`, `text`, `prompt` and `completion`,
or `messages`. Nothing is tokenized yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_cp.data.documents import Document

__all__ = ["documents_of_lengths", "load_features", "read_lengths"]

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")


def load_features(path: str | Path) -> Sequence[Any]:
    """The features of a JSONL file, of a saved Hugging Face dataset, or of a folder of text files.

    Raises:
        ValueError: it is none of these, or a line is not JSON.
    """
    source = Path(path)
    if source.is_file():
        return _from_lines(source)
    if (source / "dataset_info.json").exists():
        from datasets import load_from_disk

        return load_from_disk(str(source))
    files = sorted(file for file in source.rglob("*") if file.suffix in TEXT_SUFFIXES) if source.is_dir() else []
    if not files:
        raise ValueError(
            f"{source} is not a JSONL file, and as a folder it holds 0 text files ({', '.join(TEXT_SUFFIXES)}) and no "
            "saved dataset.\n  Give one of these; of a saved dataset with splits, the folder of one split."
        )
    return [{"name": str(file.relative_to(source)), "text": file.read_text(encoding="utf-8")} for file in files]


def documents_of_lengths(lengths: Sequence[int]) -> list[Document]:
    """Documents of which only the lengths matter; their pages are never touched, so they take no memory."""
    return [Document(ids, ids) for ids in (np.zeros(length, dtype=np.int32) for length in lengths)]


def read_lengths(path: Path) -> list[int]:
    """Document lengths from a JSON list, an .npy file, or a text file with one number a line.

    Raises:
        ValueError: the file holds something else.
    """
    if path.suffix == ".npy":
        values = np.load(path).ravel().tolist()
    else:
        text = path.read_text()
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
    try:
        lengths = [int(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(f"{path} does not hold one document length after the other: {str(values)[:80]}...") from None
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{path} holds {len(lengths)} lengths; there must be some, all of at least 1.")
    return lengths


def _from_lines(source: Path) -> list[Any]:
    features = []
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                features.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{source}, line {number} is not JSON ({error}).\n  Put one object on each line (JSONL)."
                ) from None
    if not features:
        raise ValueError(f"{source} holds no document.\n  Put one object on each line (JSONL).")
    return features
