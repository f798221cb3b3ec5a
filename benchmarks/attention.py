"""Attention on two processes against one and against two peers, on this machine, as ratios inside one run.

    python benchmarks/attention.py [--tokens 8192 16384] [--rounds 9] [--packed] [--output docs/benchmarks/attention]

One causal document, fp32, forward and backward, one thread per process. Reported per variant, as medians with 95 %
bootstrap intervals:

- share: its time over that of one process's single kernel call on the whole row (0.5 is ideal);
- overhead: its time over that of the busiest rank's kernel calls alone (no communication, nothing added up), minus 1;
- peers: the best variant of this package over each peer.

With `--packed`, rows of many documents instead: the `document` layout with `exchange` against zigzag with a ring and
against contiguous slices with an all-gather, and the bytes that each of them sends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from measure import Seconds, interleaved, on_processes, ratio

from hf_cp import ContextParallelConfig, ContextParallelMesh, SequenceLayout
from hf_cp.attention.kernels import BackwardInputs, CpuFlashKernel, kernel_calls
from hf_cp.attention.usp import usp_attention
from hf_cp.distributed.communicator import Communicator
from hf_cp.output import print_json
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.sample import PackedSample
from hf_cp.sequence.tiles import Tile

WORLD_SIZE = 2
VARIANTS = {
    "ring 2, p2p": ContextParallelConfig(ring_degree=2, ring_comm="p2p"),
    "ring 2, exchange": ContextParallelConfig(ring_degree=2, ring_comm="exchange"),
    "ring 2, allgather": ContextParallelConfig(ring_degree=2, ring_comm="allgather"),
    "ulysses 2": ContextParallelConfig(ulysses_degree=2),
}
PACKED = {
    "document, exchange": ContextParallelConfig(ring_degree=2, layout="document", ring_comm="exchange"),
    "zigzag, p2p": ContextParallelConfig(ring_degree=2, layout="zigzag", ring_comm="p2p"),
    "contiguous, allgather": ContextParallelConfig(ring_degree=2, layout="contiguous", ring_comm="allgather"),
}
PEERS = ("torch ring", "hand-written ulysses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--output", type=Path, default=None, help="write OUTPUT.json and OUTPUT.png")
    args = parser.parse_args()
    heads = f"{args.num_heads}:{args.num_kv_heads} heads of {args.head_dim}, fp32, forward + backward, one thread each"
    print(heads)
    tables = {}
    for case in packed_rows(args) if args.packed else {f"{n:,} tokens": [n] for n in args.tokens}.items():
        name, doc_lengths = case
        measure = measure_packed if args.packed else measure_one_document
        tables[name] = (report_packed if args.packed else report)(
            name, *on_processes(WORLD_SIZE, measure, doc_lengths, args)
        )
    if args.output is not None:
        save(tables, heads, args)


def packed_rows(args: argparse.Namespace):
    """Two rows of the first size: many short documents, and log-normal lengths."""
    total, random = args.tokens[0], np.random.default_rng(0)
    for name, draw in (("short", random.integers(100, 600, total)), ("log-normal", random.lognormal(6.5, 1.0, total))):
        ends = np.minimum(np.cumsum(np.maximum(draw.astype(int), 1)), total)
        yield f"{name}, {total:,} tokens", [int(n) for n in np.diff(ends, prepend=0) if n > 0]


def random_tensors(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """q, k, v and grad_out, [tokens, heads, head_dim]."""
    return [torch.randn(num_tokens, h, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads, num_heads)]


def measure_one_document(doc_lengths: list[int], args: argparse.Namespace) -> tuple[Seconds, dict]:
    (tokens,) = doc_lengths
    variants = {"one process": kernel_run([Tile(0, tokens, 0, tokens, None, 0)], tokens, 1, args)}
    for name, config in VARIANTS.items():
        comm = Communicator(ContextParallelMesh(config))
        variants[name] = sharded(doc_lengths, config, comm, args)
        variants[f"{name}, calls alone"] = calls_alone(doc_lengths, config, comm.mesh, args)
    variants |= peers(tokens, args)
    return interleaved(variants, args.rounds), {}


def measure_packed(doc_lengths: list[int], args: argparse.Namespace) -> tuple[Seconds, dict]:
    variants, sent = {}, {}
    for name, config in PACKED.items():
        comm = Communicator(ContextParallelMesh(config))
        variants[name] = sharded(doc_lengths, config, comm, args)
        variants[name]()
        bytes_sent = torch.tensor(comm.ring_bytes)
        dist.all_reduce(bytes_sent)
        sent[name] = int(bytes_sent)
    return interleaved(variants, args.rounds), sent


def sharded(
    doc_lengths: list[int], config: ContextParallelConfig, comm: Communicator, args: argparse.Namespace
) -> Callable[[], None]:
    sample = PackedSample(SequenceLayout(doc_lengths, config))
    *qkv, grad_out = random_tensors(sample.layout.local_length, args.num_heads, args.num_kv_heads, args.head_dim)

    def run() -> None:
        q, k, v = (x.detach().requires_grad_() for x in qkv)
        usp_attention(q, k, v, sample=sample, comm=comm, config=config).backward(grad_out)

    return run


def calls_alone(
    doc_lengths: list[int], config: ContextParallelConfig, mesh: ContextParallelMesh, args: argparse.Namespace
) -> Callable[[], None]:
    """This rank's own kernel calls, on local data."""
    layout, rank = SequenceLayout(doc_lengths, config), mesh.ring_rank
    plan = AttentionPlan(layout)
    tiles = [tile for source in range(mesh.ring_size) for tile in plan.tiles(rank, source)]
    return kernel_run(tiles, layout.ring_shard_length, mesh.ulysses_size, args)


