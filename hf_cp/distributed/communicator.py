"""The processes of a mesh as they are talked to: what is sent is counted, waits are timed, lost peers are named.

A peer that has died or is stuck shows as raw text of gloo or NCCL ("Connection closed by peer", "Timed out waiting"),
without a rank and without a step. Every collective of this package runs inside [`PeerCall`] (by way of
`Communicator.calling` or `.waiting`), which raises a [`CommunicationError`] that says who failed, with whom and in the
middle of what. Until something fails this costs a few attribute writes: nothing is sent, and the device is not waited
for.

Invariant: the mesh is a value; all that changes while a model runs (bytes, clock, place) is here, one object per
model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch

from hf_cp import _compat
from hf_cp.distributed.clock import Clock, Mark, Wait

RAW_CHARACTERS = 300  # of the library's own text that are shown in the message; the whole error is the cause
_NOTHING = nullcontext()


class CommunicationError(RuntimeError):
    """A collective failed, most often because a peer has died, raised, or not answered within the time limit."""


class Ranks(Protocol):
    """What a message needs of a mesh."""

    rank: int
    name: str
    time_limit: timedelta | None

    def peers(self, axis: str) -> list[int]: ...


@dataclass
class Progress:
    """What this process is working on: written as the work goes on, read when something fails.

    Args:
        micro_step (`int`, *optional*): of the epoch, counted from 0.
        layer (`int`, *optional*): whose attention runs, or has run last.
        is_backward (`bool`): in the backward pass.
        kernel, engine (`str`, *optional*): with which attention runs, or has run last.
    """

    micro_step: int | None = None
    layer: int | None = None
    is_backward: bool = False
    kernel: str | None = None
    engine: str | None = None

    def enter(self, layer: int, micro_step: int | None, *, is_backward: bool = False) -> None:
        self.layer, self.micro_step, self.is_backward = layer, micro_step, is_backward

    def follow(self, out: torch.Tensor) -> None:
        """Comes back here when the gradient of `out`, the result of the layer's attention, arrives."""
        if out.requires_grad:
            layer, micro_step = self.layer, self.micro_step
            out.register_hook(lambda grad: self.enter(layer, micro_step, is_backward=True))

    def __str__(self) -> str:
        if self.layer is None:
            return "the start, before any attention layer"
        step = "" if self.micro_step is None else f"micro-step {self.micro_step}, "
        return f"{step}attention of layer {self.layer}, {'backward' if self.is_backward else 'forward'} pass"


class PeerCall:
    """`with PeerCall(mesh, "ring", "..."):` around a call of torch.distributed.

    Args:
        ranks (`Ranks`): the mesh.
        axis (`str`): whose ranks take part: "ring", "ulysses", "cp", "dp" or "world".
        what (`str`): the operation, as in "failed in ...".
        during (`str` or `Progress`): the work that it belongs to.
        clock (`Clock`, *optional*): notes the call as a wait.
        since (`Mark`, *optional*): when the transfer that is waited for was started; by default with the wait.

    Raises:
        CommunicationError: from the library's error. Lack of memory, and a kernel that failed before, stay what
            they are.
    """

    __slots__ = ("_began", "axis", "clock", "during", "ranks", "since", "what")

    def __init__(
        self,
        ranks: Ranks,
        axis: str,
        what: str,
        *,
        during: str | Progress,
        clock: Clock | None = None,
        since: Mark | None = None,
    ):
        self.ranks, self.axis, self.what, self.during = ranks, axis, what, during
        self.clock, self.since, self._began = clock, since, None

    def __enter__(self) -> None:
        if self.clock is not None:
            self._began = self.clock.mark(on_host=self.axis == "world")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.clock is not None and error is None:
            started = self._began if self.since is None else self.since
            self.clock.waits.append(
                Wait(self.axis, started, self._began, self.clock.mark(on_host=self.axis == "world"))
            )
        is_known = isinstance(error, CommunicationError | torch.OutOfMemoryError | torch.AcceleratorError)
        if isinstance(error, RuntimeError) and not is_known:
            raise CommunicationError(self._message(error)) from error

    def _message(self, error: RuntimeError) -> str:
        ranks = self.ranks
        peers = [rank for rank in ranks.peers(self.axis) if rank != ranks.rank]
        axis = "world" if self.axis == "world" else f"{self.axis} axis"
        limit = "" if ranks.time_limit is None else f" (time limit {ranks.time_limit.total_seconds():g} s)"
        raw = " ".join(str(error).split())
        return (
            f"{ranks.name} lost its peers on the {axis}, ranks {peers}, in {self.what}{limit}.\n"
            f"  It was at: {self.during}. The library says: {type(error).__name__}: {raw[:RAW_CHARACTERS]}\n"
            f"  Look for the first error in the logs of ranks {peers}: one of them has ended or hangs. If they were "
            "only slow, raise timeout_seconds."
        )


@dataclass(eq=False)
class Communicator:
    """Talks to the processes of a mesh.

    Args:
        mesh (`ContextParallelMesh`): groups and ranks.

    Attributes:
        ring_bytes, ulysses_bytes (`int`): bytes that have left this process over the axis; what stays on the process
            is not counted.
        clock (`Clock`, *optional*): notes how long the process waits. Without one (the usual case, also while a model
            is evaluated) a wait costs one comparison.
        progress (`Progress`): what this process is working on, for messages.
    """

    mesh: Ranks
    ring_bytes: int = 0
    ulysses_bytes: int = 0
    clock: Clock | None = None
    progress: Progress = field(default_factory=Progress)

    def calling(self, axis: str, what: str, *, during: str | None = None) -> PeerCall:
        """Around a call that starts a transfer."""
        return PeerCall(self.mesh, axis, what, during=during or self.progress)

    def waiting(self, axis: str, what: str, *, since: Mark | None = None, during: str | None = None) -> PeerCall:
        """Around a call that waits for peers; timed while there is a clock."""
        return PeerCall(self.mesh, axis, what, during=during or self.progress, clock=self.clock, since=since)

    def reset_bytes(self) -> None:
        """Counts from 0 again."""
        self.ring_bytes = self.ulysses_bytes = 0

    def mark(self) -> Mark | None:
        """Now, for a transfer that starts; `None` without a clock."""
        return None if self.clock is None else self.clock.mark()

    def note_forward(self) -> None:
        """A forward pass of the model begins here; see [`Clock`]."""
        if self.clock is not None:
            self.clock.forward = self.clock.point()

    def note_attention(self) -> None:
        """The backward pass of a layer's attention ends here; see [`Clock`]."""
        if self.clock is not None:
            self.clock.last_attention = self.clock.point()

    def __deepcopy__(self, memo: dict) -> Communicator:
        return self  # a copied model belongs to the same processes


def named_range(name: str) -> AbstractContextManager:
    """`with named_range("hf_cp/ring/step1"):` names this work in a trace of torch.profiler or Nsight.

    Without an active profiler it costs one flag that is read: nothing is recorded and no object is made.
    """
    return torch.profiler.record_function(name) if _compat.is_profiling() else _NOTHING
