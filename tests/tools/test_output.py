"""Tables, JSON and verdicts: the same cells with and without a terminal, one process that prints, strict JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_cp.output import OK, PROBLEM, USAGE, Table, Verdict, print_json, print_usage_error, progress

TABLE = Table("Memory", ("what", "GiB", ""), (("weights", "7.5", "ok"), ("logits [1]", "19.61", "FAILED")))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_table_is_aligned_and_without_escapes():
    stream = io.StringIO()
    TABLE.print(stream)
    assert stream.getvalue() == "Memory\nwhat          GiB\nweights       7.5  ok\nlogits [1]  19.61  FAILED\n"


def test_terminal_table_has_the_same_cells(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    TABLE.print(stream)
    drawn = stream.getvalue()
    assert "\x1b[" in drawn and drawn != TABLE.text() + "\n"
    assert all(cell in drawn for row in TABLE.rows for cell in row)  # "[1]" is text, not markup


def test_a_log_is_neither_wrapped_nor_coloured_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    Table("t" * 300, ("a", "b"), (("x y " * 100, "1"),)).print(stream)
    Verdict(PROBLEM, "x y " * 100 + ".").print(stream)
    assert [len(line) for line in stream.getvalue().splitlines()] == [300, 403, 403, 409]
    assert "\x1b" not in stream.getvalue() and stream.getvalue().endswith("x y .\n")


def test_numbers_are_whole_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "24")
    stream = Terminal()
    Table("", ("what", "tokens"), (("long words that are folded", "1,234,567,890"),)).print(stream)
    lines = stream.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if "1,234,567,890" in line)
    assert "folded" not in lines[first] and "…" not in stream.getvalue()


def test_table_without_column_names_has_no_empty_line():
    assert Table("", ("", ""), (("a", "1"), ("bb", "22"))).text() == "a    1\nbb  22"


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match="Row 1 has 1 cells, the table 2 columns"):
        Table("", ("a", "b"), (("1", "2"), ("1",)))


def test_verdicts_have_the_three_exit_statuses():
    assert (OK, PROBLEM, USAGE) == (0, 1, 2)
    assert [str(Verdict(status, "x.")) for status in (0, 1, 2)] == ["PASSED: x.", "FAILED: x.", "REFUSED: x."]
    with pytest.raises(ValueError, match="status=3 does not exist"):
        Verdict(3, "x")


def test_json_is_strict(tmp_path, capsys):
    @dataclass
    class Inner:
        path: Path
        errors: tuple[float, ...]

    class Pair(NamedTuple):
        inner: Inner
        count: int

    value = Pair(Inner(Path("a/b"), (1.5, math.nan, -math.inf)), 2)
    expected = {"inner": {"path": "a/b", "errors": [1.5, "nan", "-inf"]}, "count": 2}
    print_json(value, "-")
    print_json(value, tmp_path / "out.json")

    def refuse(constant):
        raise AssertionError(constant)

    for text in (capsys.readouterr().out, (tmp_path / "out.json").read_text()):
        assert json.loads(text, parse_constant=refuse) == expected
        assert text.endswith("}\n")


def test_only_rank_0_prints_and_results_have_stdout_to_themselves(monkeypatch, capsys, tmp_path):
    def say_everything() -> None:
        TABLE.print()
        Verdict(OK, "fine.").print()
        print_json({}, "-")
        print_json({}, tmp_path / "out.json")
        progress("one moment")
        assert print_usage_error(ValueError("no such file.")) == USAGE

    monkeypatch.setenv("RANK", "1")
    say_everything()
    assert capsys.readouterr() == ("", "") and not (tmp_path / "out.json").exists()
    monkeypatch.setenv("RANK", "0")
    say_everything()
    out, err = capsys.readouterr()
    assert out == TABLE.text() + "\nPASSED: fine.\n{}\n" and err == "one moment\nREFUSED: no such file.\n"
