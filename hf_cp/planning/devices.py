"""What a GPU can do: memory, sustained arithmetic, links.

The table holds data-sheet numbers times the share that long training runs sustain. `hf-cp bench` measures the real
ones; a file with the same keys replaces any of them. Invariant: a device knows which of its numbers were measured.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

GIB, GIGA, TERA = 2**30, 1e9, 1e12


@dataclass(frozen=True)
class Device:
    """One GPU (or CPU process) and its links.

    Args:
        name (`str`): for tables.
        memory_gib (`float`): memory that a process can use, in GiB.
        peak_tflops (`float`): data-sheet peak of dense matrix products in the training dtype, in TFLOP/s; for MFU.
        matmul_tflops (`float`): sustained in linear layers, in TFLOP/s.
        attention_tflops (`float`): sustained by the attention kernel, forward and backward together, in TFLOP/s.
        intra_gbs, inter_gbs (`float`): GB/s that one process sends inside a node, and between nodes.
        intra_latency, inter_latency (`float`): seconds before the first byte of a message.
        intra_overlap, inter_overlap (`float`): share of a transfer's time that arithmetic beside it hides, 0 to 1;
            below 1 where sending needs the processor that computes, as with gloo on CPUs.
        intra_trade_gbs, inter_trade_gbs, intra_trade_latency, inter_trade_latency (`float`, *optional*): the same for
            all-to-alls (Ulysses), the copies around them included; `None`: as other transfers.
        half_efficiency_tokens (`float`): blocks of so many tokens reach half of the kernel's sustained rate.
        is_measured (`bool`): whether numbers come from `hf-cp bench` or another measurement.
        measured (sequence of `str`): which ones; empty with `is_measured`: all.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    matmul_tflops: float
    attention_tflops: float
    intra_gbs: float
    inter_gbs: float
    intra_latency: float = 10e-6
    inter_latency: float = 20e-6
    intra_overlap: float = 1.0
    inter_overlap: float = 1.0
    intra_trade_gbs: float | None = None
    inter_trade_gbs: float | None = None
    intra_trade_latency: float | None = None
    inter_trade_latency: float | None = None
    half_efficiency_tokens: float = 512.0
    is_measured: bool = False
    measured: tuple[str, ...] = ()

    def is_field_measured(self, name: str) -> bool:
        """Whether this number was measured; the others are the table's or the user's."""
        return self.is_measured and (not self.measured or name in self.measured)


def _data_sheet(name: str, memory_gib: float, peak: float, nvlink: float, network: float) -> Device:
    """Sustained: 60 % of the peak in linear layers, 55 % in attention, 75 % of NVLink, 90 % of the network."""
    return Device(name, memory_gib, peak, 0.6 * peak, 0.55 * peak, 0.75 * nvlink, 0.9 * network)


# name, usable GiB, dense bf16 TFLOP/s, NVLink (or PCIe) GB/s in one direction, network GB/s of one GPU
DEVICES = {
    device.name: device
    for device in (
        _data_sheet("a100-40", 39.4, 312, 300, 25),
        _data_sheet("a100", 79.2, 312, 300, 25),
        _data_sheet("h100", 79.1, 989, 450, 50),
        _data_sheet("h200", 139.8, 989, 450, 50),
        _data_sheet("b200", 178.3, 2250, 900, 50),
        _data_sheet("l40s", 44.5, 362, 32, 25),
        _data_sheet("rtx4090", 23.5, 165, 32, 12.5),
    )
}


def device_of_gpu(gpu_name: str, memory_bytes: int) -> Device | None:
    """The device of the table that a GPU is, by the name that CUDA gives it; `None` if it is not there.

    The slower cards that share a name (H100 PCIe and NVL) are not.

    >>> device_of_gpu("NVIDIA H100 80GB HBM3", 85 * 10**9).name
    'h100'
    >>> device_of_gpu("NVIDIA A100-SXM4-40GB", 42 * 10**9).name
    'a100-40'
    """
    words = re.split("[^a-z0-9]+", gpu_name.lower())
    if "h100" in words and ("pcie" in words or "nvl" in words):
        return None
    found = [device for device in DEVICES.values() if device.name.partition("-")[0] in (*words, "".join(words[-2:]))]
    return min(found, key=lambda device: abs(device.memory_gib * GIB - memory_bytes), default=None)


def find_device(which: str | Device, *, measured: str | Path | None = None) -> Device:
    """A device of the table, or of a JSON file with the fields of [`Device`]; `measured` replaces fields.

    Args:
        which (`str` or `Device`): "h100", ..., or the path of a JSON file, which may name a `base` device of the
            table; a `Device` is taken as it is.
        measured (path, *optional*): `bench.json` of `hf-cp bench`; its `device` section wins.

    Raises:
        ValueError: no such device or field.
    """
    device = which if isinstance(which, Device) else DEVICES.get(which.lower())
    if device is None:
        device = _from_file(Path(which))
    if measured is not None:
        section = _read_object(Path(measured), "the bench.json of `hf-cp bench`").get("device")
        if not isinstance(section, dict):
            raise ValueError(f"{measured} has no 'device' section. Give a bench.json that `hf-cp bench` has written.")
        device = _replace(device, {"is_measured": True, **section}, source=str(measured))
    return device


