"""What attention takes without its communication, and its communication without the rest.

Inside [`local_copies`] nothing leaves the process: the two functions of torch.distributed that attention sends with
fill each receive buffer from its send buffer, at once. What then differs from a real run is the transfers alone, so
the difference in time is the communication that nothing hides. The transfers are noted, and can be made again without
anything between them.

Invariant: torch.distributed is as before when the context ends; received values are wrong inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_cp.distributed.communicator import Communicator

REPLACED = ("batch_isend_irecv", "all_to_all_single")


class Messages(NamedTuple):
    """Sends and receives that start together; of each one its operation as torch has it, with an empty tensor."""

    ops: list[dist.P2POp]
    sent: list[int]  # bytes of each send
    received: list[int]  # bytes of each receive

    @property
    def leaving(self) -> int:
        """Bytes for other processes."""
        return sum(self.sent)

    def start(self, sent: torch.Tensor, received: torch.Tensor) -> Sequence[dist.Work]:
        """Each message has a part of its buffer for itself."""
        parts = {dist.isend: iter(sent.split(self.sent)), dist.irecv: iter(received.split(self.received))}
        return dist.batch_isend_irecv([_with_tensor(op, next(parts[op.op])) for op in self.ops])


class AllToAll(NamedTuple):
    """An all-to-all: bytes to and from each rank of the group."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    @property
    def leaving(self) -> int:
        """Bytes for other processes; a rank's part for itself stays."""
        return sum(self.sent) - self.sent[dist.get_rank(self.group)]

    def start(self, sent: torch.Tensor, received: torch.Tensor) -> Sequence[dist.Work]:
        return [dist.all_to_all_single(received, sent, self.received, self.sent, group=self.group, async_op=True)]


@dataclass
class LocalCopies:
    """Stands in for torch.distributed; `transfers` are those that were asked for, in order."""

    transfers: list[Messages | AllToAll] = field(default_factory=list)

    def batch_isend_irecv(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        """Copies what the first receive is for from the first send, and so on."""
        sends, receives = ([op.tensor for op in ops if op.op is kind] for kind in (dist.isend, dist.irecv))
        noted = [_with_tensor(op, op.tensor.new_empty(0)) for op in ops]  # notes hold no memory
        self.transfers.append(Messages(noted, [x.nbytes for x in sends], [x.nbytes for x in receives]))
        for sent, received in zip(sends, receives, strict=True):
            _fill(received, sent)
        return []

    def all_to_all_single(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: list[int] | None = None,
        sent_lengths: list[int] | None = None,
        *,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> _Done:
        """Without lengths every rank gets equally many bytes."""
        equal = [1] * dist.get_world_size(group)
        parts = _split(sent.nbytes, sent_lengths or equal), _split(received.nbytes, received_lengths or equal)
        self.transfers.append(AllToAll(group, *parts))
        _fill(received, sent)
        return _Done()

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave this process when the transfers are made."""
        return sum(transfer.leaving for transfer in self.transfers)

    def buffers(self, device_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What [`LocalCopies.replay`] sends from and receives into: uint8, as large as the largest transfer."""
        sizes = zip(*((sum(t.sent), sum(t.received)) for t in self.transfers), strict=True)
        sent, received = [max(size) for size in sizes] or (0, 0)
        return tuple(torch.zeros(size, dtype=torch.uint8, device=device_type) for size in (sent, received))

    def replay(self, comm: Communicator, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Makes the noted transfers for real, one after another; all ranks of the mesh must call it."""
        sent, received = buffers
        with comm.calling("cp", "the replay of attention's transfers", during="a measurement"):
            for transfer in self.transfers:
                for work in transfer.start(sent[: sum(transfer.sent)], received[: sum(transfer.received)]):
                    work.wait()


@contextmanager
def local_copies() -> Iterator[LocalCopies]:
    """Nothing of attention leaves this process while the context is open; every rank of the mesh must be in it.

    Example:

        with local_copies() as copies:
            context_parallel_attention(...)  # as long as without communication; its values are wrong
        copies.replay(comm, copies.buffers("cpu"))  # the same transfers alone
    """
    copies, before = LocalCopies(), {name: getattr(dist, name) for name in REPLACED}
    try:
        for name in REPLACED:
            setattr(dist, name, getattr(copies, name))
        yield copies
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


class _Done:
    def wait(self) -> bool:
        return True


def _with_tensor(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    return dist.P2POp(op.op, tensor, group=op.group, group_peer=op.group_peer, tag=op.tag)


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes all of `target`, from `source` as far as that reaches: uneven splits may send less than they receive."""
    target, source = target.view(-1), source.reshape(-1)
    length = min(len(target), len(source))
    target[:length] = source[:length]
    target[length:] = 0


def _split(num_bytes: int, lengths: list[int]) -> list[int]:
    """`num_bytes` in the proportions of `lengths`."""
    return [num_bytes * n // max(1, sum(lengths)) for n in lengths]
