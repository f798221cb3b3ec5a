"""What `hf-cp plan` prints, and where."""

from __future__ import annotations

import argparse
import json
import re

import numpy as np
import pytest

from hf_cp.output import OK, PROBLEM
from hf_cp.planning.search import Plan
from hf_cp.tools import plan as command
from hf_cp.tools.cli import main

SMALL = ["smollm2-135m", "--seq-len", "8192"]


def planned(*options: str) -> Plan:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.make_plan(parser.parse_args(options))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_rank_can_be_read_off_the_placement():
    plan = planned(*SMALL, "--gpus", "12", "--gpus-per-node", "4")
    assert {c.config.ring_degree for c in plan.candidates} >= {1, 2, 4, 12}
    for candidate in plan.candidates:
        rows = command.placement_table(plan, candidate).rows
        sizes = (candidate.dp_size, candidate.config.ring_degree, candidate.config.ulysses_degree)
        seen = []
        for *cells, node in rows:
            if cells[0] == "...":
                continue
            ranks, *places = ([int(n) for n in cell.split("-")] for cell in cells)
            inside = list(range(ranks[0], ranks[-1] + 1))
            assert {rank // 4 for rank in inside} == {int(node)}
            assert sum(len(place) > 1 for place in places) <= 1  # one place counts up along the ranks
            spans = [np.arange(place[0], place[-1] + 1) for place in places]
            expected = np.unravel_index(inside, sizes)
            assert all(
                (np.broadcast_to(span, len(inside)) == e).all() for span, e in zip(spans, expected, strict=True)
            )
            seen += inside
        is_shortened = "..." in [row[0] for row in rows]
        assert seen == list(range(12)) or (is_shortened and len(rows) == command.PLACEMENT_LINES)


def test_large_worlds_are_shortened():
    plan = planned(*SMALL, "--gpus", "64", "--cp", "2")
    rows = command.placement_table(plan, plan.candidates[0]).rows
    assert rows[-2][0] == "..." and rows[-1][0] == "62-63" and len(rows) == command.PLACEMENT_LINES
    assert rows[2][:2] == ("4-5", "2")  # rank 5 belongs to sample 2


def test_rates_say_where_they_come_from(here):
    assert command.headline(planned(*SMALL, "--gpus", "8")).endswith(
        "attention 544 TFLOP/s, linear layers 593 TFLOP/s, links in a node 338 GB/s, memory 79.1 GiB (all assumed; "
        "measure with hf-cp bench)"
    )
    section = {"name": "CPU", "is_measured": True, "attention_tflops": 0.06587, "intra_gbs": 1.4018}
    (here / "bench.json").write_text(json.dumps({"device": section}))
    text = command.headline(planned(*SMALL, "--gpus", "4", "--gpus-per-node", "2", "--measured", "bench.json"))
    assert text.splitlines()[-1] == (
        "attention 0.0659 TFLOP/s (measured), linear layers 593 TFLOP/s (assumed), links in a node 1.40 GB/s "
        "(measured), between nodes 45.0 GB/s (assumed), memory 79.1 GiB (assumed)"
    )


def test_the_ranking_shows_engine_layout_error_and_longest_document():
    plan = planned(*SMALL, "--gpus", "8", "--cp", "8")
    table = command.ranking_table(plan, 100)
    assert "layout document" in table.title and "seconds +- 25%" in table.title
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert {c["engine"] for c in cells if c["dp x ring x ulysses"] == "1 x 8 x 1"} == {
        "auto: p2p",
        "exchange",
        "allgather",
    }
    for row, candidate in zip(cells, plan.candidates, strict=True):
        assert row["longest document"] == f"{candidate.longest_document:,}"
    assert cells[0]["note"].startswith("first choice")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["llama-3.1-70b", "--seq-len", "1048576", "--gpus", "2", "--cp", "2"], PROBLEM),
        (["llama-3.1-8b", "--seq-len", "131072", "--gpus", "256", "--cp", "8"], OK),
    ],
)
def test_the_verdict_is_short(options, status):
    verdict = command.judge(planned(*options))
    assert verdict.status == status and len(str(verdict)) <= 250


def test_little_free_memory_is_noted():
    plan = planned("llama-3.1-8b", "--seq-len", "131072", "--gpus", "8", "--cp", "4")
    notes = {command.split(c): command.note(c, plan) for c in plan.candidates if c.is_tight and c.fits}
    assert notes and all("under 10% of the memory free" in note for note in notes.values())


def test_standard_output_holds_one_document(here, capsys):
    assert main(["plan", *SMALL, "--gpus", "2", "--json", "-", "--write", "new"]) == OK
    printed = capsys.readouterr()
    assert json.loads(printed.out)["recommended"] and printed.err.startswith("Recipe: new")
    assert (here / "new" / "train.yaml").exists()


def test_nothing_fits_and_nothing_is_written(here, capsys):
    options = ["plan", "llama-3.1-70b", "--seq-len", "8192", "--gpus", "1", "--write", "new"]
    assert main(options) == PROBLEM
    assert capsys.readouterr().out.splitlines()[-1].startswith("Nothing was written to new:")
    assert main([*options, "--json", "-"]) == PROBLEM
    printed = capsys.readouterr()
    assert json.loads(printed.out)["recommended"] is None and re.search("^Nothing was written", printed.err, re.M)
    assert not (here / "new").exists()


@pytest.mark.parametrize("checkpointing", ["none", "full", "keep_attention", "offload"])
def test_a_recipe_does_what_was_priced(checkpointing, here, capsys):
    """`keep_attention` is what memory and time assume; the engine is left to `auto`."""
    import yaml

    options = ["--gpus", "4", "--cp", "4", "--lora", "8", "--checkpointing", checkpointing, "--write", "new"]
    assert main(["plan", "llama-3.1-8b", "--seq-len", "32768", *options]) == OK
    settings = yaml.safe_load((here / "new" / "train.yaml").read_text())
    kept = {"full": False, "keep_attention": True, "offload": True}
    assert checkpointing == "none" or settings["keep_attention"] is kept[checkpointing]
    assert settings.get("ring_comm", "auto") == "auto"
    assert settings.get("activation_checkpointing", False) == (checkpointing != "none")
