"""What all commands print alike: tables, JSON, one verdict line, progress, exit statuses.

Invariant: standard output holds results only (a table and its verdict, or JSON), progress goes to standard error, and
only rank 0 of a launch prints, so that the output of a command can be piped. A table is drawn by rich where standard
output is a terminal and rich is installed, else as aligned plain text with the same cells.

>>> print(Table("Degrees", ("ulysses x ring", "sent"), (("4 x 1", "14.1 GiB"), ("2 x 2", "9.5 GiB"))).text())
Degrees
ulysses x ring      sent
4 x 1           14.1 GiB
2 x 2            9.5 GiB
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = [
    "OK",
    "PROBLEM",
    "USAGE",
    "Table",
    "Verdict",
    "is_main_process",
    "print_json",
    "print_usage_error",
    "progress",
    "to_json",
]

OK, PROBLEM, USAGE = 0, 1, 2  # exit statuses: all is well; something was found; the command was called wrongly

_WORDS = {OK: "PASSED", PROBLEM: "FAILED", USAGE: "REFUSED"}
_STYLES = {"ok": "green", "warn": "yellow", "FAILED": "bold red", "PASSED": "bold green", "REFUSED": "bold red"}
_NUMBER = re.compile(r"^[-+~<>]?\.?\d")


@dataclass(frozen=True)
class Verdict:
    """How a command ended, in one line.

    Args:
        status (`int`): `OK`, `PROBLEM` or `USAGE`; the exit status of the process.
        text (`str`): the finding.

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
        file = file or sys.stdout
        if not is_main_process():
            return
        if _draws_with_rich(file):
            from rich.text import Text

            word = _WORDS[self.status]
            _rich_console(file).print(Text.assemble((word, _STYLES[word]), f": {self.text}"), soft_wrap=True)
        else:
            print(self, file=file, flush=True)


@dataclass(frozen=True)
class Table:
    """A title, column names and rows of cells; after the first column, numbers are set to the right.

    Args:
        title (`str`): a line above the table; may be empty.
        columns (sequence of `str`): names, may be empty.
        rows (sequence of sequences of `str`): as many cells as columns.

    Raises:
        ValueError: a row has another number of cells.
    """

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
        rows = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        sides = [str.rjust if right else str.ljust for right in self._right()]
        cells = [
            [side(*pair) for side, pair in zip(sides, zip(row, widths, strict=True), strict=True)] for row in rows
        ]
        lines = ["  ".join(row).rstrip() for row in cells]
        if not any(self.columns):
            lines = lines[1:]
        return "\n".join([*([self.title] if self.title else []), *lines])

    def print(self, file: TextIO | None = None) -> None:
        """Prints the table on rank 0."""
        file = file or sys.stdout
        if not is_main_process():
            return
        if _draws_with_rich(file):
            _rich_console(file).print(self._rich())
        else:
            print(self.text(), file=file, flush=True)

    def _right(self) -> list[bool]:
        """Whether a column holds numbers only (cells may be empty or '-'); the first one holds names."""
        columns = [[str(row[i]) for row in self.rows] for i in range(len(self.columns))]
        filled = [[cell for cell in column if cell not in ("", "-")] for column in columns]
        numbers = [bool(column) and all(_NUMBER.match(cell) for cell in column) for column in filled]
        return [False, *numbers[1:]]

    def _rich(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.show_header = any(self.columns)
        for name, right in zip(self.columns, self._right(), strict=True):
            table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(str(cell), style=_STYLES.get(str(cell), "")) for cell in row))
        return table


def to_json(value: Any) -> str:
    """`value` as strict JSON: dataclasses become objects; NaN and infinities, which JSON lacks, strings.

    >>> to_json({"error": math.inf})
    '{\\n  "error": "inf"\\n}'
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False)


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
    if is_main_process():
        Verdict(USAGE, str(error)).print(sys.stderr)
    return USAGE


def is_main_process() -> bool:
    """Whether this is rank 0 of the launch, or the only process; known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


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


def _draws_with_rich(file: TextIO) -> bool:
    return file.isatty() and importlib.util.find_spec("rich") is not None


def _rich_console(file: TextIO) -> Any:
    from rich.console import Console

    return Console(file=file, highlight=False)
