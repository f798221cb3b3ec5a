"""Training steps of SmolLM2-135M on two processes against one, on this machine, as ratios inside one run.

    python benchmarks/training.py [--cases full:2048:2 lora:8192:1] [--output docs/benchmarks/training]

A case is method:tokens:rounds. The model has the sizes of SmolLM2-135M and random weights; a row is one document; a
step is forward pass, backward pass, reduction of the gradients and AdamW, fp32. Every measurement has fresh processes
of one thread and warms up with a short row; in every round, one process and two follow each other. While one process
is measured, another one trains a shallower model on rows of the same length, so that the other core is as busy. Per
case, of two processes over one:

- time: seconds of the step (0.5 is ideal);
- kept: bytes that autograd keeps for the backward pass, without weights;
- peak: the most memory that a process ever held, weights and optimizer states included.

"One process" runs this package's loss and attention, so that the ratios show what splitting does, nothing else. The
peers cannot split SmolLM2's 9 and 3 heads, so they run on the same model with 8 and 4 heads and fewer layers; there,
"one process" is the untouched model. Their gradient error is that of the worst tensor of the first step, relative,
against the untouched model in fp64.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from fresh import busy_core, run_fresh
from measure import ratio
from training_step import Case, Measured, Sizes, busy_step, measured_step

from hf_cp.output import print_json

ONE, TWO = "one process", "ring 2"
CASES = ["full:2048:2", "lora:2048:2", "full:4096:1", "lora:4096:1", "lora:8192:1"]
PEER_RUNS = (
    "untouched model",
    "ring 2",
    "ulysses 2, ZeRO-2",
    "DeepSpeed Ulysses, ZeRO-2",
    "ring 2, FSDP2",
    "PyTorch context parallel, FSDP2",
)
BUSY_SHARE = 8  # the busy core's model has an eighth of the layers
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=case, nargs="*", default=[case(text) for text in CASES])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--peer-tokens", type=int, default=2048, help="0: no peers")
    parser.add_argument("--peer-layers", type=int, default=6)
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="write OUTPUT.json and OUTPUT.png")
    args = parser.parse_args()
    began = time.monotonic()
    tables = [measure_case(each, Sizes(args.layers), (ONE, TWO)) for each in args.cases]
    if args.cases:
        print(f"SmolLM2-135M, {args.layers} layers, fp32, AdamW; ring 2 over one process\n{case_table(tables)}")
    peers = None
    if args.peer_tokens:
        row = Case("full", args.peer_tokens, args.peer_rounds)
        peers = measure_case(row, Sizes(args.peer_layers, (8, 4)), PEER_RUNS, with_error=True)
        title = f"8 and 4 heads, {args.peer_layers} layers, all weights, {args.peer_tokens:,} tokens"
        print(f"\n{title}\n{peer_table(peers)}")
    print(f"\n{time.monotonic() - began:.0f} s in all")
    if args.output is not None:
        save(tables, peers, args)


def measure_case(case: Case, sizes: Sizes, names: tuple[str, ...], *, with_error: bool = False) -> dict[str, Any]:
    """Per run and round: seconds of the slowest process, bytes of the fullest, the worst gradient."""
    rounds: dict[str, list[Measured]] = {name: [] for name in names}
    for _ in range(case.rounds):
        for name in names:
            rounds[name].append(measure_run(name, case, sizes, with_error))
            print(f"  {case.method} {case.tokens:,} {name}: {rounds[name][-1].seconds:.2f} s", flush=True)
    return {
        "case": case._asdict(),
        "sizes": sizes._asdict(),
        "seconds": {name: [m.seconds for m in measured] for name, measured in rounds.items()},
        "kept": {name: measured[0].kept for name, measured in rounds.items()},
        "peak": {name: max(m.peak for m in measured) for name, measured in rounds.items()},
        "error": {name: measured[0].error for name, measured in rounds.items()},
        "norm": {name: measured[0].norm for name, measured in rounds.items()},
    }


def measure_run(name: str, case: Case, sizes: Sizes, with_error: bool) -> Measured:
    if name in (ONE, "untouched model"):
        small = sizes._replace(layers=max(1, sizes.layers // BUSY_SHARE))
        with busy_core(busy_step, name, case, small):
            return run_fresh(measured_step, name, case, sizes, with_error)[0]
    ranks = run_fresh(measured_step, name, case, sizes, with_error, world_size=2)
    return Measured.of_all(ranks)


def case(text: str) -> Case:
    """method:tokens:rounds, from the command line."""
    try:
        return Case.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not full:TOKENS:ROUNDS or lora:TOKENS:ROUNDS") from None


def case_table(tables: list[dict[str, Any]]) -> str:
    """Markdown, a case a line."""
    lines = ["| weights | tokens | one process | ring 2 | time | kept | peak |", "|---|---|---|---|---|---|---|"]
    for table in tables:
        seconds = (f"{np.median(table['seconds'][name]):.1f} s" for name in (ONE, TWO))
        kept, peak = (
            f"{table[kind][TWO] / table[kind][ONE]:.2f} ({table[kind][ONE] / GIB:.2f} GiB)"
            for kind in ("kept", "peak")
        )
        shown = share(table, TWO, ONE)
        method, tokens = table["case"]["method"], table["case"]["tokens"]
        lines.append(f"| {method} | {tokens:,} | {' | '.join(seconds)} | {shown} | {kept} | {peak} |")
    return "\n".join(lines)


def peer_table(table: dict[str, Any]) -> str:
    """Markdown, a way to train a line."""
    lines = ["| | time | worst gradient | norm of all gradients |", "|---|---|---|---|"]
    for name in PEER_RUNS:
        error, norm = table["error"][name], table["norm"][name]
        lines.append(f"| {name} | {share(table, name, PEER_RUNS[0])} | {error:.1e} | {norm:.6f} |")
    return "\n".join(lines)


def share(table: dict[str, Any], name: str, to: str) -> str:
    """Median of the rounds' ratios, with its interval where there is more than one."""
    median, low, high = ratio(table["seconds"], name, to)
    return f"{median:.3f}" + (f" [{low:.3f}, {high:.3f}]" if table["case"]["rounds"] > 1 else "")


