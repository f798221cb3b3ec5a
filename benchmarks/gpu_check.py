"""Checks every kernel and engine on one device, and times them: under three minutes on one GPU.

    python benchmarks/gpu_check.py [--device cuda] [--tokens 2048] [--time-tokens 32768] [--output gpu_check.json]

Ring ranks are threads of one process (loopback.py). Each case is compared with fp32 math on the whole row; allowed is
1.5 times the error of the same kernel on one rank. Then the whole row's time is compared with the sum of all ranks'
kernel calls: what cutting a row into tiles costs on this device. Exit status 1 if a case fails.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path

import torch
from loopback import attention

from hf_cp import ContextParallelConfig, SequenceLayout
from hf_cp.attention.kernels import (
    BackwardInputs,
    EagerKernel,
    Kernel,
    TensorKind,
    fast_kernels,
    kernel_calls,
)
from hf_cp.output import print_json
from hf_cp.sequence.plan import AttentionPlan

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 128
NAMES = ("out", "grad_q", "grad_k", "grad_v")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--time-tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {NUM_HEADS}:{NUM_KV_HEADS} heads of {HEAD_DIM}")
    checks = [check for kernel in kernels(device) for check in check_kernel(kernel, args.tokens, device)]
    times = [timing for kernel in kernels(device) for timing in time_kernel(kernel, args, device)]
    if args.output is not None:
        result = {"device": name, "torch": torch.__version__, "checks": checks, "times": times}
        print_json(result, args.output)
    failed = [check for check in checks if not check["ok"]]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed.")
    raise SystemExit(1 if failed else 0)


def kernels(device: torch.device) -> list[Kernel]:
    kind = TensorKind(device, torch.bfloat16, HEAD_DIM, HEAD_DIM)
    return [*(kernel() for kernel in fast_kernels(kind)), EagerKernel()]


def random_row(tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return tuple(torch.randn(tokens, h, HEAD_DIM, generator=generator).to(device, torch.bfloat16) for h in heads)


def check_kernel(kernel: Kernel, tokens: int, device: torch.device) -> list[dict]:
    """Every engine and layout on 1, 2, 3 and 4 ranks, with and without a window, against fp32 math."""
    row = random_row(tokens, device)
    lengths = [tokens // 2 + 1, 1, tokens // 4, tokens - tokens // 2 - tokens // 4 - 2]
    results = []
    for window in (None, 100):
        config = ContextParallelConfig(force=True, ring_comm="p2p")
        expected = attention(tuple(x.float() for x in row), lengths, config, EagerKernel(), window=window)
        single = errors(attention(row, lengths, config, kernel, window=window), expected)
        for layout, engine, size in product(
            ("document", "zigzag", "contiguous", "striped"), ("p2p", "exchange", "allgather"), (2, 3, 4)
        ):
            config = ContextParallelConfig(ring_degree=size, layout=layout, ring_comm=engine)
            found = errors(attention(row, lengths, config, kernel, window=window), expected)
            ratios = {name: found[name] / max(single[name], 1e-6) for name in NAMES}
            case = f"{kernel.name} {layout} {engine} ring {size} window {window}"
            results.append({"case": case, "ok": max(ratios.values()) <= 1.5, "error": found, "over_one_rank": ratios})
            if not results[-1]["ok"]:
                print(f"  FAIL {case}: {ratios}")
    worst = max(max(r["over_one_rank"].values()) for r in results)
    print(f"  {kernel.name}: {len(results)} cases, largest error {worst:.2f} times that of one rank")
    return results


def errors(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """Root mean square of the difference over that of the expected values."""
    return {
        name: float((a.float() - e.float()).norm() / e.float().norm())
        for name, a, e in zip(NAMES, actual, expected, strict=True)
    }


def time_kernel(kernel: Kernel, args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Seconds of the kernel calls of all ranks together, over those of one rank, forward + backward."""
    if kernel.name == "eager":  # holds all scores of a tile
        return []
    row, results = random_row(args.time_tokens, device), []
    whole = None
    for size, layout in ((1, "zigzag"), (4, "zigzag"), (8, "zigzag"), (8, "striped")):
        config = ContextParallelConfig(ring_degree=size, layout=layout, force=True)
        plan = AttentionPlan(SequenceLayout([args.time_tokens], config))
        seconds = 0.0
        for rank in range(size):
            tiles = [tile for source in range(size) for tile in plan.tiles(rank, source)]
            seconds += time_calls(kernel, tiles, row, args.repeats, device)
        whole = whole or seconds
        results.append(
            {"kernel": kernel.name, "ring": size, "layout": layout, "seconds": seconds, "over_one": seconds / whole}
        )
        print(
            f"  {kernel.name} {args.time_tokens:,} tokens, {layout} ring {size}: {1e3 * seconds:.1f} ms, "
            f"{seconds / whole:.3f} of one rank"
        )
    return results


def time_calls(
    kernel: Kernel, tiles: list, row: tuple[torch.Tensor, ...], repeats: int, device: torch.device
) -> float:
    """Median seconds of the calls that `tiles` need, forward and backward."""
    q, k, v, grad_out = row
    groups, scale = kernel_calls(tiles, kernel, device), HEAD_DIM**-0.5

    def run() -> None:
        results = [kernel.forward(q[g.q_index], k[g.k_index], v[g.k_index], group=g, scale=scale) for g in groups]
        for group, (out, lse) in zip(groups, results, strict=True):
            tensors = (grad_out[group.q_index], q[group.q_index], k[group.k_index], v[group.k_index])
            kernel.backward(BackwardInputs(*tensors, out, lse), group=group, scale=scale)

    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[repeats // 2]


if __name__ == "__main__":
    main()