def _from_file(path: Path) -> Device:
    if not path.is_file():
        raise ValueError(
            f"There is no device {str(path)!r}: the table has {', '.join(DEVICES)}.\n"
            "  Choose one of them, or give a JSON file with memory_gib, peak_tflops, matmul_tflops, attention_tflops, "
            "intra_gbs and inter_gbs."
        )
    values = _read_object(path, f"a device: {', '.join(_fields())}, or a base and what differs from it")
    base = values.pop("base", None)
    if base is not None:
        return _replace(find_device(str(base)), values, source=str(path))
    try:
        return Device(**{"name": path.stem, **values, "measured": _measured_fields(values)})
    except TypeError as error:
        raise ValueError(
            f"{path} does not describe a device: {error}. The fields are {', '.join(_fields())}."
        ) from None


def _read_object(path: Path, expected: str) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of decoding, too
        raise ValueError(f"{path} is not JSON: {error}.\n  Give a JSON object with {expected}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}.\n  Give a JSON object with {expected}.")
    return values


def _replace(device: Device, values: dict, *, source: str) -> Device:
    unknown = sorted(set(values) - set(_fields()))
    if unknown:
        raise ValueError(f"{source} sets {', '.join(unknown)} of a device. The fields are {', '.join(_fields())}.")
    measured = tuple(dict.fromkeys((*device.measured, *_measured_fields(values))))
    return replace(device, **{**values, "measured": measured})


def _measured_fields(values: dict) -> tuple[str, ...]:
    """The numbers of a file that says that it was measured."""
    return tuple(name for name in values if name not in ("name", "is_measured")) if values.get("is_measured") else ()


def _fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Device)]


@dataclass(frozen=True)
class Link:
    """One process's way out over an axis."""

    bytes_per_second: float
    latency: float
    overlap: float = 1.0

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        """Of so many bytes in so many messages, one after another; nothing to send takes no time.

        >>> Link(bytes_per_second=50e9, latency=1e-5).seconds(100e9, messages=2)
        2.00002
        """
        return messages * self.latency + num_bytes / self.bytes_per_second if num_bytes else 0.0

    def exposed(self, seconds: float, compute: float) -> float:
        """What transfers of so many seconds add to so much arithmetic that runs beside them.

        >>> Link(bytes_per_second=50e9, latency=1e-5, overlap=0.5).exposed(3.0, compute=2.0)
        2.0
        """
        return seconds - self.overlap * min(seconds, compute)


@dataclass(frozen=True)
class Cluster:
    """GPUs, and how many of them share a node."""

    device: Device
    num_gpus: int
    gpus_per_node: int

    def link(self, span: int) -> Link:
        """The slowest link between neighbours of the groups of `span` consecutive processes."""
        inside, between = self._links()
        return inside if self.is_in_node(span) else between

    def _links(self, *, for_all_to_all: bool = False) -> tuple[Link, Link]:
        """Inside a node, and between nodes; all-to-alls have rates of their own where these are known."""
        d = self.device
        inside = Link(d.intra_gbs * GIGA, d.intra_latency, d.intra_overlap)
        between = Link(d.inter_gbs * GIGA, d.inter_latency, d.inter_overlap)
        if not for_all_to_all:
            return inside, between
        own = ((d.intra_trade_gbs, d.intra_trade_latency), (d.inter_trade_gbs, d.inter_trade_latency))
        return tuple(
            replace(
                link,
                bytes_per_second=link.bytes_per_second if gbs is None else gbs * GIGA,
                latency=link.latency if latency is None else latency,
            )
            for link, (gbs, latency) in zip((inside, between), own, strict=True)
        )

    def link_to_all(self, size: int, span: int, *, for_all_to_all: bool = False) -> Link:
        """The way out to all others of a group of `size` in `span` consecutive processes, some maybe on its own node.

        Of the size - 1 parts of what is sent, only those for other nodes take the slow link; the others travel at the
        same time.
        """
        inside, between = self._links(for_all_to_all=for_all_to_all)
        if self.is_in_node(span):
            return inside
        is_regular = span % self.gpus_per_node == 0
        own_node = max(1, self.gpus_per_node * size // span) if is_regular else 1
        crossing = (size - own_node) / (size - 1)
        fastest = inside.bytes_per_second / (1 - crossing) if crossing < 1 else inf
        return replace(between, bytes_per_second=min(between.bytes_per_second / crossing, fastest))

    def is_in_node(self, span: int) -> bool:
        """Whether each group of `span` consecutive processes is on one node.

        Group i begins at process i * span: all groups keep to a node exactly if `span` divides its processes. With 8
        a node, the third group of 3 would be on two.
        """
        return self.gpus_per_node % span == 0 or (self.num_nodes == 1 and span <= self.num_gpus)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one maybe not full."""
        return -(-self.num_gpus // self.gpus_per_node)
