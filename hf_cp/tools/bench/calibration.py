"""What `hf-cp plan` assumes about a machine, measured: links, the attention kernel, matrix products.

Groups inside a node and groups over nodes are different links, and so are hops of a
ring and all-to-alls of Ulysses, which pack and unpack what they send. Invariant: what was not measured is not
reported; the planner keeps its own value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_cp.attention.recompute import NoMemory
from hf_cp.attention.ulysses import HeadChunks
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.collectives import start_hop
from hf_cp.distributed.communicator import Communicator
from hf_cp.output import Table
from hf_cp.planning.devices import GIGA, TERA
from hf_cp.sequence.costs import AttentionShape, attention_flops, ulysses_bytes
from hf_cp.sequence.placement import causal_area
from hf_cp.tools.bench.cases import Case, Setting
from hf_cp.tools.bench.fits import Kernel, Point, fit, fit_kernel
from hf_cp.tools.bench.measure import Communicators, Run, Subject, measure, timed
from hf_cp.tools.bench.results import NOISE, Spread

__all__ = ["Calibration", "Link", "calibrate", "calibration_table", "hidden_share"]

HOP, ALL_TO_ALL = "hop", "all-to-all"
FIELDS = {HOP: "", ALL_TO_ALL: "_trade"}  # of the planner's `Device`, as in intra_trade_gbs


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


@dataclass(frozen=True)
class Link:
    """A process's way out to the others of its group.

    Attributes:
        kind (`str`): "hop" (send and receive around the ring) or "all-to-all" (Ulysses).
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
    setting: Setting, comms: Communicators, base: ContextParallelConfig, *, per_node: int, quick: bool
) -> Calibration:
    """Measures this machine; all ranks must call it.

    Args:
        setting (`Setting`): heads, dtype and length of the document on which the kernel is timed.
        comms (`Communicators`): made so far.
        base (`ContextParallelConfig`): names the kernel.
        per_node (`int`): consecutive ranks on a node.
        quick (`bool`): few and small messages.
    """
    lab = _Lab(comms, base, SIZES["quick" if quick else comms.device_type])
    short_setting = replace(setting, doc_lengths=(max(1, setting.num_tokens // 8),))
    long, short = lab.attention(setting), lab.attention(short_setting)
    kernel = fit_kernel([_rate(setting, long), _rate(short_setting, short)])
    matmul = lab.matmul(setting.torch_dtype)
    links: list[Link] = []
    world_size = lab.comm(1, 1).mesh.world_size
    for span in sorted({span for span in (per_node, world_size) if span > 1}):  # a node; the world if it has more
        for kind in (HOP, ALL_TO_ALL):
            link = lab.link(kind, span, in_node=span <= per_node)
            links.append(lab.with_overlap(link, short_setting, short.median) if kind == HOP else link)
    matmul_tflops = 2.0 * lab.sizes.matrix**3 / matmul.median / TERA  # a product and a sum for each of n^3 terms
    device = _device(links, kernel, matmul_tflops, comms.device_type)
    return Calibration(links, long, kernel.tflops, matmul, matmul_tflops, device)


class _Lab(NamedTuple):
    """What all measurements of a calibration share."""

    comms: Communicators
    base: ContextParallelConfig
    sizes: Sizes

    def config(self, ring: int, ulysses: int) -> ContextParallelConfig:
        return replace(self.base, ring_degree=ring, ulysses_degree=ulysses, head_chunks=1, force=True)

    def comm(self, ring: int, ulysses: int) -> Communicator:
        return self.comms.of(self.config(ring, ulysses))

    def attention(self, setting: Setting) -> Spread:
        """One causal document in every process at the same time: forward and backward pass of the kernel."""
        (result,) = measure([Case(setting, self.config(1, 1))], self.comms, rounds=self.sizes.rounds, warm_up=1)
        return result.seconds

    def matmul(self, dtype: torch.dtype) -> Spread:
        """A product of square matrices, in every process at the same time."""
        side, device = self.sizes.matrix, self.comms.device_type
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return Spread.of(_slowest([partial(torch.matmul, left, right)], self.comm(1, 1), self.sizes.rounds)[:, 0])

    def link(self, kind: str, span: int, *, in_node: bool) -> Link:
        comm = self.comm(span, 1) if kind == HOP else self.comm(1, span)
        points = []
        for num_bytes in self.sizes.messages:
            run, messages, sent = (_hop if kind == HOP else _all_to_all)(num_bytes, comm)
            seconds = np.median(_slowest([run], comm, self.sizes.rounds))
            points.append(Point(messages, sent, float(seconds)))
        return Link(kind, span, in_node, points, *fit(points))

    def with_overlap(self, hop: Link, setting: Setting, seconds: float) -> Link:
        """Beside the kernel on `setting`, which takes `seconds`: twice as long as what is sent."""
        kernel = Subject(Case(setting, self.config(1, 1)), self.comm(1, 1)).attend
        smallest, *_, largest = self.sizes.messages
        num_bytes = int(np.clip(hop.bytes_per_second * seconds / 2, smallest, largest))
        share = hidden_share(kernel, num_bytes, self.comm(hop.ranks, 1), rounds=self.sizes.rounds)
        return replace(hop, overlap=share)


def hidden_share(kernel: Run, num_bytes: int, comm: Communicator, *, rounds: int) -> float:
    """Share of a hop's time that arithmetic beside it hides, from 0 to 1.

    1 - (both together - the kernel alone) / the hop alone, medians over the rounds of the slowest rank's time.

    Args:
        kernel (`Callable`): runs longer than the hop.
        num_bytes (`int`): of the hop, over the ring axis.
    """
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=comm.mesh.device_type)

    def hop(meanwhile: Run = lambda: None) -> None:
        received = start_hop(tensor, comm, received_length=num_bytes)
        meanwhile()
        received.wait()

    alone, sent, together = np.median(_slowest([kernel, hop, partial(hop, kernel)], comm, rounds), axis=0)
    return float(np.clip(1 - (together - alone) / sent, 0.0, 1.0))


def _slowest(runs: Sequence[Run], comm: Communicator, rounds: int) -> np.ndarray:
    """Seconds [rounds, runs] of the slowest rank; the runs take turns, and a first round warms up."""
    return np.array([[max(timed(run, comm)) for run in runs] for _ in range(rounds + 1)][1:])


def _hop(num_bytes: int, comm: Communicator) -> tuple[Run, int, int]:
    """(what is timed, messages, bytes that leave)."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=comm.mesh.device_type)
    return lambda: start_hop(tensor, comm, received_length=num_bytes).wait(), 1, num_bytes


def _all_to_all(num_bytes: int, comm: Communicator) -> tuple[Run, int, int]:
    """A forward pass of Ulysses, without attention: two all-to-alls and the copies around them."""
    size, head_dim = comm.mesh.ulysses_size, 64
    shape = AttentionShape(2 * size, size, head_dim, itemsize=1)  # 2 query heads for a K/V head, as bytes
    slots = max(1, num_bytes // ulysses_bytes(shape, local_length=1, ulysses_degree=size))
    q, k, v = (
        torch.zeros(slots, heads, head_dim, dtype=torch.uint8, device=comm.mesh.device_type)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )

    def run() -> None:
        heads = HeadChunks(q, k, v, chunks=1, comm=comm, memory=NoMemory())
        out, _, _ = heads.arrived(heads.scatter(0))
        heads.place(heads.empty_result(), heads.gather(out), 0)

    sent = ulysses_bytes(shape, local_length=slots, ulysses_degree=size)
    return run, 2 * (size - 1), sent


def _rate(setting: Setting, seconds: Spread) -> tuple[float, float]:
    """(block, TFLOP/s); the planner's block of one document is the root of its area, n (n + 1) / 2 visible pairs."""
    heads, n = setting.heads, setting.num_tokens
    shape = AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, setting.torch_dtype.itemsize)
    area = causal_area(n)
    return area**0.5, sum(attention_flops(shape, area)) / seconds.median / TERA


def _device(links: Sequence[Link], kernel: Kernel, matmul_tflops: float, device_type: str) -> dict[str, Any]:
    """Fields of a `Device`."""
    values: dict[str, Any] = {"name": "CPU", "is_measured": True}
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        values |= {"name": properties.name, "memory_gib": properties.total_memory / 2**30}
    values |= {"attention_tflops": kernel.tflops, "half_efficiency_tokens": kernel.half_efficiency_tokens}
    values |= {"matmul_tflops": matmul_tflops}
    for link in links:  # a node's and the world's: there is at most one of a kind on each side of its border
        where = "intra" if link.in_node else "inter"
        name = f"{where}{FIELDS[link.kind]}"
        values |= {f"{name}_gbs": link.bytes_per_second / GIGA, f"{name}_latency": link.latency}
        if link.overlap is not None:
            values[f"{where}_overlap"] = link.overlap
    return values


def calibration_table(calibration: Calibration) -> Table:
    """A row for each link and rate."""
    rows = [
        (
            f"{link.kind} over {link.ranks} ranks, {'inside a node' if link.in_node else 'between nodes'}",
            f"{link.bytes_per_second / 1e9:.2f} GB/s",
            f"{link.latency * 1e6:.1f} us",
            "-" if link.overlap is None else f"{link.overlap:.0%}",
            link.residual,
        )
        for link in calibration.links
    ]
    for name, tflops, spread in (
        ("attention kernel, long document", calibration.attention_tflops, calibration.attention),
        ("matrix product", calibration.matmul_tflops, calibration.matmul),
    ):
        rows.append((name, f"{tflops:.3f} TFLOP/s", "-", "-", spread.width))
    cells = [(*row, f"{width:.0%}", "noisy" if width > NOISE else "") for *row, width in rows]
    return Table("Links and rates", ("", "rate", "latency", "hidden", "fit error or spread", "note"), cells)
