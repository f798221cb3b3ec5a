"""Counts the bytes that a process sends, per mesh axis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes that left this process since it was made or last reset; what stays on the process is not counted."""

    ring_bytes: int = 0
    ulysses_bytes: int = 0

    def reset(self) -> None:
        self.ring_bytes = self.ulysses_bytes = 0
