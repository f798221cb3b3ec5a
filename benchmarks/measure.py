"""Times variants against each other on several local processes, as ratios inside one run.

In every round the variants run one after another, on all processes at the same time: each is measured with the other
cores equally loaded, and slow drifts of the machine cancel in the ratios.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Seconds = dict[str, list[float]]  # per variant, one number per round


def on_processes(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` on `world_size` new gloo processes of one thread each; returns rank 0's result."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    processes = [
        context.Process(target=_process, args=(rank, world_size, address, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("A process failed; its error is above.")
    return results.get()


def _process(rank: int, world_size: int, address: str, results, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    result = function(*args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def interleaved(variants: dict[str, Callable[[], None]], rounds: int) -> Seconds:
    """Seconds of the slowest process, for every variant in every round; a first round warms up and is dropped."""
    seconds: Seconds = {name: [] for name in variants}
    for round_number in range(rounds + 1):
        for name, run in variants.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if round_number:
                seconds[name].append(slowest.item())
    return seconds


def ratio(seconds: Seconds, name: str, to: str) -> tuple[float, float, float]:
    """(median, lower, upper) of the per-round ratios: 95 % bootstrap interval of the median."""
    ratios = np.array(seconds[name]) / np.array(seconds[to])
    draws = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)
