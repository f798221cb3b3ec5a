"""Does the planner put the ways to split attention in the order that a measurement on this machine does?

    python benchmarks/plan_vs_bench.py [--processes 2] [--output docs/benchmarks/plan_vs_bench.json] [--bench FILE] ...

Runs `hf-cp bench` on local processes (unknown options are passed on to it), or reads the `--output` of an earlier run;
prices the same cases with the planner, with the links and rates of that run; prints both times and orders. Two methods
count as equal where their measured medians are within 10 %, or their p10 to p90 overlap. Exit status 1 if another pair
is ordered otherwise, or if there is no such pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prices import TOLERANCE, Pair, Priced, compare, price_all

from hf_cp.output import OK, PROBLEM, Table, Verdict, print_json
from hf_cp.planning.devices import find_device

# of each kind some: Ulysses, a ring in three ways, layouts that balance and one that does not, few and many K/V heads,
# one document and many
DEFAULTS = ("--seq-lens", "2k", "--attention", "mha,mqa", "--layouts", "document,zigzag,contiguous", "--rounds", "7")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bench", type=Path, help="the --output of hf-cp bench, instead of a new run")
    parser.add_argument("--output", type=Path, help="write both orders as JSON")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.bench or run_bench(args.processes, options or DEFAULTS, Path(folder) / "bench.json")
        content = json.loads(path.read_text())
        # the table's entry only fills in what no attention call needs
        priced = price_all(content, find_device("h100", measured=path))
    pairs = compare(priced)
    for _, group in itertools.groupby(priced, lambda p: p.case.setting):
        order_table(list(group)).print()
        print()
    verdict = judge(pairs)
    verdict.print()
    if args.output is not None:
        print_json(as_json(content, priced, pairs, verdict), args.output)
    return verdict.status


def run_bench(processes: int, options: Sequence[str], path: Path) -> Path:
    """`hf-cp bench` on local processes, one thread each."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, "-m", "hf_cp", "bench", *options, "--output", str(path)]
    finished = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if finished.returncode:
        raise SystemExit(finished.returncode)
    return path


def order_table(group: list[Priced]) -> Table:
    """Methods of one setting as they were measured, the fastest first, and the planner's places."""
    places = {p: place for place, p in enumerate(sorted(group, key=lambda p: p.estimated), 1)}
    rows = [
        (p.case.method, f"{p.measured.median * 1e3:.2f}", f"{p.estimated * 1e3:.2f}", str(place), str(places[p]))
        for place, p in enumerate(sorted(group, key=lambda p: p.measured.median), 1)
    ]
    columns = ("method", "measured ms", "planned ms", "measured place", "planned place")
    return Table(str(group[0].case.setting), columns, rows)


def judge(pairs: Sequence[Pair]) -> Verdict:
    if not pairs:
        return Verdict(
            PROBLEM,
            f"nothing was compared: no two methods clearly differ by more than {TOLERANCE:.0%}. Repeat on a quiet "
            "machine, or measure other cases (--layouts document,contiguous).",
        )
    wrong = [pair for pair in pairs if not pair.agrees]
    counts = f"{len(pairs) - len(wrong)} of {len(pairs)} pairs that clearly differ by more than {TOLERANCE:.0%}"
    if not wrong:
        return Verdict(OK, f"{counts} are ordered as measured.")
    worst = max(wrong, key=lambda pair: pair.ratios[0])
    measured, planned = worst.ratios
    return Verdict(
        PROBLEM,
        f"{counts} are ordered as measured. Worst: {worst.slower.case.method} takes {measured:.2f} x the time of "
        f"{worst.faster.case.method}, planned {planned:.2f} ({worst.slower.case.setting}).",
    )


def as_json(content: dict[str, Any], priced: Sequence[Priced], pairs: Sequence[Pair], verdict: Verdict) -> dict:
    cases = [p.case.as_json() | {"measured": p.measured, "estimated": p.estimated} for p in priced]
    agreement = {"pairs": len(pairs), "agree": sum(pair.agrees for pair in pairs), "tolerance": TOLERANCE}
    return {name: content[name] for name in ("world", "device")} | {
        "verdict": str(verdict),
        "agreement": agreement,
        "cases": cases,
    }


if __name__ == "__main__":
    sys.exit(main())
