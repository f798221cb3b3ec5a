"""One word, one meaning, and plain English: what the glossary in CONTRIBUTING replaces does not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("hf_cp", "docs", "recipes", "examples", "README.md", "CONTRIBUTING.md")  # CHANGELOG.md is history
ENDINGS = {".py", ".md", ".yaml", ".json"}
NAMES = {  # words of ours that nobody else uses, and what to say instead
    r"trades?|traded|trading": "all-to-all",
    r"relays?|relayed": "ring",
    r"dealt": "split, distributed",
    r"lock_?step\w*": "common length",
    r"fillers?": "dummy sample",
    r"wire[ds]?": "communicator; bytes sent",
    r"Watched\w*": "communicator",
}
PHRASES = {
    r"(?<!here )\b(?:is|are|was) no (?:JSON|ZeRO|baseline|checkpoint)\b": "is not ...",
    r"\bthe own\b|\ban own\b": "its own, this rank's",
    r"\bfrom (?:where|which) on\b": "from ... on",
    r"\bshall\b": "must, will",
    r"\bmasked rows?\b": "dummy sample",
    r"\bpacked rows?\b": "packed sample",
    r"\baccumulation window\b": "optimizer step",
}
EXCEPTIONS = {  # (file, word): keys of the device files that `hf-cp bench` has written for users
    ("hf_cp/planning/devices.py", "trade"),
    ("hf_cp/tools/bench/calibration.py", "trade"),
}

FILES = sorted(
    path
    for place in PLACES
    for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    if path.suffix in ENDINGS and "benchmarks" not in path.relative_to(ROOT).parts
)


def found_in(text: str) -> list[tuple[int, str, str]]:
    """Line, word and what to say instead. A word is also a part of an identifier."""
    patterns = {rf"(?<![A-Za-z])(?:{word})(?![A-Za-z])": instead for word, instead in NAMES.items()} | PHRASES
    return [
        (number, match.group(), instead)
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern, instead in patterns.items()
        for match in re.finditer(pattern, line)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_of_the_glossary(path):
    name = str(path.relative_to(ROOT))
    found = [entry for entry in found_in(path.read_text()) if (name, entry[1]) not in EXCEPTIONS]
    assert not found, "\n".join(f"{name}:{line}: {word!r}; say: {instead}" for line, word, instead in found)


def test_it_finds_them():
    text = "lockstep_length\na trade, in which\nx = wire.send\nis no JSON\nentire trader filled"
    assert [line for line, _, _ in found_in(text)] == [1, 2, 3, 4]
