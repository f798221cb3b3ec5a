"""What all commands print alike: tables (by rich), JSON, one verdict line, progress, exit statuses.

Invariant: standard output holds results only (a table and its verdict, or JSON), progress goes to standard error, and
only rank 0 of a launch prints, so that the output of a command can be piped. Where the output is not a terminal, a
table is plain text without colours and lines, as wide as its cells: nothing is wrapped or cut off in a log.

>>> print(Table("Degrees", ("ulysses x ring", "sent"), (("4 x 1", "14.1 GiB"), ("2 x 2", "9.5 GiB"))).text())
Degrees
ulysses x ring      sent
4 x 1           14.1 GiB
2 x 2            9.5 GiB
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

OK, PROBLEM, USAGE = 0, 1, 2  # exit statuses: all is well; something was found; the command was called wrongly

_WORDS = {OK: "PASSED", PROBLEM: "FAILED", USAGE: "REFUSED"}
_STYLES = {"ok": "green", "warn": "yellow", "FAILED": "bold red", "PASSED": "bold green", "REFUSED": "bold red"}
_NUMBER = re.compile(r"^[-+~<>]?\.?\d")
_UNLIMITED = 100_000  # characters of a line that is not on a terminal


@dataclass(frozen=True)
class Verdict:
    """How a command ended, in one line: `status` (`OK`, `PROBLEM` or `USAGE`, the exit status) and the finding.

    >>> str(Verdict(PROBLEM, "the gradients differ."))
    'FAILED: the gradients differ.'
    """

    status: int
    text: str

    def __post_init__(self):
        if self.status not in _WORDS:
            raise ValueError(f"status={self.status!r} does not exist. Use {OK} (OK), {PROBLEM} (PROBLEM) or {USAGE}.")

    def __str__(self) -> str:
        return f"{_WORDS[self.status]}: {self.text}"

    def print(self, file: TextIO | None = None) -> None:
        """Prints the line on rank 0, coloured on a terminal."""
        if is_main_process():
            word = _WORDS[self.status]
            _console(file or sys.stdout).print(Text.assemble((word, _STYLES[word]), f": {self.text}"), soft_wrap=True)


@dataclass(frozen=True)
class Table:
    """A title (may be empty), column names (may be empty) and rows of as many cells; numbers are set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self):
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Row {number} has {len(row)} cells, the table {len(self.columns)} columns. Fill with ''."
                )

    def text(self) -> str:
        """The table as aligned plain text."""
        stream = io.StringIO()
        self._draw(stream, box=None)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def print(self, file: TextIO | None = None) -> None:
        """Prints the table on rank 0."""
        file = file or sys.stdout
        if not is_main_process():
            return
        if file.isatty():
            self._draw(file, box=rich.box.SIMPLE_HEAD)
        else:
            print(self.text(), file=file, flush=True)

    def _draw(self, file: TextIO, *, box: rich.box.Box | None) -> None:
        table = rich.table.Table(box=box, pad_edge=False, show_header=any(self.columns))
        for i, name in enumerate(self.columns):
            cells = [str(row[i]) for row in self.rows]
            right = i > 0 and _are_numbers(cells)
            # Where a terminal is narrow, text is folded and numbers are left whole.
            table.add_column(Text(name), justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(str(cell), style=_STYLES.get(str(cell), "")) for cell in row))
        console = _console(file)
        if self.title:
            console.print(Text(self.title), soft_wrap=True)
        console.print(table)


def to_json(value: Any) -> str:
    """`value` as strict JSON: dataclasses become objects; NaN and infinities, which JSON lacks, strings.

    Each item of a list of objects has one line, however long, so that files of records have as many lines.

    >>> print(to_json({"error": math.inf, "steps": [{"step": 1}, {"step": 2}]}))
    {
      "error": "inf",
      "steps": [
        {"step": 1},
        {"step": 2}
      ]
    }
    """
    return _indented(_plain(value), "")


def print_json(value: Any, path: str | os.PathLike) -> None:
    """Writes `value` as JSON to the file `path`, or to standard output if it is "-"; on rank 0 only."""
    if not is_main_process():
        return
    if os.fspath(path) == "-":
        print(to_json(value), flush=True)
    else:
        Path(path).write_text(to_json(value) + "\n", encoding="utf-8")


def progress(text: str) -> None:
    """One line of progress on standard error, on rank 0."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


def print_usage_error(error: Exception | str) -> int:
    """Says on standard error, on rank 0, why the command cannot do what it was asked for; returns `USAGE`."""
    Verdict(USAGE, str(error)).print(sys.stderr)
    return USAGE


def is_main_process() -> bool:
    """Whether this is rank 0 of the launch, or the only process; known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def _are_numbers(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(_NUMBER.match(cell) for cell in filled)


def _console(file: TextIO) -> Console:
    """Of rich; what it would find out about notebooks and CI from the environment is not asked for."""
    is_terminal = file.isatty()
    width = None if is_terminal else _UNLIMITED
    return Console(file=file, width=width, force_terminal=is_terminal, force_jupyter=False, highlight=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, os.PathLike) else value


def _indented(value: Any, indent: str) -> str:
    """Objects with a line for each value, lists of objects with a line for each item, all else on one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {_indented(item, inner)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = [json.dumps(item, allow_nan=False) for item in value]
    else:
        return json.dumps(value, allow_nan=False)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{end}"
