"""Four processes on two hosts with a slow cable between them: which split is fastest, and does the planner know?

    python benchmarks/two_hosts.py [--rates 50mbit 200mbit 1000mbit] [--output docs/benchmarks/two_hosts]

The hosts are network namespaces of this machine (Linux, root); tc limits their cable. One causal document, attention
alone, forward and backward, fp32, one thread per process. Per rate, heads and split: seconds of the slowest process
(median of the rounds), bytes that both ends of the cable sent, and the planner's estimate. The planner is given what
was measured just before: the kernel with all processes busy, a hop between processes of one host, and a hop between
the hosts, with both processes of a host sending. It gives every process its own way out, as clusters do; here two
share a cable, so it is pessimistic where only one of them uses it (ring 4).

Four processes need four cores to compute at their speed; with fewer, all splits pay the same price.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for the hosts, which belong to the tests

from hf_cp.output import print_json  # noqa: E402
from tests.multihost.hosts import Hosts, missing, two_hosts  # noqa: E402

RANK_SCRIPT = Path(__file__).with_name("two_hosts_rank.py")
PORT = "29500"  # free for certain: the hosts have just been made
PER_HOST = 2
LIMIT_SECONDS = 900
NOT_POSSIBLE = 2
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1000mbit"], help="in the words of tc")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", nargs="+", default=["8/8", "8/2"], help="query/KV heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="write OUTPUT.json and OUTPUT.png")
    args = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"Two hosts cannot be made here: {reason}.", file=sys.stderr)
        return NOT_POSSIBLE
    results = {}
    with two_hosts() as hosts:
        for rate in args.rates:
            hosts.limit(rate)
            results[rate] = on_hosts(hosts, args)
            rows = results[rate]["rows"]
            print(f"\n{rate}: {describe(results[rate])}\n{table(rows)}")
            prices = (f"{price:.2f} ({heads})" for heads, price in price_of_choice(rows).items())
            print(
                f"The planner's first choice takes so many times as long as the fastest: {', '.join(prices)}",
                flush=True,
            )
    if args.output is not None:
        save(results, args)
    return 0


def on_hosts(hosts: Hosts, args: argparse.Namespace) -> dict[str, Any]:
    """What two_hosts_rank.py measures on four new processes, two on each host."""
    settings = json.dumps({name: getattr(args, name) for name in ("tokens", "heads", "head_dim", "rounds")})
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "WORLD_SIZE": str(2 * PER_HOST)}
    environment = os.environ | meeting | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(RANK_SCRIPT), settings, str(result)]
        processes = [
            hosts.start(rank // PER_HOST, command, environment=environment | {"RANK": str(rank)})
            for rank in range(2 * PER_HOST)
        ]
        wait_for(processes)
        return json.loads(result.read_text())


def wait_for(processes: list[subprocess.Popen]) -> None:
    """All of them; one that fails ends the benchmark, and leaving `two_hosts` ends the others."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    statuses = [process.poll() for process in processes]
    if any(status != 0 for status in statuses):
        raise SystemExit(
            f"The benchmark's processes did not end well within {LIMIT_SECONDS} s: statuses {statuses} (None: still "
            "running). An error of a process is above."
        )


def describe(result: dict[str, Any]) -> str:
    """What the planner was told."""
    device = result["device"]
    return (
        f"a process sends {device['intra_gbs'] * 1e3:.0f} MB/s inside a host ({device['intra_overlap']:.0%} "
        f"of it hidden behind arithmetic), {device['inter_gbs'] * 1e3:.1f} MB/s between them "
        f"({device['inter_overlap']:.0%} hidden), and computes attention at "
        f"{device['attention_tflops'] * 1e3:.0f} GFLOP/s"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, the fastest first within its heads."""
    lines = [
        "| heads | split | seconds | MiB over the cable | planner: seconds | place |",
        "|---|---|---|---|---|---|",
    ]
    for heads in dict.fromkeys(row["heads"] for row in rows):
        some = sorted((row for row in rows if row["heads"] == heads), key=seconds)
        planned = sorted(some, key=lambda row: row["estimate"])
        for row in some:
            lines.append(
                f"| {heads} | {row['split']} | {seconds(row):.2f} | {row['link_bytes'] / MIB:.1f} | "
                f"{row['estimate']:.2f} | {planned.index(row) + 1} |"
            )
    return "\n".join(lines)


def price_of_choice(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Per heads, seconds of the split that the planner puts first over those of the fastest."""
    prices = {}
    for heads in dict.fromkeys(row["heads"] for row in rows):
        some = [row for row in rows if row["heads"] == heads]
        prices[heads] = seconds(min(some, key=lambda row: row["estimate"])) / min(map(seconds, some))
    return prices


def seconds(row: dict[str, Any]) -> float:
    return float(np.median(row["seconds"]))


def save(results: dict[str, Any], args: argparse.Namespace) -> None:
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    print_json({"settings": settings, "rates": results}, args.output.with_suffix(".json"))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(args.heads), len(args.rates), figsize=(5 * len(args.rates), 3.2 * len(args.heads)))
    for line, heads in zip(np.reshape(axes, (len(args.heads), -1)), args.heads, strict=True):
        for column, (rate, result) in enumerate(results.items()):
            draw(line[column], [row for row in result["rows"] if row["heads"] == heads], with_names=column == 0)
            line[column].set_title(f"{heads} heads, {rate}")
    figure.tight_layout()
    figure.savefig(args.output.with_suffix(".png"), dpi=120)


def draw(axes: Any, rows: list[dict[str, Any]], *, with_names: bool) -> None:
    """Measured seconds as bars, the planner's as marks."""
    places = range(len(rows))
    axes.barh(places, [seconds(row) for row in rows], color="C0", alpha=0.6, label="measured")
    axes.plot([row["estimate"] for row in rows], places, "k|", markersize=14, label="planner")
    axes.set_yticks(places, [row["split"] if with_names else "" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds, forward + backward")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
