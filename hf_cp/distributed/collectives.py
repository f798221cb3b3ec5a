"""The collectives of attention: hops, exchanges and gathers over the ring axis, an all-to-all over the Ulysses axis.

Each takes a [`Communicator`], which counts the bytes that leave the process, times the waits while there is a clock
and raises a `CommunicationError` when a peer is lost; each has a name for profilers. Over an axis of one process
nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_cp.distributed.clock import Mark
from hf_cp.distributed.communicator import Communicator, named_range

DIRECT_TAG = 2  # of sends to all ring ranks at once; hops use smaller ones
_ALL_TO_ALL = "the all-to-all of tokens and heads"


@dataclass
class Transfer:
    """Tensors on their way over the ring axis."""

    received: torch.Tensor | None
    sent: torch.Tensor | None  # kept alive until it has left
    works: Sequence[dist.Work]
    comm: Communicator
    what: str  # for messages
    name: str  # for profilers
    started: Mark | None  # while there is a clock

    def wait(self) -> torch.Tensor:
        """What arrived, once; the transfer lets go of both buffers."""
        waiting = self.comm.waiting("ring", self.what, since=self.started)
        with named_range(f"hf_cp/ring/{self.name}/wait"), waiting:
            for work in self.works:
                work.wait()
        received, self.received, self.sent, self.works = self.received, None, None, []
        return received


def start_hop(tensor: torch.Tensor, comm: Communicator, *, received_length: int, tag: int = 0) -> Transfer:
    """Starts to send `tensor` [slots, ...] to the next ring rank, to receive [received_length, ...] from the previous.

    Hops that are in flight together need different tags. On NCCL every rank must start its hops in the same order.
    """
    sent = tensor.contiguous()
    received = sent.new_empty(received_length, *sent.shape[1:])
    group, size, rank = comm.mesh.ring_group, comm.mesh.ring_size, comm.mesh.ring_rank
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size, tag=tag),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size, tag=tag),
    ]
    comm.ring_bytes += sent.nbytes
    return _start_on_ring(ops, received, sent, comm, "a hop of the ring", "hop")


def start_exchange(tensor: torch.Tensor, comm: Communicator, *, sent: list[int], received: list[int]) -> Transfer:
    """Starts an all-to-all over the ring axis with uneven splits.

    Args:
        tensor (`torch.Tensor`): [sum(sent), ...], the tokens for each ring rank in order.
        sent, received (`list[int]`): tokens to and from each ring rank.
    """
    tensor = tensor.contiguous()
    buffer = tensor.new_empty(sum(received), *tensor.shape[1:])
    what, name, started = "the exchange of K/V tokens", "exchange", comm.mark()
    with named_range(f"hf_cp/ring/{name}/start"), comm.calling("ring", what):
        work = dist.all_to_all_single(buffer, tensor, received, sent, group=comm.mesh.ring_group, async_op=True)
    token_bytes = tensor.nbytes // max(1, len(tensor))
    comm.ring_bytes += (sum(sent) - sent[comm.mesh.ring_rank]) * token_bytes
    return Transfer(buffer, tensor, [work], comm, what, name, started)


def start_all_gather(tensor: torch.Tensor, comm: Communicator) -> Transfer:
    """Starts to gather `tensor` [slots, ...] of every ring rank into [ring_size * slots, ...].

    Every rank sends to every other, straight into its place: gloo's own all-gather copies everything three times.
    """
    tensor, rank = tensor.contiguous(), comm.mesh.ring_rank
    gathered = tensor.new_empty(comm.mesh.ring_size, *tensor.shape)
    gathered[rank] = tensor
    ops = _sends([tensor] * comm.mesh.ring_size, list(gathered), comm)
    return _start_on_ring(ops, gathered.flatten(0, 1), tensor, comm, "the all-gather of K/V", "all_gather")


def start_return(blocks: torch.Tensor, comm: Communicator) -> Transfer:
    """Starts to send block j of `blocks` [ring_size, ...] to ring rank j; this rank's block stays.

    What arrives is [ring_size - 1, ...]: a block from each other ring rank, in their order.
    """
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks[1:])
    places = list(received)
    places.insert(comm.mesh.ring_rank, blocks[comm.mesh.ring_rank])
    ops = _sends(list(blocks), places, comm)
    return _start_on_ring(ops, received, blocks, comm, "the return of dK/dV", "return")


def _sends(sent: list[torch.Tensor], received: list[torch.Tensor], comm: Communicator) -> list[dist.P2POp]:
    """Sends of `sent[j]` to ring rank j and receives of `received[j]` from it, for all but this rank."""
    mesh = comm.mesh
    rank, size, group = mesh.ring_rank, mesh.ring_size, mesh.ring_group
    ops = []
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        ops.append(dist.P2POp(dist.isend, sent[to], group=group, group_peer=to, tag=DIRECT_TAG))
        ops.append(dist.P2POp(dist.irecv, received[source], group=group, group_peer=source, tag=DIRECT_TAG))
        comm.ring_bytes += sent[to].nbytes
    return ops


def _start_on_ring(
    ops: list[dist.P2POp], received: torch.Tensor, sent: torch.Tensor, comm: Communicator, what: str, name: str
) -> Transfer:
    started = comm.mark()
    with named_range(f"hf_cp/ring/{name}/start"), comm.calling("ring", what):
        works = dist.batch_isend_irecv(ops)
    return Transfer(received, sent, works, comm, what, name, started)


@dataclass
class BlockTransfer:
    """Blocks on their way over the Ulysses axis. An all-to-all of blocks is its own adjoint: gradients use it again.

    Args:
        comm (`Communicator`): the processes.
        name (`str`): for profilers; also of the gradients' way back.
    """

    comm: Communicator
    name: str = "all_to_all"
    sent: torch.Tensor | None = None  # kept alive until it has left
    work: dist.Work | None = None
    started: Mark | None = None  # while there is a clock

    def start(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block j of dim 0 goes to Ulysses rank j, and arrives there as block `ulysses_rank`.

        The result may be read after [`BlockTransfer.finish`].
        """
        size = self.comm.mesh.ulysses_size
        if size == 1:
            return blocks.view_as(blocks)
        self.sent = blocks.contiguous()
        received = torch.empty_like(self.sent)
        self.started = self.comm.mark()
        with named_range(f"hf_cp/ulysses/{self.name}/start"), self.comm.calling("ulysses", _ALL_TO_ALL):
            self.work = dist.all_to_all_single(received, self.sent, group=self.comm.mesh.ulysses_group, async_op=True)
            if torch.is_anomaly_enabled():
                self.work.wait()  # it reads what backward functions return at once
        self.comm.ulysses_bytes += self.sent.nbytes * (size - 1) // size  # this rank's block stays
        return received

    def finish(self) -> None:
        """Waits until the blocks have come and gone."""
        if self.work is not None:
            waiting = self.comm.waiting("ulysses", _ALL_TO_ALL, since=self.started)
            with named_range(f"hf_cp/ulysses/{self.name}/wait"), waiting:
                self.work.wait()
        self.sent = self.work = self.started = None


def sum_over_cp(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum over the context-parallel group, on every rank of it; not differentiable."""
    total = tensor.detach().clone()
    if comm.mesh.cp_size > 1:
        with named_range("hf_cp/cp/sum"), comm.waiting("cp", "the sum over the ranks of a sample"):
            dist.all_reduce(total, group=comm.mesh.cp_group)
    return total
