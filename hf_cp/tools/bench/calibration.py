"""What `hf-cp plan` assumes about a machine, measured: links, the attention kernel, matrix products.

A link is fitted as seconds = messages x latency + bytes / bandwidth over messages of several sizes; every point's
relative error weighs the same. Groups inside a node and groups over nodes are different links, and so are hops of a
ring and trades of tokens for heads, which pack and unpack what they send. Invariant: what was not measured is not
reported; the planner keeps its own value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_cp.attention.ulysses import attend_by_heads
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.collectives import start_hop
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.planning.step_time import GIGA, TERA
from hf_cp.sequence.costs import AttentionShape, attention_flops, ulysses_bytes
from hf_cp.tools.bench.cases import Case, Setting
from hf_cp.tools.bench.measure import NOISE, Meshes, Run, Spread, Subject, measure, timed

__all__ = ["Calibration", "Link", "calibrate", "fit", "fit_kernel", "hidden_share"]


class Sizes(NamedTuple):
    """How much is measured: bytes of messages, side of the matrices, rounds."""

    messages: tuple[int, ...]
    matrix: int
    rounds: int


SIZES = {
    "cpu": Sizes((2**12, 2**16, 2**20, 2**22, 2**24), 1024, 9),
    "cuda": Sizes((2**12, 2**16, 2**20, 2**24, 2**26, 2**28), 8192, 15),
    "quick": Sizes((2**12, 2**18, 2**20), 256, 2),
}


class Point(NamedTuple):
    """Seconds (median of the slowest rank) to send `num_bytes` in all, in `messages` messages."""

    messages: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Link:
    """A process's way out to the others of its group.

    Attributes:
        kind (`str`): "hop" (send and receive around the ring) or "trade" (of tokens for heads: Ulysses).
        ranks (`int`): size of the group.
        in_node (`bool`): whether all its ranks are on one node.
        points (`list[Point]`): what was measured.
        latency (`float`): seconds of a message without content.
        bytes_per_second (`float`): of long messages.
        residual (`float`): root mean square of the fit's relative errors.
        overlap (`float`, *optional*): share of a hop's time that the attention kernel beside it hides.
    """

    kind: str
    ranks: int
    in_node: bool
    points: list[Point]
    latency: float
    bytes_per_second: float
    residual: float
    overlap: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Links, rates, and the fields of [`hf_cp.planning.devices.Device`] that follow from them."""

    links: list[Link]
    attention: Spread
    attention_tflops: float
    matmul: Spread
    matmul_tflops: float
    device: dict[str, Any]

    @property
    def is_noisy(self) -> bool:
        """Whether a rate varies, or a link is off its line, by more than a case may."""
        return max(self.attention.width, self.matmul.width, *(link.residual for link in self.links)) > NOISE


def calibrate(
    setting: Setting, meshes: Meshes, base: ContextParallelConfig, *, per_node: int, quick: bool
) -> Calibration:
    """Measures this machine; all ranks must call it.

    Args:
        setting (`Setting`): heads, dtype and length of the document on which the kernel is timed.
        meshes (`Meshes`): made so far.
        base (`ContextParallelConfig`): names the kernel.
        per_node (`int`): consecutive ranks on a node.
        quick (`bool`): few and small messages.
    """
    sizes = SIZES["quick" if quick else meshes.device_type]
    alone = _with_degrees(base, 1, 1)
    long, short = (_attention(part, alone, meshes, sizes) for part in (setting, _shortened(setting)))
    kernel = fit_kernel([_rate(setting, long), _rate(_shortened(setting), short)])
    matmul = _matmul(setting.torch_dtype, meshes.of(alone), sizes)
    links: list[Link] = []
    for span in _spans(meshes.of(alone).world_size, per_node):
        hop, trade = (_link(kind, span, span <= per_node, meshes, sizes, base) for kind in ("hop", "trade"))
        links += [_with_overlap(hop, _shortened(setting), short.median, meshes, sizes, base), trade]
    matmul_tflops = 2.0 * sizes.matrix**3 / matmul.median / TERA
    device = _device(links, kernel, matmul_tflops, meshes.device_type)
    return Calibration(links, long, kernel.tflops, matmul, matmul_tflops, device)


