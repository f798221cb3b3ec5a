"""One of each kind of collective over every axis, with values that are known before.

Invariant: every value that a rank receives names its sender and its place, so a swapped, lost or doubled block shows.
All ranks must make the same probes, in the order of [`PROBES`].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_cp.distributed.collectives import (
    finish_all_to_all,
    gather_ints_over_cp,
    start_all_gather,
    start_all_to_all,
    start_exchange,
    start_hop,
    start_return,
    sum_over_cp,
)
from hf_cp.distributed.communicator import Communicator, Watched
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.rows import gather_rows

__all__ = ["PROBES", "Probe", "check_collectives"]

WIDTH = 3  # numbers in a row of a probe


class Probe(NamedTuple):
    """A collective: its axis, its kind, and a function that gives (received, expected)."""

    axis: str
    kind: str
    run: Callable[[ContextParallelMesh], tuple[torch.Tensor, torch.Tensor]]


def check_collectives(mesh: ContextParallelMesh) -> list[str]:
    """Makes every probe over axes of more than one process; all ranks must call it.

    Returns:
        `list[str]`: the probes, as "axis kind".

    Raises:
        RuntimeError: this rank received something else than was sent.
        CommunicationError: a peer is lost, or the time limit of the mesh's groups is over.
    """
    probes = [probe for probe in PROBES if len(mesh.peers(probe.axis)) > 1]
    pairs = [probe.run(mesh) for probe in probes]  # compared afterwards: nobody leaves while others go on
    for probe, (received, expected) in zip(probes, pairs, strict=True):
        if not torch.equal(received, expected):
            raise RuntimeError(
                f"{mesh.name} received wrong values in {probe.kind} on the {probe.axis} axis: "
                f"{received.flatten()[:6].tolist()}... instead of {expected.flatten()[:6].tolist()}...\n"
                "  Check the network and the communication library: NCCL_DEBUG=INFO, nccl-tests, other versions."
            )
    return [f"{probe.axis} {probe.kind}" for probe in probes]


def _block(mesh: ContextParallelMesh, sender: int, receiver: int, rows: int = 1) -> torch.Tensor:
    """fp32 [rows, WIDTH]: what `sender` sends to `receiver` (global ranks)."""
    values = torch.arange(rows * WIDTH, dtype=torch.float32, device=mesh.device_type).view(rows, WIDTH)
    return values + 1000 * sender + 100_000 * receiver


def _blocks(mesh: ContextParallelMesh, axis: str, *, sent: bool) -> list[torch.Tensor]:
    """A row to, or from, every rank of the axis."""
    pairs = [(mesh.rank, peer) if sent else (peer, mesh.rank) for peer in mesh.peers(axis)]
    return [_block(mesh, *pair) for pair in pairs]


def _hop(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    ring, own = mesh.peers("ring"), mesh.ring_rank
    following, previous = ring[(own + 1) % len(ring)], ring[(own - 1) % len(ring)]
    received = start_hop(_block(mesh, mesh.rank, following, 2), mesh, received_rows=2).wait()
    return received, _block(mesh, previous, mesh.rank, 2)


def _exchange(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Uneven: ring rank i sends i + j rows to ring rank j, so the first sends itself nothing."""
    ring, own = mesh.peers("ring"), mesh.ring_rank
    counts = [own + other for other in range(len(ring))]
    sent = torch.cat([_block(mesh, mesh.rank, peer, n) for peer, n in zip(ring, counts, strict=True)])
    received = start_exchange(sent, mesh, sent=counts, received=counts).wait()
    return received, torch.cat([_block(mesh, peer, mesh.rank, n) for peer, n in zip(ring, counts, strict=True)])


def _all_gather(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    received = start_all_gather(_block(mesh, mesh.rank, 0, 2), mesh).wait()
    return received, torch.cat([_block(mesh, peer, 0, 2) for peer in mesh.peers("ring")])


def _return(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    received = start_return(torch.stack(_blocks(mesh, "ring", sent=True)), mesh).wait()
    expected = _blocks(mesh, "ring", sent=False)
    del expected[mesh.ring_rank]
    return received, torch.stack(expected)


def _all_to_all(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    received = finish_all_to_all(start_all_to_all(torch.stack(_blocks(mesh, "ulysses", sent=True)), mesh))
    return received, torch.stack(_blocks(mesh, "ulysses", sent=False))


def _sum_of_row(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    expected = torch.stack([_block(mesh, peer, 0) for peer in mesh.peers("cp")]).sum(0)
    return sum_over_cp(_block(mesh, mesh.rank, 0), Communicator(mesh)), expected


def _ints_of_row(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    received = gather_ints_over_cp([mesh.rank, -mesh.rank], mesh)
    return torch.tensor(received), torch.tensor([[peer, -peer] for peer in mesh.peers("cp")])


def _sum_over_replicas(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    total = _block(mesh, mesh.rank, 0)
    with Watched(mesh, "dp", "a sum over the data-parallel ranks"):
        dist.all_reduce(total, group=mesh.dp_group)
    return total, torch.stack([_block(mesh, peer, 0) for peer in mesh.peers("dp")]).sum(0)


def _sum_of_world(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    world = mesh.world_size
    total = sum_over_world([mesh.rank, 2**40 + mesh.rank], comm=Communicator(mesh))
    ranks = world * (world - 1) // 2
    return torch.tensor(total), torch.tensor([ranks, world * 2**40 + ranks])


def _rows_of_world(mesh: ContextParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    def row(rank: int) -> torch.Tensor:
        return torch.full((rank % 3, 2), rank % 256, dtype=torch.uint8)

    lengths = [rank % 3 for rank in range(mesh.world_size)]
    gathered = gather_rows(row(mesh.rank), mesh=mesh, lengths=lengths)
    return torch.cat(gathered), torch.cat([row(rank) for rank in range(mesh.world_size)])


PROBES = (
    Probe("ring", "hop", _hop),
    Probe("ring", "uneven exchange", _exchange),
    Probe("ring", "all-gather", _all_gather),
    Probe("ring", "return of blocks", _return),
    Probe("ulysses", "all-to-all", _all_to_all),
    Probe("cp", "sum", _sum_of_row),
    Probe("cp", "gather of integers", _ints_of_row),
    Probe("dp", "sum", _sum_over_replicas),
    Probe("world", "sum on the host", _sum_of_world),
    Probe("world", "gather of rows on the host", _rows_of_world),
)
