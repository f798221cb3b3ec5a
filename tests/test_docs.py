"""The pages in docs/ keep up with the code: links, snippets, command lines, quoted errors and copied numbers."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_cp.tools.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SCALARS = ROOT / "hf_cp" / "training" / "telemetry" / "scalars.py"
MIB = 2**20


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a language; "" is a block without one."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}, of {sorted(anchors(target))}"


SNIPPETS = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=[f"{page.stem}-{number}" for page, number in SNIPPETS])
def test_snippets_run(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = compile(blocks(page, "python")[number], f"{page.name}, snippet {number}", "exec")
    exec(code, {"__name__": "__main__"})


def command_lines(page: Path) -> Iterator[list[str]]:
    """What follows `hf-cp` or `-m hf_cp` in code blocks, both fenced and indented."""
    start = r"^(?:\$ | {4})?(?:hf-cp|torchrun .*-m hf_cp|accelerate .*-m hf_cp) "
    for line in re.findall(start + "([a-z].*)$", text_of(page), flags=re.MULTILINE):
        if not re.search(r"\bMODEL\b|\.\.\.", line):
            yield shlex.split(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_are_understood(page):
    for name, *options in command_lines(page):
        parser = argparse.ArgumentParser(prog=f"{page.name}: hf-cp {name}")
        importlib.import_module(f"hf_cp.tools.{COMMANDS[name]}").add_arguments(parser)
        parser.parse_args(options)


def test_every_command_is_described():
    assert set(COMMANDS) <= anchors(DOCS / "tools.md")
    assert {name for name, *_ in command_lines(DOCS / "tools.md")} == set(COMMANDS)


def test_every_logged_number_is_described():
    described, logged = (set(re.findall(r"`(cp/\w+)`", text_of(page))) for page in (DOCS / "tools.md", SCALARS))
    assert described == logged == set(re.findall(r"\bcp/\w+", text_of(SCALARS)))


def test_quoted_errors_exist():
    """First cells of the tables: the parts of a message between `...` are in the code."""
    sources = (*(ROOT / "hf_cp").rglob("*.py"),)
    code = "\n".join(text_of(path) for path in sources)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that are joined
    cells = re.findall(r"^\| ([^|]+) \|", text_of(DOCS / "troubleshooting.md"), flags=re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if text.count(" ") > 1]
    assert len(quoted) > 30
    missing = [(text, part) for text in quoted for part in text.split("...") if part.strip(" .,=") not in code]
    assert not missing


def test_memory_is_that_of_the_benchmark():
    """Each number of docs/memory.md, rounded to MiB."""
    rows = json.loads(text_of(DOCS / "benchmarks" / "memory.json"))["rows"]
    measured = {
        (row["processes"], row["variant"]): {k: row[k] / MIB for k in ("kept", "peak", "host", "sent")} for row in rows
    }
    names = {
        "plain": "plain",
        "feed-forward in chunks": "chunked MLP",
        "checkpointing, `keep_attention=False`": "checkpointing, attention again",
        "checkpointing": "checkpointing",
        "checkpointing, feed-forward in chunks": "checkpointing, chunked MLP",
        "checkpointing, offload": "checkpointing, offload",
        "checkpointing, offload, feed-forward in chunks": "checkpointing, offload, chunked MLP",
    }
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text_of(DOCS / "memory.md").splitlines()
    ]
    lines = [cells for cells in lines if cells[0] in names and len(cells) > 3]
    assert len(lines) == 2 * len(names)
    for name, *cells in lines:
        variants = {processes: numbers for (processes, variant), numbers in measured.items() if variant == names[name]}
        one, ring, ulysses = (variants[key] for key in ("one process", "ring 2", "ulysses 2"))
        expected = [one["kept"], one["peak"], one["host"]]
        if len(cells) == 6:
            expected = [half[key] for half in (ring, ulysses) for key in ("kept", "peak", "sent")]
        assert [float(cell or 0) for cell in cells] == pytest.approx(expected, abs=0.51), name
