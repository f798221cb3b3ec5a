"""The report of a verification: what one process and the group found, whether they agree, and the likely cause if not.

All processes get the same report, and so the same verdict: of each number, that of the process that is farthest off.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.parallel.reduce import sum_over_world

__all__ = ["VerifyReport", "gather_over_world", "nan_last", "worst_of_all_processes"]


@dataclass(frozen=True)
class VerifyReport:
    """What both runs gave, and how far apart they are.

    The relative error of a tensor is max|difference| / max|reference|.
    """

    cp_size: int
    ring_degree: int
    ulysses_degree: int
    dtype: str
    document_lengths: tuple[int, ...]
    num_parameters: int
    num_targets_cp1: int
    num_targets_cpN: int
    loss_cp1: float
    loss_cpN: float
    grad_norm_cp1: float
    grad_norm_cpN: float
    worst_gradient_relative_error: float
    worst_gradient_name: str
    step_losses_cp1: tuple[float, ...]
    step_losses_cpN: tuple[float, ...]
    worst_update_relative_error: float
    worst_update_name: str
    loss_tolerance: float
    gradient_tolerance: float

    @property
    def rows(self) -> tuple[tuple[str, str, str, float, float], ...]:
        """(what, cp 1, cp N, difference, allowed difference), one for each comparison."""
        loss, gradient = self.loss_tolerance, self.gradient_tolerance
        targets = abs(self.num_targets_cp1 - self.num_targets_cpN)
        norms = _relative(self.grad_norm_cp1, self.grad_norm_cpN)
        rows = [
            ("targets", f"{self.num_targets_cp1:,}", f"{self.num_targets_cpN:,}", float(targets), 0.0),
            ("gradient norm", f"{self.grad_norm_cp1:.7f}", f"{self.grad_norm_cpN:.7f}", norms, gradient),
            (f"worst of {self.num_parameters} gradients", "", "", self.worst_gradient_relative_error, gradient),
            ("worst parameter update", "", "", self.worst_update_relative_error, gradient),
        ]
        losses = zip(self.step_losses_cp1, self.step_losses_cpN, strict=True)
        steps = [
            (f"loss, step {i}", f"{a:.7f}", f"{b:.7f}", _relative(a, b), loss) for i, (a, b) in enumerate(losses, 1)
        ]
        return (rows[0], *steps, *rows[1:])

    @property
    def passed(self) -> bool:
        """Whether every difference is within what is allowed; a NaN is not."""
        return all(difference <= allowed for *_, difference, allowed in self.rows)

    def to_json(self) -> str:
        """All fields and the verdict as a JSON object."""
        return json.dumps({**dataclasses.asdict(self), "passed": self.passed}, indent=2)

    def table(self) -> str:
        """The comparison as text, with the likely cause where it fails."""
        lines = [
            f"{len(self.document_lengths)} documents, {sum(self.document_lengths):,} tokens in one row, {self.dtype}; "
            f"1 process against {self.cp_size} (ring {self.ring_degree} x Ulysses {self.ulysses_degree})",
            f"{'':24}{'cp 1':>14}{f'cp {self.cp_size}':>14}{'difference':>12}{'allowed':>9}",
        ]
        for name, cp1, cpn, difference, allowed in self.rows:
            mark = "ok" if difference <= allowed else "FAILED"
            lines.append(f"{name:24}{cp1:>14}{cpn:>14}{difference:>12.1e}{allowed:>9.0e}  {mark}")
        if self.passed:
            return "\n".join([*lines, f"PASSED: {self.cp_size} processes compute what one process computes."])
        return "\n".join([*lines, f"FAILED: worst gradient {self.worst_gradient_name}. {self._hint()}"])

    def _hint(self) -> str:
        """What a failure of this form usually is."""
        ratio = self.grad_norm_cpN / self.grad_norm_cp1 if self.grad_norm_cp1 else math.nan
        for factor, text in ((self.cp_size, "cp_size"), (1 / self.cp_size, "1/cp_size")):
            if abs(ratio / factor - 1) < 1e-3:
                return f"Gradients are {text} times too large: the loss is divided by the wrong number of targets."
        if self.num_targets_cp1 != self.num_targets_cpN:
            return "Targets were lost or counted twice: look at the labels and at the collator."
        return f"Gradient norm ratio {ratio:.6f}: look at positions and labels, then at the attention's backward pass."


def worst_of_all_processes(report: VerifyReport, names: list[str], mesh: ContextParallelMesh) -> VerifyReport:
    """Each number as the process has it that is farthest off, so that all processes reach the same verdict."""
    found = [
        (report.num_targets_cp1, report.num_targets_cpN),
        (report.grad_norm_cp1, report.grad_norm_cpN),
        *zip(report.step_losses_cp1, report.step_losses_cpN, strict=True),
    ]
    errors = [
        (report.worst_gradient_relative_error, names.index(report.worst_gradient_name)),
        (report.worst_update_relative_error, names.index(report.worst_update_name)),
    ]
    everywhere = gather_over_world([float(x) for numbers in (*found, *errors) for x in numbers], mesh)
    pairs = [[values[i : i + 2] for values in everywhere] for i in range(0, len(everywhere[0]), 2)]  # [number][rank]
    targets, norms, *losses = (max(ranks, key=lambda pair: nan_last(_relative(*pair))) for ranks in pairs[:-2])
    gradient, update = (max(ranks, key=lambda error: nan_last(error[0])) for ranks in pairs[-2:])
    cp1, cpn = (tuple(values) for values in zip(*losses, strict=True))
    return dataclasses.replace(
        report,
        num_targets_cp1=int(targets[0]),
        num_targets_cpN=int(targets[1]),
        loss_cp1=cp1[0],
        loss_cpN=cpn[0],
        grad_norm_cp1=norms[0],
        grad_norm_cpN=norms[1],
        worst_gradient_relative_error=gradient[0],
        worst_gradient_name=names[int(gradient[1])],
        step_losses_cp1=cp1,
        step_losses_cpN=cpn,
        worst_update_relative_error=update[0],
        worst_update_name=names[int(update[1])],
    )


def gather_over_world(values: list[float], mesh: ContextParallelMesh) -> list[list[float]]:
    """`values` of every process, by rank. Each fills in its own row of zeros, so the sum is exact."""
    rows = [values if rank == mesh.rank else [0.0] * len(values) for rank in range(mesh.world_size)]
    total = sum_over_world([value for row in rows for value in row], mesh=mesh)
    return [total[i : i + len(values)] for i in range(0, len(total), len(values))]


def nan_last(error: float) -> float:
    """The error as a key for `max`: NaN is larger than every number."""
    return math.inf if math.isnan(error) else error


def _relative(reference: float, found: float) -> float:
    return abs(found - reference) / abs(reference) if reference else abs(found - reference)
