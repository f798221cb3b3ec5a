"""Attention on two processes against one, on this machine, as ratios inside one run.

    python benchmarks/attention.py [--tokens 8192 16384] [--pairs 9] [--output docs/benchmarks/attention]

One causal document, forward and backward, one thread per process. In every round the variants run one after another on
both processes at the same time, so that each is measured with the other core equally loaded and slow drifts of the
machine cancel in the ratios. Reported are medians of the per-round ratios with 95 % bootstrap intervals:

- overhead: time on two processes over that of the busiest rank's tiles alone (no communication, no merge), minus 1;
- share: time on two processes over one process's single kernel call on the whole row (0.5 is ideal).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_cp import ContextParallelConfig, ContextParallelMesh, SequenceLayout, context_parallel_attention
from hf_cp.attention.kernels import SdpaKernel
from hf_cp.sequence.plan import AttentionPlan, Tile

WORLD_SIZE = 2
VARIANTS = {"ring 2": ContextParallelConfig(ring_degree=2), "ulysses 2": ContextParallelConfig(ulysses_degree=2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9, help="rounds; each gives one ratio per variant")
    parser.add_argument("--output", type=Path, default=None, help="write OUTPUT.json and OUTPUT.png")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=measure, args=(rank, port, args, results)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("A process failed; its error is above.")
    report(results.get(), args)


def measure(rank: int, port: int, args: argparse.Namespace, results) -> None:
    """One process: all rounds of all sizes; rank 0 sends the times (the slower rank's) back."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    meshes = {name: ContextParallelMesh(config) for name, config in VARIANTS.items()}
    times: dict[str, dict[str, list[float]]] = {}
    for tokens in args.tokens:
        variants: dict[str, Callable[[], None]] = {"one process": whole_row(tokens, args)}
        for name, mesh in meshes.items():
            variants[name] = sharded_row(tokens, args, mesh)
            variants[f"{name}, tiles alone"] = tiles_alone(tokens, args, mesh)
        times[str(tokens)] = {name: [] for name in variants}
        for round_number in range(args.pairs + 1):
            for name, run in variants.items():
                seconds = slowest(run)
                if round_number:  # the first round warms up
                    times[str(tokens)][name].append(seconds)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def slowest(run: Callable[[], None]) -> float:
    """Seconds of the slower process; both start together."""
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def random_qkv(tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """q, k, v and grad_out, [tokens, heads, head_dim]."""
    return [torch.randn(tokens, h, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads, num_heads)]


def whole_row(tokens: int, args: argparse.Namespace) -> Callable[[], None]:
    """The best that one process can do: a single call of the flash kernel, forward and backward."""
    q, k, v, grad_out = random_qkv(tokens, args.num_heads, args.num_kv_heads, args.head_dim)
    kernel, settings = SdpaKernel(), {"tile": Tile(0, tokens, 0, tokens, None, 0), "scale": args.head_dim**-0.5}

    def run() -> None:
        out, lse = kernel.forward(q, k, v, **settings)
        kernel.backward(grad_out, q, k, v, out, lse, **settings)

    return run


def sharded_row(tokens: int, args: argparse.Namespace, mesh: ContextParallelMesh) -> Callable[[], None]:
    layout = SequenceLayout([tokens], mesh.config)
    *qkv, grad_out = random_qkv(layout.local_length, args.num_heads, args.num_kv_heads, args.head_dim)

    def run() -> None:
        q, k, v = (x.detach().requires_grad_() for x in qkv)
        context_parallel_attention(q, k, v, mesh=mesh, layout=layout).backward(grad_out)

    return run


def tiles_alone(tokens: int, args: argparse.Namespace, mesh: ContextParallelMesh) -> Callable[[], None]:
    """The same kernel calls as this rank's, on local data, without communication and without adding results up."""
    layout = SequenceLayout([tokens], mesh.config)
    plan, size, kernel = AttentionPlan(layout), mesh.ulysses_size, SdpaKernel()
    heads = (args.num_heads // size, args.num_kv_heads // size)
    q, k, v, grad_out = random_qkv(layout.ring_shard_length, *heads, args.head_dim)
    tiles = [t for step in range(mesh.ring_size) for t in plan.lower(mesh.ring_rank, step, bands=False)]
    scale = args.head_dim**-0.5

    def run() -> None:
        results = [kernel.forward(q[t.q_slots], k[t.k_slots], v[t.k_slots], tile=t, scale=scale) for t in tiles]
        for t, (out, lse) in zip(tiles, results, strict=True):
            rows = t.q_slots
            kernel.backward(grad_out[rows], q[rows], k[t.k_slots], v[t.k_slots], out, lse, tile=t, scale=scale)

    return run


def median_interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """(median, lower, upper): 95 % bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def report(times: dict, args: argparse.Namespace) -> None:
    print(f"{args.num_heads}:{args.num_kv_heads} heads of {args.head_dim}, fp32, forward + backward, one thread each")
    print(f"{'tokens':>7}  {'variant':<10} {'one [s]':>8} {'two [s]':>8}  {'share of one':<22} overhead over tiles")
    table = {}
    for tokens, by_variant in times.items():
        seconds = {name: np.array(values) for name, values in by_variant.items()}
        for name in VARIANTS:
            share = median_interval(seconds[name] / seconds["one process"])
            overhead = median_interval(seconds[name] / seconds[f"{name}, tiles alone"] - 1)
            table[f"{tokens}, {name}"] = {"share": share, "overhead": overhead}
            one, two = (np.median(seconds[key]) for key in ("one process", name))
            print(
                f"{tokens:>7}  {name:<10} {one:8.2f} {two:8.2f}  {share[0]:.3f} [{share[1]:.3f}, {share[2]:.3f}]   "
                f"{overhead[0]:+.1%} [{overhead[1]:+.1%}, {overhead[2]:+.1%}]"
            )
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        args.output.with_suffix(".json").write_text(
            json.dumps({"settings": settings, "seconds": times, "ratios": table}, indent=1) + "\n"
        )
        draw(table, args.output.with_suffix(".png"))


def draw(table: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.6 * len(table) + 1.2))
    for row, values in enumerate(table.values()):
        median, low, high = values["share"]
        axes.errorbar(median, row, xerr=[[median - low], [high - median]], fmt="o", capsize=4)
    axes.axvline(0.5, linestyle="--", color="grey", label="half of one process")
    axes.set_yticks(range(len(table)), list(table))
    axes.set_xlabel("time on two processes / one process (median, 95 % interval)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
