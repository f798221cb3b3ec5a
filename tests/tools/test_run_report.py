"""`hf-cp report` on records made by hand: who is slow and why, numbers, picture, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hf_cp.tools.cli import main
from hf_cp.tools.report import RunReport, make_report
from hf_cp.tools.report_figure import PARTS, most_uneven_step, over_mean
from hf_cp.training.telemetry.records import RecordWriter, RunInfo, RunRecords, StepRecord

RANKS = 4
INFO = RunInfo(1, 4, 1, "document", "exchange", "sdpa", 1024, 1, 1, "cpu")


def step(number: int = 2, *, data: float = 0.1, work: float = 1.0, area: float = 1000.0, seconds: float = 2.0):
    """What is not data or work is waiting in the ring, a tenth aside; half of what is in flight is waited for."""
    waited = seconds - data - work - 0.1
    return StepRecord(
        step=number, seconds=seconds, data_seconds=data, work_seconds=work, ring_wait_seconds=waited,
        ulysses_wait_seconds=0.0, other_wait_seconds=0.0, ring_flight_seconds=2 * waited, ulysses_flight_seconds=0.0,
        ring_bytes=100, ulysses_bytes=0, samples=1, tokens=225, targets=200, slots=256, area=area,
        peak_memory_bytes=2**30,
    )  # fmt: skip


def run_of(*last_rank: StepRecord) -> RunRecords:
    """The last rank has these steps, the others even ones. Before them comes a first step out of proportion."""
    first = step(1, work=50.0, seconds=100.0)
    ranks = [[first, *(step(record.step) for record in last_rank)] for _ in range(RANKS - 1)]
    return RunRecords(INFO, tuple(map(tuple, [*ranks, [first, *last_rank]])))


def report(*last_rank: StepRecord) -> RunReport:
    return make_report(run_of(*last_rank))


def test_uneven_samples():
    found = report(step(work=1.5, area=1500.0))
    assert found.slow_ranks == (3,)
    assert "rank 3 needs 45% more time" in found.verdict and "33% more attention work" in found.verdict
    assert "samples are uneven" in found.verdict


def test_slow_process():
    found = report(step(work=1.5))
    assert found.slow_ranks == (3,) and "0% more attention work" in found.verdict and "device is slow" in found.verdict


def test_slow_batches():
    found = report(step(data=0.7))
    assert found.slow_ranks == (3,) and "slow to come" in found.verdict


def test_even_ranks_that_wait_for_transfers():
    found = report(step())
    assert found.slow_ranks == () and "ranks wait 40% of a step, mostly for transfers" in found.verdict


def test_ranks_that_wait_for_each_other_in_turn():
    """Every rank is slow once: over the run they are even."""
    even = step(work=0.5, seconds=1.7)
    slow = step(work=1.5, seconds=1.7)
    ranks = [
        [dataclasses.replace(slow if turn == rank else even, step=turn + 1) for turn in range(RANKS)]
        for rank in range(RANKS)
    ]
    found = make_report(RunRecords(INFO, tuple(map(tuple, [[step(0), *steps] for steps in ranks]))))
    assert found.slow_ranks == () and "another rank in every step" in found.verdict


def test_ranks_that_work():
    found = make_report(RunRecords(INFO, ((step(seconds=1.25),),) * RANKS))
    assert found.slow_ranks == () and found.verdict == "no rank holds the others up; ranks wait 4% of a step."


def test_whole_rows_are_not_judged():
    """What a rank needs by itself is then not told from what it waits for gradients."""
    run = run_of(step(work=1.9, data=0.0))
    found = make_report(dataclasses.replace(run, info=dataclasses.replace(INFO, ring=1, dp=4, layout="none")))
    assert found.slow_ranks == () and "not timed" in found.verdict


def test_numbers_leave_the_first_step_out():
    found = report(step(2), step(3))
    assert (found.first_step, found.last_step, found.num_steps) == (2, 3, 2)
    assert found.tokens_per_second == pytest.approx(RANKS * 225 / 2.0)
    assert found.padding == pytest.approx(1 - 225 / 256)
    assert found.exposed == pytest.approx(0.5) and found.wait_share == pytest.approx(0.4)
    assert found.ranks[0].rest == pytest.approx(0.1) and found.ranks[0].ring_wait == pytest.approx(0.8)
    only = make_report(RunRecords(INFO, ((step(1),),) * RANKS))
    assert (only.first_step, only.num_steps) == (1, 1)


def write_run(folder: Path, run: RunRecords) -> Path:
    for rank, steps in enumerate(run.ranks):
        writer = RecordWriter(folder, rank=rank, appends=False)
        writer.write(steps)
    writer.write_info(run.info)
    return folder


def test_command(tmp_path, capsys):
    folder = write_run(tmp_path / "run", run_of(step(work=1.5, area=1500.0)))
    assert main(["report", str(folder)]) == 1
    printed = capsys.readouterr()
    assert "engine exchange" in printed.out and "FAILED: rank 3 needs 45%" in printed.out
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG") and "drawn" in printed.err
    even = write_run(tmp_path / "even", run_of(step()))
    assert main(["report", str(even), "--no-plot", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["slow_ranks"] == []
    assert not (even / "report.png").exists()


def test_folders_that_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "record_dir" in capsys.readouterr().err
    folder = write_run(tmp_path / "run", run_of(step()))
    (folder / "rank2.jsonl").unlink()
    assert main(["report", str(folder)]) == 2
    assert "rank2.jsonl is missing" in capsys.readouterr().err


def test_picture_shows_the_ratios():
    run = run_of(step(2, work=1.5), step(3, work=3.0, area=2000.0))
    work = over_mean(run, lambda record: record.area)
    assert work.shape == (RANKS, 3)
    np.testing.assert_allclose(work[:, 2], [0.8, 0.8, 0.8, 1.6])
    assert most_uneven_step(over_mean(run, lambda record: record.busy_seconds)) == 2
    record = step()
    assert sum(part.seconds(record) for part in PARTS) == pytest.approx(record.seconds)
