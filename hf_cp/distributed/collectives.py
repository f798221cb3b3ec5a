"""The collectives of attention: hops, exchanges and gathers over the ring axis, an all-to-all over the Ulysses axis.

Each counts the bytes that leave the process (`mesh.traffic`), hands them to `mesh.wire`, notes how long it waits while
there is a clock, has a name for profilers, and raises a `CommunicationError` when a peer is lost.
Over an axis of one process nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_cp.distributed.clock import Mark, Waiting
from hf_cp.distributed.faults import Watched
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.ranges import named_range
from hf_cp.distributed.wire import Pending

DIRECT_TAG = 2  # of sends to all ring ranks at once; hops use smaller ones
_TRADE = "the trade of tokens for heads (all-to-all)"


@dataclass
class Transfer:
    """Tensors on their way over the ring axis."""

    received: torch.Tensor | None
    sent: torch.Tensor | None  # kept alive until it has left
    works: Sequence[Pending]
    mesh: ContextParallelMesh
    what: str  # for messages
    name: str  # for profilers
    started: Mark | None  # while there is a clock

    def wait(self) -> torch.Tensor:
        """What arrived, once; the transfer lets go of both buffers."""
        waiting = Waiting(self.mesh, "ring", self.what, since=self.started)
        with named_range(f"hf_cp/ring/{self.name}/wait"), waiting:
            for work in self.works:
                work.wait()
        received, self.received, self.sent, self.works = self.received, None, None, []
        return received


def start_hop(tensor: torch.Tensor, mesh: ContextParallelMesh, *, received_rows: int, tag: int = 0) -> Transfer:
    """Starts to send `tensor` [rows, ...] to the next ring rank and to receive [received_rows, ...] from the previous.

    Hops that are in flight together need different tags. On NCCL every rank must start its hops in the same order.
    """
    sent = tensor.contiguous()
    received = sent.new_empty(received_rows, *sent.shape[1:])
    group, size, rank = mesh.ring_group, mesh.ring_size, mesh.ring_rank
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size, tag=tag),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size, tag=tag),
    ]
    mesh.traffic.ring_bytes += sent.nbytes
    return _start_on_ring(ops, received, sent, mesh, "a hop of the ring", "hop")


def start_exchange(
    tensor: torch.Tensor, mesh: ContextParallelMesh, *, sent: list[int], received: list[int]
) -> Transfer:
    """Starts an all-to-all over the ring axis with uneven splits.

    Args:
        tensor (`torch.Tensor`): [sum(sent), ...], the rows for each ring rank in order.
        sent, received (`list[int]`): rows to and from each ring rank.
    """
    tensor = tensor.contiguous()
    buffer = tensor.new_empty(sum(received), *tensor.shape[1:])
    what, name, started = "the exchange of K/V rows", "exchange", mesh.traffic.mark()
    with named_range(f"hf_cp/ring/{name}/start"), Watched(mesh, "ring", what):
        work = mesh.wire.all_to_all(buffer, tensor, mesh.ring_group, received, sent)
    row_bytes = tensor.nbytes // max(1, len(tensor))
    mesh.traffic.ring_bytes += (sum(sent) - sent[mesh.ring_rank]) * row_bytes
    return Transfer(buffer, tensor, [work], mesh, what, name, started)


def start_all_gather(tensor: torch.Tensor, mesh: ContextParallelMesh) -> Transfer:
    """Starts to gather `tensor` [rows, ...] of every ring rank into [ring_size * rows, ...].

    Every rank sends to every other, straight into its place: gloo's own all-gather copies everything three times.
    """
    tensor, rank = tensor.contiguous(), mesh.ring_rank
    gathered = tensor.new_empty(mesh.ring_size, *tensor.shape)
    gathered[rank] = tensor
    ops = _sends([tensor] * mesh.ring_size, list(gathered), mesh)
    return _start_on_ring(ops, gathered.flatten(0, 1), tensor, mesh, "the all-gather of K/V", "all_gather")


def start_return(blocks: torch.Tensor, mesh: ContextParallelMesh) -> Transfer:
    """Starts to send block j of `blocks` [ring_size, ...] to ring rank j; the own block stays.

    What arrives is [ring_size - 1, ...]: a block from each other ring rank, in their order.
    """
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks[1:])
    places = list(received)
    places.insert(mesh.ring_rank, blocks[mesh.ring_rank])
    ops = _sends(list(blocks), places, mesh)
    return _start_on_ring(ops, received, blocks, mesh, "the return of dK/dV", "return")


def _sends(sent: list[torch.Tensor], received: list[torch.Tensor], mesh: ContextParallelMesh) -> list[dist.P2POp]:
    """Sends of `sent[j]` to ring rank j and receives of `received[j]` from it, for all but this rank."""
    rank, size, group = mesh.ring_rank, mesh.ring_size, mesh.ring_group
    ops = []
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        ops.append(dist.P2POp(dist.isend, sent[to], group=group, group_peer=to, tag=DIRECT_TAG))
        ops.append(dist.P2POp(dist.irecv, received[source], group=group, group_peer=source, tag=DIRECT_TAG))
        mesh.traffic.ring_bytes += sent[to].nbytes
    return ops


def _start_on_ring(
    ops: list[dist.P2POp], received: torch.Tensor, sent: torch.Tensor, mesh: ContextParallelMesh, what: str, name: str
) -> Transfer:
    started = mesh.traffic.mark()
    with named_range(f"hf_cp/ring/{name}/start"), Watched(mesh, "ring", what):
        works = mesh.wire.send_and_receive(ops)
    return Transfer(received, sent, works, mesh, what, name, started)


@dataclass
class BlockTransfer:
    """Blocks on their way over the Ulysses axis; `blocks` may be read after [`finish_all_to_all`]."""

    mesh: ContextParallelMesh
    blocks: torch.Tensor | None = None
    sent: torch.Tensor | None = None  # kept alive until it has left
    work: Pending | None = None
    name: str = "trade"  # for profilers; also of the gradients' way back
    started: Mark | None = None  # while there is a clock

    def start(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block j of dim 0 goes to Ulysses rank j, and arrives there as block `ulysses_rank`."""
        if self.mesh.ulysses_size == 1:
            return blocks.view_as(blocks)
        self.sent = blocks.contiguous()
        received = torch.empty_like(self.sent)
        self.started = self.mesh.traffic.mark()
        with named_range(f"hf_cp/ulysses/{self.name}/start"), Watched(self.mesh, "ulysses", _TRADE):
            self.work = self.mesh.wire.all_to_all(received, self.sent, self.mesh.ulysses_group)
            if torch.is_anomaly_enabled():
                self.work.wait()  # it reads what backward functions return at once
        self.mesh.traffic.ulysses_bytes += self.sent.nbytes * (self.mesh.ulysses_size - 1) // self.mesh.ulysses_size
        return received

    def finish(self) -> None:
        if self.work is not None:
            waiting = Waiting(self.mesh, "ulysses", _TRADE, since=self.started)
            with named_range(f"hf_cp/ulysses/{self.name}/wait"), waiting:
                self.work.wait()
        self.sent = self.work = self.started = None


