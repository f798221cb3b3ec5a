"""`hf-cp report`: which ranks of a recorded run are slow, and whether by their own work or by waiting.

Reads what `ContextParallelCallback(record_dir=...)` has written. The first optimizer step of the run is left out where
there are others: it holds what is done once (compilation, first allocations, connections).

Invariant: every number comes from the records; nothing is estimated. A rank is called slow for time that it needed by
itself: since they wait for each other all ranks take equally long, and the one that the others wait for waits least.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from hf_cp.output import OK, PROBLEM, Table, Verdict, print_json, print_usage_error, progress
from hf_cp.tools.report_figure import PARTS, plot_run
from hf_cp.training.telemetry.records import WHOLE_SAMPLES, RunRecords, StepRecord, read_run

SLOW = 1.10  # a rank that needs 10 % more than the median rank holds the others up
WORK_EXPLAINS = 0.5  # of the extra time, if the attention work is above the mean by at least this share of it
MUCH_WAITING = 0.25  # share of the step


@dataclass(frozen=True)
class RankSummary:
    """One rank, mean over steps.

    Args:
        rank (`int`): in the world.
        seconds (`float`): of a step.
        data, work, ring_wait, ulysses_wait, other_wait, rest (`float`): its `PARTS`, in seconds.
        area (`float`): attention work (visible pairs).
        peak_memory_bytes (`int`): the most held.
    """

    rank: int
    seconds: float
    data: float
    work: float
    ring_wait: float
    ulysses_wait: float
    other_wait: float
    rest: float
    area: float
    peak_memory_bytes: int

    @property
    def parts(self) -> tuple[float, ...]:
        """Seconds of the parts of a step, in the order of the columns."""
        return self.data, self.work, self.ring_wait, self.ulysses_wait, self.other_wait, self.rest

    @property
    def busy(self) -> float:
        """Seconds that the rank needs by itself."""
        return self.data + self.work

    @property
    def waited(self) -> float:
        """Seconds spent waiting for peers."""
        return self.ring_wait + self.ulysses_wait + self.other_wait

    @classmethod
    def of(cls, rank: int, steps: Sequence[StepRecord]) -> RankSummary:
        """Means over `steps`, of memory the most."""
        parts = [mean(part.seconds(step) for step in steps) for part in PARTS]
        seconds, area = mean(step.seconds for step in steps), mean(step.area for step in steps)
        return cls(rank, seconds, *parts, area, max(step.peak_memory_bytes for step in steps))


@dataclass(frozen=True)
class RunReport:
    """What `hf-cp report` says.

    Args:
        run (`str`): what ran, as at its start.
        first_step, last_step, num_steps (`int`): which optimizer steps were looked at.
        tokens_per_second (`float`): of all ranks.
        padding, exposed, wait_share (`float`): 0 to 1; see hf_cp/training/telemetry/scalars.py.
        work_max_over_mean, busy_max_over_median (`float`): attention work, and time needed by a rank itself.
        ranks (`tuple[RankSummary, ...]`): all, in order.
        slow_ranks (`tuple[int, ...]`): those that hold others up.
        verdict (`str`): the finding, with its reason.
    """

    run: str
    first_step: int
    last_step: int
    num_steps: int
    tokens_per_second: float
    padding: float
    exposed: float
    wait_share: float
    work_max_over_mean: float
    busy_max_over_median: float
    ranks: tuple[RankSummary, ...]
    slow_ranks: tuple[int, ...]
    verdict: str


def make_report(run: RunRecords) -> RunReport:
    """Sums a run up."""
    ranks = [steps[1:] if len(steps) > 1 else steps for steps in run.ranks]
    summaries = tuple(RankSummary.of(rank, steps) for rank, steps in enumerate(ranks))
    records = [record for steps in ranks for record in steps]
    flight = sum(record.ring_flight_seconds + record.ulysses_flight_seconds for record in records)
    waited = sum(record.ring_wait_seconds + record.ulysses_wait_seconds for record in records)
    typical = median(summary.busy for summary in summaries)
    mean_area = mean(summary.area for summary in summaries)
    is_seen = run.info.layout != WHOLE_SAMPLES  # else the waits for gradients are in every rank's own time
    slow = [summary for summary in summaries if is_seen and summary.busy > SLOW * typical]
    slow.sort(key=lambda summary: -summary.busy)
    wait_share = sum(s.waited for s in summaries) / sum(s.seconds for s in summaries)
    return RunReport(
        run=str(run.info),
        first_step=ranks[0][0].step,
        last_step=ranks[0][-1].step,
        num_steps=len(ranks[0]),
        tokens_per_second=sum(r.tokens for r in records) / max(sum(r.seconds for r in steps) for steps in ranks),
        padding=1 - sum(record.tokens for record in records) / sum(record.slots for record in records),
        exposed=waited / flight if flight else 0.0,
        wait_share=wait_share,
        work_max_over_mean=max(s.area for s in summaries) / mean_area if mean_area else 1.0,
        busy_max_over_median=max(s.busy for s in summaries) / typical if typical else 1.0,
        ranks=summaries,
        slow_ranks=tuple(summary.rank for summary in slow),
        verdict=_verdict(summaries, slow, wait_share=wait_share, turn_share=_turn_share(ranks))
        if is_seen
        else "ranks have whole samples and wait for each other only in the reduction of gradients: that is not timed.",
    )


def _turn_share(ranks: Sequence[Sequence[StepRecord]]) -> float:
    """Share of the steps in which a rank, on average, waits for the one that is slowest in that very step."""
    by_step = list(zip(*ranks, strict=True))
    busy = [[record.busy_seconds for record in step] for step in by_step]
    lost = sum(max(seconds) - mean(seconds) for seconds in busy)
    return lost / sum(mean(record.seconds for record in step) for step in by_step)


def _verdict(
    ranks: Sequence[RankSummary], slow: Sequence[RankSummary], *, wait_share: float, turn_share: float
) -> str:
    """Who is slow and why; with nobody slow over the whole run, what the ranks wait for."""
    if not slow:
        if wait_share <= MUCH_WAITING:
            return f"no rank holds the others up; ranks wait {wait_share:.0%} of a step."
        waiting = f"no rank holds the others up all the time, but ranks wait {wait_share:.0%} of a step"
        if turn_share > wait_share / 2:
            return f"{waiting}, mostly for another rank in every step: the packed samples are uneven."
        return f"{waiting}, mostly for transfers. Longer samples, another ring_comm or ulysses_degree hide more."
    worst = slow[0]
    extra = worst.busy / median(summary.busy for summary in ranks) - 1
    extra_data = worst.data - median(summary.data for summary in ranks)
    extra_work = worst.work - median(summary.work for summary in ranks)
    mean_area = mean(summary.area for summary in ranks)
    more_area = worst.area / mean_area - 1 if mean_area else 0.0
    who = f"rank {worst.rank} needs {extra:.0%} more time than the median rank"
    if len(slow) > 1:
        who += f" (slow as well: {', '.join(str(summary.rank) for summary in slow[1:])})"
    if extra_data > extra_work:
        return (
            f"{who}, most of it for its batches: they are slow to come. Look at the storage of that process, or set "
            "dataloader_num_workers."
        )
    if more_area >= WORK_EXPLAINS * extra:
        return (
            f"{who}, and has {more_area:.0%} more attention work than the mean: the packed samples are uneven. Use "
            "layout 'document' (auto), or train_sampling_strategy='group_by_length'."
        )
    return (
        f"{who}, with {abs(more_area):.0%} {'more' if more_area >= 0 else 'less'} attention work than the mean: not "
        "its share of the samples, but the process or its device is slow. Look at its clock, heat and other jobs."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp report`."""
    parser.add_argument("run_dir", type=Path, help="the record_dir of ContextParallelCallback")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="where the picture goes (default: RUN_DIR/report.png)"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing (needs no matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers as JSON, '-' for standard output")


def run(args: argparse.Namespace) -> int:
    """Prints and draws the report; returns the exit status: 1 if a rank holds the others up."""
    try:
        records = read_run(args.run_dir)
    except ValueError as error:
        return print_usage_error(error)
    report = make_report(records)
    if not args.no_plot:
        path = args.plot or args.run_dir / "report.png"
        try:
            plot_run(path, records)
        except ImportError:
            return print_usage_error("The picture needs matplotlib.\n  pip install 'hf-cp[plot]', or give --no-plot.")
        progress(f"drawn: {path}")
    if args.json is not None:
        print_json(report, args.json)
    if args.json != "-":
        for table in report_tables(report):
            table.print()
        Verdict(PROBLEM if report.slow_ranks else OK, report.verdict).print()
    return PROBLEM if report.slow_ranks else OK


def report_tables(report: RunReport) -> list[Table]:
    """The report as a user reads it."""
    steps = f"steps {report.first_step} to {report.last_step} ({report.num_steps})"
    facts = (
        ("tokens per second, all ranks", f"{report.tokens_per_second:,.0f}"),
        ("padding", f"{report.padding:.2%}"),
        ("attention work, largest rank over mean", f"{report.work_max_over_mean:.3f}"),
        ("own time, slowest rank over median", f"{report.busy_max_over_median:.3f}"),
        ("share of a step spent waiting for peers", f"{report.wait_share:.1%}"),
        ("share of transfers that nothing hides", f"{report.exposed:.1%}"),
    )
    mean_area = mean(summary.area for summary in report.ranks) or 1.0
    columns = ("rank", "step", *(part.name for part in PARTS), "work/mean", "GiB")
    rows = [
        (
            str(s.rank),
            *(f"{1000 * x:.1f}" for x in (s.seconds, *s.parts)),
            f"{s.area / mean_area:.3f}",
            f"{s.peak_memory_bytes / 2**30:.2f}",
        )
        for s in report.ranks
    ]
    return [Table(f"{report.run}\n{steps}", ("", ""), facts), Table("\nmean step of a rank, in ms", columns, rows)]
