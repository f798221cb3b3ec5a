"""What two_hosts.py starts on its hosts: `two_hosts_rank.py SETTINGS RESULT`, with RANK and the others as for gloo.

Ranks 0 and 1 are on the first host. Rank 0 writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from attention import kernel_run, sharded

from hf_cp import ContextParallelConfig, ContextParallelMesh
from hf_cp.distributed.collectives import start_hop
from hf_cp.distributed.communicator import Communicator
from hf_cp.planning.devices import GIGA, TERA, Cluster, Device
from hf_cp.planning.memory import Training
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.step_time import SampleCost
from hf_cp.sequence.costs import AttentionShape, attention_flops
from hf_cp.sequence.tiles import Tile
from hf_cp.tools.bench.calibration import hidden_share
from hf_cp.tools.bench.fits import Point, fit, fit_kernel

PER_HOST = 2
WARM_UP_TOKENS = 256
MESSAGES = (2**12, 2**21, 2**22)  # bytes; between them lies what tc lets pass at once
REPEATS = 5
SWAPPED = [[[0, 2], [1, 3]]]  # [dp, ring, ulysses]: the ranks of a Ulysses group are on different hosts


class Split(NamedTuple):
    """One way to share a row; `is_swapped` puts Ulysses across the hosts and the ring inside."""

    config: ContextParallelConfig
    is_swapped: bool = False

    @property
    def ranks(self) -> list | None:
        return SWAPPED if self.is_swapped else None


SPLITS = {
    "ring 2 across, Ulysses 2 inside, p2p": Split(ContextParallelConfig(2, 2, "p2p")),
    "ring 2 across, Ulysses 2 inside, exchange": Split(ContextParallelConfig(2, 2, "exchange")),
    "Ulysses 2 across, ring 2 inside, p2p": Split(ContextParallelConfig(2, 2, "p2p"), is_swapped=True),
    "ring 4, p2p": Split(ContextParallelConfig(4, 1, "p2p")),
    "ring 4, exchange": Split(ContextParallelConfig(4, 1, "exchange")),
    "Ulysses 4": Split(ContextParallelConfig(1, 4)),
}


@cache
def comm_of(split: Split) -> Communicator:
    return Communicator(ContextParallelMesh(split.config, "cpu", ranks=split.ranks))


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    shapes = [shape_of(heads, settings["head_dim"]) for heads in settings["heads"]]
    device = measured_device(settings["tokens"], shapes[0])
    rows = [row for shape in shapes for row in measure(shape, settings, device)]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"device": asdict(device), "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def shape_of(heads: str, head_dim: int) -> Namespace:
    """As the attention benchmark takes it, from "query/KV"."""
    num_heads, num_kv_heads = map(int, heads.split("/"))
    return Namespace(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, name=heads)


def measure(shape: Namespace, settings: dict[str, Any], device: Device) -> list[dict[str, Any]]:
    """Every split in every round, after one run each on a short row."""
    tokens = settings["tokens"]
    runs = {name: sharded([tokens], split.config, comm_of(split), shape) for name, split in SPLITS.items()}
    for split in SPLITS.values():
        sharded([WARM_UP_TOKENS], split.config, comm_of(split), shape)()
    times: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for _ in range(settings["rounds"]):
        for name, run in runs.items():
            times[name].append(timed(run))
    return [
        {
            "heads": shape.name,
            "split": name,
            "seconds": [seconds for seconds, _ in measured],
            "link_bytes": int(np.median([sent for _, sent in measured])),
            "estimate": estimate(SPLITS[name], tokens, shape, device),
        }
        for name, measured in times.items()
    ]


def timed(run: Callable[[], None]) -> tuple[float, int]:
    """(seconds of the slowest process, bytes that both ends of the cable sent meanwhile)."""
    dist.barrier()
    before, began = sent_bytes(), time.perf_counter()
    run()
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    sent = torch.tensor(sent_bytes() - before if dist.get_rank() % PER_HOST == 0 else 0)
    dist.all_reduce(sent)
    return slowest.item(), int(sent)


def sent_bytes() -> int:
    """What this host has put on the cable so far, with the headers of its packets."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def measured_device(tokens: int, shape: Namespace) -> Device:
    """The planner's inputs: all processes compute, or send, at the same time."""
    across = comm_of(SPLITS["ring 2 across, Ulysses 2 inside, p2p"])
    inside = comm_of(SPLITS["Ulysses 2 across, ring 2 inside, p2p"])
    inter, intra = link(across), link(inside)
    speed = fit_kernel([kernel_rate(n, shape) for n in (tokens // 2, tokens // 8)])
    kernel = causal_calls(tokens // 2, shape)
    inter_overlap, intra_overlap = (
        hidden_share(kernel, int(min(bandwidth * usual(kernel) / 2, MESSAGES[-1])), comm, rounds=REPEATS)
        for comm, (bandwidth, _) in ((across, inter), (inside, intra))
    )
    return Device(
        name="two hosts",
        memory_gib=1.0,
        peak_tflops=1.0,
        matmul_tflops=1.0,
        attention_tflops=speed.tflops,
        intra_gbs=intra[0] / GIGA,
        inter_gbs=inter[0] / GIGA,
        intra_latency=intra[1],
        inter_latency=inter[1],
        intra_overlap=intra_overlap,
        inter_overlap=inter_overlap,
        half_efficiency_tokens=speed.half_efficiency_tokens,
        is_measured=True,
    )


def link(comm: Communicator) -> tuple[float, float]:
    """(bytes per second, latency) of a hop in both directions at once, fitted as `hf-cp bench` does."""
    latency, rate, _ = fit([Point(1, num_bytes, usual(hop(num_bytes, comm))) for num_bytes in MESSAGES])
    return rate, latency


def hop(num_bytes: int, comm: Communicator) -> Callable[[], None]:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda: start_hop(tensor, comm, received_length=num_bytes).wait()


def kernel_rate(tokens: int, shape: Namespace) -> tuple[float, float]:
    """(b, TFLOP/s): of the kernel on a causal document, as a block of b x b scores."""
    area = tokens * (tokens + 1) // 2
    calls = causal_calls(tokens, shape)
    operations = sum(attention_flops(AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim), area))
    return area**0.5, operations / usual(calls) / TERA


def causal_calls(tokens: int, shape: Namespace) -> Callable[[], None]:
    """The kernel on one document, forward and backward."""
    return kernel_run([Tile(0, tokens, 0, tokens, None, 0)], tokens, 1, shape)


def usual(run: Callable[[], None]) -> float:
    run()  # the cable's first bytes are not limited
    return float(np.median([timed(run)[0] for _ in range(REPEATS)]))


def estimate(split: Split, tokens: int, shape: Namespace, device: Device) -> float:
    """Seconds of one attention layer, as `hf-cp plan` prices it."""
    if split.is_swapped:  # the planner puts Ulysses inside a node, so the two links change places
        device = Device(
            **asdict(device)
            | {
                "intra_gbs": device.inter_gbs,
                "inter_gbs": device.intra_gbs,
                "intra_latency": device.inter_latency,
                "inter_latency": device.intra_latency,
                "intra_overlap": device.inter_overlap,
                "inter_overlap": device.intra_overlap,
            }
        )
    cluster = Cluster(device, num_gpus=dist.get_world_size(), gpus_per_node=PER_HOST)
    cost = SampleCost.of((tokens,), split.config, model_shape(shape), Training(itemsize=4), cluster)
    return cost.layers().total.seconds


def model_shape(shape: Namespace) -> ModelShape:
    """A model of one attention layer and nothing else."""
    return ModelShape(
        name="attention",
        num_layers=1,
        hidden_size=shape.num_heads * shape.head_dim,
        intermediate_size=0,
        vocab_size=0,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_parameters=0,
        layer_parameters=0,
        linear_parameters=0,
        num_adapted=0,
        num_linear=0,
        has_qk_norm=False,
        windows=((None, 1),),
    )


if __name__ == "__main__":
    main()
