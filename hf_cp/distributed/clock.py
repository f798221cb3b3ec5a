"""When a process waits for its peers, and how long its transfers are under way.

On CPU a mark is the time of the host. On CUDA it is an event on the current stream: a wait for NCCL stalls the stream
and not the host, so a pair of events around it shows what was not hidden. Nobody waits for an event until the times
are asked for. What runs on the host in both cases (the axis "world", over gloo) is marked on the host.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

Mark = float | torch.cuda.Event


class Wait(NamedTuple):
    """One wait for peers.

    Args:
        axis (`str`): "ring", "ulysses", "cp" or "world".
        started (`Mark`): when the transfer was begun.
        began, ended (`Mark`): the wait itself.
    """

    axis: str
    started: Mark
    began: Mark
    ended: Mark

    @property
    def waited(self) -> float:
        """Seconds in which nothing else was done."""
        return seconds_between(self.began, self.ended)

    @property
    def in_flight(self) -> float:
        """Seconds from the start of the transfer until it was taken, whether or not it had come before."""
        return seconds_between(self.started, self.ended)


class Point(NamedTuple):
    """A place in a micro-step: when it was reached, and how many waits had been noted by then."""

    mark: Mark
    num_waits: int


class Clock:
    """Collects the waits of one process; a [`Communicator`] that has one notes them.

    Args:
        device_type (`str`): "cuda" for events on the current stream, else the host's clock.

    Attributes:
        waits (`list[Wait]`): in the order in which they ended.
        forward (`Point`, *optional*): where the latest forward pass of the model has begun. What comes before it in
            the call (DDP's broadcast of buffers) waits for other ranks.
        last_attention (`Point`, *optional*): where the latest backward pass of a layer's attention has ended. With the
            first layer's, the whole is nearly done; what follows (DDP's or ZeRO's reduction) waits for other ranks.
    """

    def __init__(self, device_type: str):
        self.device_type = device_type
        self.waits: list[Wait] = []
        self.forward: Point | None = None
        self.last_attention: Point | None = None

    def mark(self, *, on_host: bool = False) -> Mark:
        """Now, in the order of the stream or (CPU, `on_host`) of the host."""
        if on_host or self.device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def point(self) -> Point:
        """Here and now."""
        return Point(self.mark(), len(self.waits))


def seconds_between(start: Mark, end: Mark) -> float:
    """Between two marks of one kind; waits until the device has come to the later one."""
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