class Kernel(NamedTuple):
    """An attention kernel's speed: on blocks of b tokens it reaches b / (b + half_efficiency_tokens) of `tflops`."""

    tflops: float
    half_efficiency_tokens: float


def fit_kernel(rates: Sequence[tuple[float, float]]) -> Kernel:
    """The kernel through two points (block in tokens, TFLOP/s).

    1 / rate = 1 / tflops + (half_efficiency_tokens / tflops) / block is a line in 1 / block. If the shorter block is
    not slower, blocks do not matter.

    >>> fit_kernel([(1000.0, 10.0), (250.0, 5.0)])
    Kernel(tflops=15.0, half_efficiency_tokens=500.0)
    """
    (block, rate), (short_block, short_rate) = rates
    slope = (1 / short_rate - 1 / rate) / (1 / short_block - 1 / block)
    if slope <= 0:
        return Kernel(rate, 0.0)
    start = 1 / rate - slope / block
    # noise may put the line's start below zero: then no long block is far from the end of the line
    start = max(start, 0.5 / rate)
    return Kernel(round(1 / start, 9), round(slope / start, 9))


def fit(points: Sequence[Point]) -> tuple[float, float, float]:
    """(latency, bytes per second, residual) of seconds = messages x latency + bytes / bandwidth.

    Least squares of relative errors. Neither may be negative: where the free optimum is, the best latency is 0.

    >>> latency, rate, residual = fit([Point(1, n, 1e-5 + n / 2e9) for n in (1000, 10**6, 10**8)])
    >>> f"{latency:.1e} s, {rate / 1e9:.2f} GB/s, error {residual:.1%}"
    '1.0e-05 s, 2.00 GB/s, error 0.0%'
    """
    seconds = np.array([point.seconds for point in points])
    counts = np.array([(point.messages, point.num_bytes) for point in points]) / seconds[:, None]
    scale = counts.max(axis=0)  # latency and seconds per byte are many powers of ten apart
    latency, per_byte = np.linalg.lstsq(counts / scale, np.ones(len(points)), rcond=None)[0] / scale
    if latency < 0 or per_byte <= 0:
        bytes_only = counts[:, 1]
        latency, per_byte = 0.0, bytes_only.sum() / (bytes_only @ bytes_only)
    residual = float(np.sqrt(np.mean((counts @ (latency, per_byte) - 1) ** 2)))
    return float(latency), float(1 / per_byte), residual


def _spans(world_size: int, per_node: int) -> Iterator[int]:
    """Sizes of groups of consecutive ranks: a whole node, and the whole world where it has more than one."""
    yield from sorted({span for span in (per_node, world_size) if span > 1})


def _with_degrees(base: ContextParallelConfig, ring: int, ulysses: int) -> ContextParallelConfig:
    return replace(base, ring_degree=ring, ulysses_degree=ulysses, head_chunks=1, force=True)


def _link(kind: str, span: int, in_node: bool, meshes: Meshes, sizes: Sizes, base: ContextParallelConfig) -> Link:
    mesh = meshes.of(_with_degrees(base, *((span, 1) if kind == "hop" else (1, span))))
    make = _hop if kind == "hop" else _trade
    points = []
    for num_bytes in sizes.messages:
        run, messages, sent = make(num_bytes, mesh)
        seconds = [max(timed(run, mesh)) for _ in range(sizes.rounds + 1)][1:]
        points.append(Point(messages, sent, float(np.median(seconds))))
    return Link(kind, span, in_node, points, *fit(points))


def _with_overlap(
    hop: Link, setting: Setting, seconds: float, meshes: Meshes, sizes: Sizes, base: ContextParallelConfig
) -> Link:
    """Beside the kernel on `setting`, which takes `seconds`: twice as long as what is sent."""
    kernel = Subject(Case(setting, _with_degrees(base, 1, 1)), meshes).attend
    num_bytes = int(np.clip(hop.bytes_per_second * seconds / 2, sizes.messages[0], sizes.messages[-1]))
    mesh = meshes.of(_with_degrees(base, hop.ranks, 1))
    return replace(hop, overlap=hidden_share(kernel, num_bytes, mesh, rounds=sizes.rounds))