def save(tables: list[dict[str, Any]], peers: dict[str, Any] | None, args: argparse.Namespace) -> None:
    args.output.parent.mkdir(parents=True, exist_ok=True)
    content = {"model": "SmolLM2-135M, random weights, fp32", "cases": tables, "peers": peers}
    print_json(content, args.output.with_suffix(".json"))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (cases, others) = plt.subplots(1, 2, figsize=(13, 0.5 * max(len(tables), len(PEER_RUNS)) + 1.5))
    draw_cases(cases, tables)
    if peers is not None:
        draw_shares(others, {name: ratio(peers["seconds"], name, PEER_RUNS[0]) for name in PEER_RUNS[1:]})
        others.set_title(f"8 and 4 heads, {args.peer_layers} layers, {args.peer_tokens:,} tokens")
        others.set_xlabel("seconds of a step, over the untouched model in one process")
    figure.tight_layout()
    figure.savefig(args.output.with_suffix(".png"), dpi=120)


def draw_cases(axes: Any, tables: list[dict[str, Any]]) -> None:
    """Time with its interval; bytes kept and peak memory beside it."""
    names = [f"{table['case']['method']}, {table['case']['tokens']:,} tokens" for table in tables]
    draw_shares(axes, {name: ratio(t["seconds"], TWO, ONE) for name, t in zip(names, tables, strict=True)}, "time")
    for kind, marker in (("kept", "s"), ("peak", "^")):
        values = [table[kind][TWO] / table[kind][ONE] for table in tables]
        axes.plot(
            values, range(len(tables)), marker, mfc="none", label={"kept": "bytes kept", "peak": "peak memory"}[kind]
        )
    axes.legend()
    axes.set_title("SmolLM2-135M")
    axes.set_xlabel("two processes (ring) over one")


def draw_shares(axes: Any, shares: dict[str, tuple[float, float, float]], label: str | None = None) -> None:
    for place, (median, low, high) in enumerate(shares.values()):
        errors = [[median - low], [high - median]]
        axes.errorbar(median, place, xerr=errors, fmt="o", color="C0", capsize=4, label=None if place else label)
    axes.axvline(0.5, linestyle="--", color="grey")
    axes.set_yticks(range(len(shares)), list(shares))


if __name__ == "__main__":
    main()
