"""What a training run is, in one line: the processes, how rows are split, which engine and kernel really run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import context_parallel_state
from hf_cp.sequence.sample import SAMPLE_KEY

WHOLE_ROWS = "none"  # the layout of a run that splits nothing


@dataclass(frozen=True)
class RunInfo:
    """A run, known once its first micro-step has shown which engine and kernel are used.

    Args:
        dp, ring, ulysses (`int`): the mesh.
        layout, engine, kernel (`str`): how rows are split, how K/V travel over the ring axis in the first row, and
            what computes; "none" where nothing is split.
        max_tokens (`int`, *optional*): the longest row; `None` where rows are not packed.
        rows_per_step (`int`): rows (documents, if they are not packed) that an optimizer step sees.
        first_step (`int`): number of the run's first optimizer step, above 1 if it goes on from a checkpoint.
        device (`str`): of rank 0.
    """

    dp: int
    ring: int
    ulysses: int
    layout: str
    engine: str
    kernel: str
    max_tokens: int | None
    rows_per_step: int
    first_step: int
    device: str

    @property
    def cp_size(self) -> int:
        return self.ring * self.ulysses

    @property
    def world_size(self) -> int:
        return self.dp * self.cp_size

    def __str__(self) -> str:
        rows = "rows of any length"
        if self.max_tokens is not None:
            rows = f"rows of up to {self.max_tokens:,} tokens ({-(-self.max_tokens // self.cp_size):,} a rank)"
        plural = "" if self.rows_per_step == 1 else "s"
        of_a_step = f"{self.rows_per_step:,} document{plural}"
        if self.max_tokens is not None:
            of_a_step = f"{self.rows_per_step:,} row{plural} (up to {self.rows_per_step * self.max_tokens:,} tokens)"
        return (
            f"hf_cp: dp {self.dp} x ring {self.ring} x ulysses {self.ulysses} | layout {self.layout} | "
            f"engine {self.engine} | kernel {self.kernel} | {rows} | {of_a_step} per optimizer step"
        )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any],
        *,
        mesh: ContextParallelMesh,
        collator: DataCollatorForContextParallel,
        rows_per_step: int,
        first_step: int,
        device: str,
    ) -> RunInfo:
        """Of a run whose model has seen `batch`."""
        state, sample = context_parallel_state(model), batch.get(SAMPLE_KEY)
        return cls(
            mesh.dp_size,
            mesh.ring_size,
            mesh.ulysses_size,
            layout=WHOLE_ROWS if sample is None else sample.layout.layout,
            engine="none" if state is None or mesh.ring_size == 1 else state.comm.progress.engine,
            kernel="that of the model" if state is None else state.comm.progress.kernel,
            max_tokens=collator.max_tokens,
            rows_per_step=rows_per_step,
            first_step=first_step,
            device=device,
        )