def kernel_run(tiles: list[Tile], num_queries: int, ulysses: int, args: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of the calls that `tiles` need, nothing else."""
    num_tokens = max(num_queries, *(tile.k_slots.stop for tile in tiles))
    heads = (args.num_heads // ulysses, args.num_kv_heads // ulysses)
    q, k, v, grad_out = random_tensors(num_tokens, *heads, args.head_dim)
    kernel, scale = CpuFlashKernel(), args.head_dim**-0.5
    groups = kernel_calls(tiles, kernel, q.device)

    def run() -> None:
        results = [kernel.forward(q[g.q_index], k[g.k_index], v[g.k_index], group=g, scale=scale) for g in groups]
        for group, (out, lse) in zip(groups, results, strict=True):
            tensors = (grad_out[group.q_index], q[group.q_index], k[group.k_index], v[group.k_index])
            kernel.backward(BackwardInputs(*tensors, out, lse), group=group, scale=scale)

    return run


def peers(tokens: int, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    from peers import TorchRing, hand_written_ulysses

    *qkv, grad_out = random_tensors(tokens // WORLD_SIZE, args.num_heads, args.num_kv_heads, args.head_dim)
    head_major = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in qkv]
    grad_head_major = grad_out.transpose(0, 1).unsqueeze(0).contiguous()

    def torch_ring() -> None:
        q, k, v = (x.detach().requires_grad_() for x in head_major)
        TorchRing.apply(q, k, v, dist.group.WORLD).backward(grad_head_major)

    def ulysses() -> None:
        q, k, v = (x.detach().requires_grad_() for x in qkv)
        hand_written_ulysses(q, k, v, dist.group.WORLD).backward(grad_out)

    runs = {"torch ring": torch_ring}
    return runs if args.num_kv_heads % WORLD_SIZE else runs | {"hand-written ulysses": ulysses}


def show(values: tuple[float, float, float], percent: bool = False) -> str:
    median, low, high = values
    if percent:
        return f"{median - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}]"
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def report(name: str, seconds: Seconds, _: dict) -> dict:
    print(f"\n{name}: one process {np.median(seconds['one process']):.2f} s")
    table = {}
    for variant in (*VARIANTS, *(p for p in PEERS if p in seconds)):
        table[variant] = {"share": ratio(seconds, variant, "one process")}
        line = f"  {variant:<22} share of one {show(table[variant]['share'])}"
        if variant in VARIANTS:
            table[variant]["overhead"] = ratio(seconds, variant, f"{variant}, calls alone")
            line += f"   overhead {show(table[variant]['overhead'], percent=True)}"
        print(line)
    pairs = {"torch ring": "ring 2, p2p", "hand-written ulysses": "ulysses 2"}
    for peer, own in pairs.items():
        if peer in seconds:
            table[f"{own} / {peer}"] = {"ratio": ratio(seconds, own, peer)}
            print(f"  {own} over {peer}: {show(table[f'{own} / {peer}']['ratio'])}")
    return {"seconds": seconds, "ratios": table}


def report_packed(name: str, seconds: Seconds, sent: dict) -> dict:
    print(f"\n{name}")
    first = next(iter(PACKED))
    table = {variant: {"ratio": ratio(seconds, first, variant), "MiB": sent[variant] / 2**20} for variant in PACKED}
    for variant, values in table.items():
        print(
            f"  {variant:<22} {np.median(seconds[variant]):.3f} s, {values['MiB']:7.2f} MiB sent by all ranks; "
            f"{first} takes {show(values['ratio'])} of its time"
        )
    return {"seconds": seconds, "ratios": table}


def save(tables: dict, heads: str, args: argparse.Namespace) -> None:
    args.output.parent.mkdir(parents=True, exist_ok=True)
    print_json({"settings": heads, "rows": tables}, args.output.with_suffix(".json"))
    if args.packed:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shares = {
        f"{variant}, {row}": values["share"]
        for row, table in tables.items()
        for variant, values in table["ratios"].items()
        if "share" in values
    }
    figure, (axes, growth) = plt.subplots(1, 2, figsize=(13, 0.3 * len(shares) + 1.5), width_ratios=(3, 2))
    for place, (median, low, high) in enumerate(shares.values()):
        axes.errorbar(median, place, xerr=[[median - low], [high - median]], fmt="o", capsize=4)
    axes.axvline(0.5, linestyle="--", color="grey", label="half of one process")
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_xlabel("time on two processes / one process (median, 95 % interval)")
    axes.legend()
    draw_growth(growth, args.tokens, list(tables.values()))
    figure.tight_layout()
    figure.savefig(args.output.with_suffix(".png"), dpi=120)


def draw_growth(axes, tokens: list[int], tables: list[dict]) -> None:
    """Median seconds over the row's length, with the quadratic bound through one process's longest row."""
    for name in ("one process", *VARIANTS):
        axes.loglog(tokens, [np.median(table["seconds"][name]) for table in tables], marker="o", label=name)
    longest = np.median(tables[-1]["seconds"]["one process"])
    axes.loglog(tokens, [longest * (n / tokens[-1]) ** 2 for n in tokens], "--", color="grey", label="quadratic")
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens of the row")
    axes.set_ylabel("seconds, forward + backward")
    axes.legend()


if __name__ == "__main__":
    main()
