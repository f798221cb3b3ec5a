"""One of each kind of collective over every axis, with values that are known before.

Invariant: every value that a rank receives names its sender, its receiver and its place, so a swapped, lost or doubled
block shows. All ranks must make the same probes, in the order of [`PROBES`].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_cp.distributed.collectives import (
    BlockTransfer,
    start_all_gather,
    start_exchange,
    start_hop,
    start_return,
    sum_over_cp,
)
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import gather_objects, gather_over_cp, sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh

WIDTH = 3  # numbers in a token of a probe


class Probe(NamedTuple):
    """A collective: its axis, its kind, and a function that gives (received, expected)."""

    axis: str
    kind: str
    run: Callable[[Communicator], tuple[torch.Tensor, torch.Tensor]]


def check_collectives(comm: Communicator) -> list[str]:
    """Makes every probe over axes of more than one process; all ranks must call it.

    Returns:
        `list[str]`: the probes, as "axis kind".

    Raises:
        RuntimeError: this rank received something else than was sent.
        CommunicationError: a peer is lost, or the time limit of the mesh's groups is over.
    """
    probes = [probe for probe in PROBES if len(comm.mesh.peers(probe.axis)) > 1]
    pairs = [probe.run(comm) for probe in probes]  # compared afterwards: nobody leaves while others go on
    for probe, (received, expected) in zip(probes, pairs, strict=True):
        if not torch.equal(received, expected):
            raise RuntimeError(
                f"{comm.mesh.name} received wrong values in {probe.kind} on the {probe.axis} axis: "
                f"{received.flatten()[:6].tolist()}... instead of {expected.flatten()[:6].tolist()}...\n"
                "  Check the network and the communication library: NCCL_DEBUG=INFO, nccl-tests, other versions."
            )
    return [f"{probe.axis} {probe.kind}" for probe in probes]


def _block(mesh: ContextParallelMesh, sender: int, receiver: int, length: int = 1) -> torch.Tensor:
    """fp32 [length, WIDTH]: what `sender` sends to `receiver` (global ranks).

    From rank 2 to rank 1, two tokens: [[102000, 102001, 102002], [102003, 102004, 102005]].
    """
    values = torch.arange(length * WIDTH, dtype=torch.float32, device=mesh.device_type).view(length, WIDTH)
    return values + 1000 * sender + 100_000 * receiver


def _sent(mesh: ContextParallelMesh, axis: str) -> list[torch.Tensor]:
    """A token to every rank of the axis."""
    return [_block(mesh, mesh.rank, peer) for peer in mesh.peers(axis)]


def _arriving(mesh: ContextParallelMesh, axis: str) -> list[torch.Tensor]:
    """A token from every rank of the axis."""
    return [_block(mesh, peer, mesh.rank) for peer in mesh.peers(axis)]


def _hop(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    ring, own = comm.mesh.peers("ring"), comm.mesh.ring_rank
    following, previous = ring[(own + 1) % len(ring)], ring[own - 1]
    received = start_hop(_block(comm.mesh, comm.mesh.rank, following, 2), comm, received_length=2).wait()
    return received, _block(comm.mesh, previous, comm.mesh.rank, 2)


def _exchange(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Uneven: ring rank i sends i + j tokens to ring rank j, so the first sends itself nothing."""
    mesh = comm.mesh
    counts = {peer: mesh.ring_rank + other for other, peer in enumerate(mesh.peers("ring"))}
    lengths = list(counts.values())
    sent = torch.cat([_block(mesh, mesh.rank, peer, length) for peer, length in counts.items()])
    received = start_exchange(sent, comm, sent=lengths, received=lengths).wait()
    return received, torch.cat([_block(mesh, peer, mesh.rank, length) for peer, length in counts.items()])


def _all_gather(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    received = start_all_gather(_block(comm.mesh, comm.mesh.rank, 0, 2), comm).wait()
    return received, torch.cat([_block(comm.mesh, peer, 0, 2) for peer in comm.mesh.peers("ring")])


def _return(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    received = start_return(torch.stack(_sent(comm.mesh, "ring")), comm).wait()
    expected = _arriving(comm.mesh, "ring")
    del expected[comm.mesh.ring_rank]
    return received, torch.stack(expected)


def _all_to_all(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    transfer = BlockTransfer(comm)
    received = transfer.start(torch.stack(_sent(comm.mesh, "ulysses")))
    transfer.finish()
    return received, torch.stack(_arriving(comm.mesh, "ulysses"))


def _sum_of_group(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    return sum_over_cp(_block(comm.mesh, comm.mesh.rank, 0), comm), _expected_sum(comm.mesh, "cp")


def _ints_of_group(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    received = gather_over_cp([comm.mesh.rank, -comm.mesh.rank], comm=comm)
    return torch.tensor(received), torch.tensor([[peer, -peer] for peer in comm.mesh.peers("cp")])


def _sum_over_replicas(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    total = _block(comm.mesh, comm.mesh.rank, 0)
    with comm.waiting("dp", "a sum over the data-parallel ranks"):
        dist.all_reduce(total, group=comm.mesh.dp_group)
    return total, _expected_sum(comm.mesh, "dp")


def _expected_sum(mesh: ContextParallelMesh, axis: str) -> torch.Tensor:
    return torch.stack([_block(mesh, peer, 0) for peer in mesh.peers(axis)]).sum(0)


def _sum_of_world(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    rank, world = comm.mesh.rank, comm.mesh.world_size
    total = sum_over_world([rank, 2**40 + rank], comm=comm)  # fp32 would round the second one
    ranks = world * (world - 1) // 2
    return torch.tensor(total), torch.tensor([ranks, world * 2**40 + ranks])


def _objects_of_world(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Of other sizes: rank r sends its name r + 1 times, which travels as 7, 14, ... bytes or more."""
    world = comm.mesh.world_size
    received = gather_objects(f"rank {comm.mesh.rank:2}" * (comm.mesh.rank + 1), comm=comm)
    expected = [f"rank {rank:2}" * (rank + 1) for rank in range(world)]
    return torch.tensor([expected.index(text) if text in expected else -1 for text in received]), torch.arange(world)


PROBES = (
    Probe("ring", "hop", _hop),
    Probe("ring", "uneven exchange", _exchange),
    Probe("ring", "all-gather", _all_gather),
    Probe("ring", "return of blocks", _return),
    Probe("ulysses", "all-to-all", _all_to_all),
    Probe("cp", "sum", _sum_of_group),
    Probe("cp", "gather of integers", _ints_of_group),
    Probe("dp", "sum", _sum_over_replicas),
    Probe("world", "sum on the host", _sum_of_world),
    Probe("world", "gather of objects on the host", _objects_of_world),
)