class _Start(torch.autograd.Function):
    """Starts a trade of blocks; in the backward pass, waits for the gradients' trade that `_Finish` has started."""

    @staticmethod
    def forward(ctx, blocks: torch.Tensor, transfer: BlockTransfer, once: Callable) -> torch.Tensor:
        ctx.transfer = transfer
        (received,) = once(lambda: (transfer.start(blocks),))
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.transfer.finish()
        return grad, None, None


class _Finish(torch.autograd.Function):
    """Waits for a trade of blocks; in the backward pass, starts that of the gradients. A trade is its own adjoint."""

    @staticmethod
    def forward(ctx, blocks: torch.Tensor, transfer: BlockTransfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.finish()
        return blocks.view_as(blocks)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.transfer.start(grad), None


def start_all_to_all(
    blocks: torch.Tensor,
    mesh: ContextParallelMesh,
    *,
    once: Callable[[Callable], tuple] | None = None,
    name: str = "trade",
) -> BlockTransfer:
    """Starts to trade blocks over the Ulysses axis, differentiably.

    Args:
        blocks (`torch.Tensor`): [ulysses_size, ...], block j for Ulysses rank j.
        once (`Callable`, *optional*): gets the function that starts the trade and returns the tuple of its receive
            buffer; may give that of an earlier trade of the same blocks instead, then nothing is sent.
        name (`str`): of the trade, for profilers.
    """
    if once is None or mesh.ulysses_size == 1:
        once = _call
    transfer = BlockTransfer(mesh, name=name)
    transfer.blocks = _Start.apply(blocks, transfer, once)
    return transfer


def _call(make: Callable[[], tuple]) -> tuple:
    return make()


def finish_all_to_all(transfer: BlockTransfer) -> torch.Tensor:
    """The traded blocks [ulysses_size, ...], block j from Ulysses rank j."""
    blocks = _Finish.apply(transfer.blocks, transfer)
    transfer.blocks = None  # the graph holds the transfer: it must not hold the graph
    return blocks


def sum_over_cp(tensor: torch.Tensor, mesh: ContextParallelMesh) -> torch.Tensor:
    """The sum over the context-parallel group, on every rank of it; not differentiable."""
    total = tensor.detach().clone()
    if mesh.cp_size > 1:
        with named_range("hf_cp/cp/sum"), Waiting(mesh, "cp", "the sum over the ranks of a row"):
            dist.all_reduce(total, group=mesh.cp_group)
    return total


def gather_ints_over_cp(values: list[int], mesh: ContextParallelMesh) -> list[list[int]]:
    """`values` of every rank of the context-parallel group, in cp_rank order; waits for the ranks."""
    if mesh.cp_size == 1:
        return [values]
    local = torch.tensor(values, dtype=torch.int64, device=mesh.device_type)
    gathered = [torch.empty_like(local) for _ in range(mesh.cp_size)]
    with Waiting(mesh, "cp", "the comparison of the ranks' batches"):
        dist.all_gather(gathered, local, group=mesh.cp_group)
    return [t.tolist() for t in gathered]