def hidden_share(kernel: Run, num_bytes: int, mesh: ContextParallelMesh, *, rounds: int) -> float:
    """Share of a hop's time that arithmetic beside it hides, from 0 to 1.

    1 - (both together - the kernel alone) / the hop alone, medians over the rounds of the slowest rank's time.

    Args:
        kernel (`Callable`): runs longer than the hop.
        num_bytes (`int`): of the hop, over the ring axis.
    """
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=mesh.device_type)

    def hop(meanwhile: Run = lambda: None) -> None:
        received = start_hop(tensor, mesh, received_rows=num_bytes)
        meanwhile()
        received.wait()

    runs = (kernel, hop, partial(hop, kernel))
    alone, sent, together = np.median(
        [[max(timed(run, mesh)) for run in runs] for _ in range(rounds + 1)][1:],  # the first one warms up
        axis=0,
    )
    return float(np.clip(1 - (together - alone) / sent, 0.0, 1.0))


def _hop(num_bytes: int, mesh: ContextParallelMesh) -> tuple[Run, int, int]:
    """(what is timed, messages, bytes that leave)."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=mesh.device_type)
    return lambda: start_hop(tensor, mesh, received_rows=num_bytes).wait(), 1, num_bytes


def _trade(num_bytes: int, mesh: ContextParallelMesh) -> tuple[Run, int, int]:
    """A forward pass of Ulysses, without attention: two all-to-alls and the copies around them."""
    size, head_dim = mesh.ulysses_size, 64
    shape = AttentionShape(2 * size, size, head_dim, itemsize=1)  # 2 query heads for a K/V head, as bytes
    slots = max(1, num_bytes // ulysses_bytes(shape, local_length=1, ulysses_degree=size))
    q, k, v = (
        torch.zeros(slots, heads, head_dim, dtype=torch.uint8, device=mesh.device_type)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    sent = ulysses_bytes(shape, local_length=slots, ulysses_degree=size)
    return lambda: attend_by_heads(q, k, v, lambda q, k, v: q, mesh), 2 * (size - 1), sent


def _attention(setting: Setting, alone: ContextParallelConfig, meshes: Meshes, sizes: Sizes) -> Spread:
    """One causal document in every process at the same time: forward and backward pass of the kernel."""
    (result,) = measure([Case(setting, alone)], meshes, rounds=sizes.rounds, warm_up=1)
    return result.seconds


def _matmul(dtype: torch.dtype, mesh: ContextParallelMesh, sizes: Sizes) -> Spread:
    """A product of square matrices, in every process at the same time."""
    left, right = (torch.randn(sizes.matrix, sizes.matrix, device=mesh.device_type).to(dtype) for _ in range(2))
    run = partial(torch.matmul, left, right)
    return Spread.of([max(timed(run, mesh)) for _ in range(sizes.rounds + 1)][1:])


def _area(setting: Setting) -> int:
    return sum(n * (n + 1) // 2 for n in setting.doc_lengths)


def _shape(setting: Setting) -> AttentionShape:
    heads = setting.heads
    return AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, setting.torch_dtype.itemsize)


def _shortened(setting: Setting) -> Setting:
    """An eighth of the document."""
    return replace(setting, doc_lengths=(max(1, setting.num_tokens // 8),))


def _rate(setting: Setting, seconds: Spread) -> tuple[float, float]:
    """(block, TFLOP/s); the planner's block of one document is the root of its area."""
    area = _area(setting)
    return area**0.5, sum(attention_flops(_shape(setting), area)) / seconds.median / TERA


def _device(links: Sequence[Link], kernel: Kernel, matmul_tflops: float, device_type: str) -> dict[str, Any]:
    """Fields of a `Device`."""
    values: dict[str, Any] = {"name": "CPU", "is_measured": True}
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        values |= {"name": properties.name, "memory_gib": properties.total_memory / 2**30}
    values |= {"attention_tflops": kernel.tflops, "half_efficiency_tokens": kernel.half_efficiency_tokens}
    values |= {"matmul_tflops": matmul_tflops}
    for name, in_node in (("intra", True), ("inter", False)):
        for kind, what in (("hop", ""), ("trade", "_trade")):
            found = [link for link in links if link.in_node is in_node and link.kind == kind]
            if found:
                latency, rate, _ = fit([point for link in found for point in link.points])
                values |= {f"{name}{what}_gbs": rate / GIGA, f"{name}{what}_latency": latency}
            if found and kind == "hop":
                values[f"{name}_overlap"] = found[-1].overlap
    return values
