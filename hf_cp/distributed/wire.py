"""How tensors leave the process: torch.distributed, or copies inside the process for measurements.

Attention's collectives hand what they send to `mesh.wire`. Inside [`local_copies`] nothing leaves the process: each
transfer fills its receive buffer from its send buffer, at once. What then differs from a real run is the wire alone,
so the difference in time is the communication that nothing hides. The transfers are noted, and can be made again
without anything between them.

Invariant: the wire belongs to a mesh and is put back when the context ends; received values are wrong inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from hf_cp.distributed.faults import Watched

if TYPE_CHECKING:
    from hf_cp.distributed.mesh import ContextParallelMesh


class Pending(Protocol):
    """What is under way."""

    def wait(self) -> object: ...


class Wire:
    """torch.distributed itself."""

    def send_and_receive(self, ops: list[dist.P2POp]) -> Sequence[Pending]:
        """Starts pairs of a send and a receive, in this order."""
        return dist.batch_isend_irecv(ops)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        group: dist.ProcessGroup,
        received_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
    ) -> Pending:
        """Starts an all-to-all of rows; without numbers of rows every rank gets equally many."""
        return dist.all_to_all_single(received, sent, received_rows, sent_rows, group=group, async_op=True)


class Message(NamedTuple):
    """A send or a receive of a point-to-point transfer: with whom, and bytes."""

    is_send: bool
    group: dist.ProcessGroup
    group_peer: int
    tag: int
    num_bytes: int


class Trade(NamedTuple):
    """An all-to-all: bytes from and to each rank of the group."""

    group: dist.ProcessGroup
    received: list[int]
    sent: list[int]


@dataclass
class LocalCopies(Wire):
    """Copies instead of transfers; `transfers` are those that were asked for, in order."""

    transfers: list[list[Message] | Trade] = field(default_factory=list)

    def send_and_receive(self, ops: list[dist.P2POp]) -> Sequence[Pending]:
        self.transfers.append(
            [Message(op.op is dist.isend, op.group, op.group_peer, op.tag, op.tensor.nbytes) for op in ops]
        )
        for send, receive in zip(ops[::2], ops[1::2], strict=True):
            _fill(receive.tensor, send.tensor)
        return []

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        group: dist.ProcessGroup,
        received_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
    ) -> Pending:
        equal = [1] * dist.get_world_size(group)
        self.transfers.append(
            Trade(group, _split(received.nbytes, received_rows or equal), _split(sent.nbytes, sent_rows or equal))
        )
        _fill(received, sent)
        return _Done()

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave this process when the transfers are made."""
        return sum(_sent_bytes(transfer) for transfer in self.transfers)

    def buffers(self, device_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What [`replay`] sends from and receives into: uint8, as large as the largest transfer."""
        size = max((_buffer_bytes(transfer) for transfer in self.transfers), default=0)
        return tuple(torch.zeros(size, dtype=torch.uint8, device=device_type) for _ in range(2))

    def replay(self, mesh: ContextParallelMesh, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Makes the noted transfers for real, one after another; all ranks of the mesh must call it."""
        with Watched(mesh, "cp", "the replay of attention's transfers", during="a measurement"):
            for transfer in self.transfers:
                for work in _start(transfer, *buffers):
                    work.wait()


@contextmanager
def local_copies(mesh: ContextParallelMesh) -> Iterator[LocalCopies]:
    """Nothing leaves this process while the context is open; every rank of the mesh must be in it.

    Example:

        with local_copies(mesh) as copies:
            context_parallel_attention(...)  # as long as without communication; its values are wrong
        copies.replay(mesh, copies.buffers(mesh.device_type))  # the same transfers alone
    """
    before, mesh.wire = mesh.wire, LocalCopies()
    try:
        yield mesh.wire
    finally:
        mesh.wire = before


class _Done:
    def wait(self) -> bool:
        return True


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes all of `target`, from `source` as far as that reaches: uneven splits may send less than they receive."""
    target, source = target.view(-1), source.reshape(-1)
    length = min(len(target), len(source))
    target[:length] = source[:length]
    target[length:] = 0


def _split(num_bytes: int, rows: list[int]) -> list[int]:
    """`num_bytes` in the proportions of `rows`."""
    return [num_bytes * n // max(1, sum(rows)) for n in rows]


def _sent_bytes(transfer: list[Message] | Trade) -> int:
    if isinstance(transfer, Trade):
        return sum(transfer.sent) - transfer.sent[dist.get_rank(transfer.group)]
    return sum(message.num_bytes for message in transfer if message.is_send)


def _buffer_bytes(transfer: list[Message] | Trade) -> int:
    """What the larger of the two buffers must hold: receives of one transfer must not overlap."""
    if isinstance(transfer, Trade):
        return max(sum(transfer.received), sum(transfer.sent))
    totals = [sum(m.num_bytes for m in transfer if m.is_send is is_send) for is_send in (True, False)]
    return max(totals)


def _start(transfer: list[Message] | Trade, sent: torch.Tensor, received: torch.Tensor) -> Sequence[Pending]:
    if not isinstance(transfer, Trade):
        return dist.batch_isend_irecv(_operations(transfer, sent, received))
    sent, received = sent[: sum(transfer.sent)], received[: sum(transfer.received)]
    splits = transfer.received, transfer.sent
    return [dist.all_to_all_single(received, sent, *splits, group=transfer.group, async_op=True)]


def _operations(transfer: list[Message], sent: torch.Tensor, received: torch.Tensor) -> list[dist.P2POp]:
    """The messages, each with a part of its buffer of its own."""
    begins = {True: 0, False: 0}
    ops = []
    for message in transfer:
        begin, buffer = begins[message.is_send], sent if message.is_send else received
        begins[message.is_send] += message.num_bytes
        function = dist.isend if message.is_send else dist.irecv
        tensor = buffer[begin : begin + message.num_bytes]
        ops.append(dist.P2POp(function, tensor, group=message.group, group_peer=message.group_peer, tag=message.tag))
    return ops
