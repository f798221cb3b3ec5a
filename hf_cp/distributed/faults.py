"""When communication with a peer fails, the error says who, with whom and in the middle of what.

A peer that has died or is stuck shows as raw text of gloo or NCCL ("Connection closed by peer", "Timed out waiting"),
without a rank and without a step. Every collective of this package runs inside [`Watched`], which raises a
[`CommunicationError`] from the raw one. Until something fails this costs a few attribute writes: nothing is sent, and
the device is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_cp.distributed.mesh import ContextParallelMesh

RAW_CHARACTERS = 300  # of the library's own text that are shown in the message; the whole error is the cause


class CommunicationError(RuntimeError):
    """A collective failed, most often because a peer has died, raised, or not answered within the time limit."""


@dataclass
class Place:
    """What this process is working on: written as the work goes on, read when something fails.

    Args:
        micro_step (`int`, *optional*): of the epoch, counted from 0.
        layer (`int`, *optional*): whose attention runs, or has run last.
        is_backward (`bool`): in the backward pass.
    """

    micro_step: int | None = None
    layer: int | None = None
    is_backward: bool = False

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


class Watched:
    """`with Watched(mesh, "ring", "..."):` around a call of torch.distributed.

    Args:
        mesh (`ContextParallelMesh`): the processes.
        axis (`str`): whose ranks take part: "ring", "ulysses", "cp", "dp" or "world".
        what (`str`): the operation, as in "failed in ...".
        during (`str`, *optional*): the work that it belongs to; by default what `mesh.place` says.

    Raises:
        CommunicationError: from the library's error. Lack of memory, and a kernel that failed before, stay what
            they are.
    """

    __slots__ = ("axis", "during", "mesh", "what")

    def __init__(self, mesh: ContextParallelMesh, axis: str, what: str, *, during: str | None = None):
        self.mesh, self.axis, self.what, self.during = mesh, axis, what, during

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        is_ours = isinstance(error, CommunicationError | torch.OutOfMemoryError | torch.AcceleratorError)
        if isinstance(error, RuntimeError) and not is_ours:
            raise CommunicationError(self._message(error)) from error

    def _message(self, error: RuntimeError) -> str:
        mesh = self.mesh
        peers = [rank for rank in mesh.peers(self.axis) if rank != mesh.rank]
        axis = "world" if self.axis == "world" else f"{self.axis} axis"
        limit = "" if mesh.timeout is None else f" (time limit {mesh.timeout.total_seconds():g} s)"
        raw = " ".join(str(error).split())
        return (
            f"{mesh.name} lost its peers on the {axis}, ranks {peers}, in {self.what}{limit}.\n"
            f"  It was at: {self.during or mesh.place}. The library says: {type(error).__name__}: "
            f"{raw[:RAW_CHARACTERS]}\n"
            f"  Look for the first error in the logs of ranks {peers}: one of them has ended or hangs. If they were "
            "only slow, raise timeout_seconds."
        )
