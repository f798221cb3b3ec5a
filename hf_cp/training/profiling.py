"""torch.profiler for chosen optimizer steps: one Chrome trace per rank, with the ranges `hf_cp/...` in it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Profiles the optimizer steps `steps` of this process; steps that follow one another share a trace.

    Traces (chrome://tracing, ui.perfetto.dev) are written to `folder` as `trace_step<first>_rank<r>.json`.

    Args:
        steps (`Collection[int]`): numbers of optimizer steps, from 1.
        folder (`Path`): where traces go.
        rank (`int`): of this process.
    """

    def __init__(self, steps: Collection[int], folder: Path, *, rank: int):
        self.steps, self.folder, self.rank = frozenset(steps), folder, rank
        self._profile: profile | None = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Step number `step` begins."""
        if step not in self.steps or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._first = profile(activities=activities), step
        self._profile.start()

    def end(self, step: int) -> None:
        """Step number `step` is done."""
        if self._profile is not None and step + 1 not in self.steps:
            self.close()

    def close(self) -> None:
        """Writes the trace that is being taken, if any."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        running.export_chrome_trace(str(self.folder / f"trace_step{self._first}_rank{self.rank}.json"))
