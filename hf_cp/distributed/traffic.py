"""Counts the bytes that a process sends, per mesh axis, and holds the clock of its waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_cp.distributed.clock import Clock, Mark


@dataclass
class Traffic:
    """Bytes that left this process since it was made or last reset; what stays on the process is not counted.

    Args:
        ring_bytes, ulysses_bytes (`int`): sent over the axis.
        clock (`Clock`, *optional*): notes how long the process waits; `None` notes nothing.
    """

    ring_bytes: int = 0
    ulysses_bytes: int = 0
    clock: Clock | None = None

    def reset(self) -> None:
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
