"""The report of a verification: what one process and the group found, whether they agree, and the likely cause if not.

All processes get the same report, and so the same verdict: that of the process that is farthest off.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from dataclasses import dataclass

from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.reduce import gather_over_world, sum_over_world
from hf_cp.output import OK, PROBLEM, Table, Verdict, to_json
from hf_cp.verify.errors import excess


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name (`str`): what is compared.
        cp1, cpN (`str`): both values, where they can be shown.
        difference, allowed (`float`): it passes if the difference is no larger; a NaN does not.
    """

    name: str
    cp1: str
    cpN: str
    difference: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether it passes."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class VerifyReport:
    """What both runs gave, how far apart they are and how far they may be.

    `cp1` is one process with the untouched model on the whole row (in fp32 if the weights are bf16 or fp16), `cpN` the
    group. The relative error of a tensor is max|difference| / max|reference|.

    Args:
        cp_size, ring_degree, ulysses_degree, world_size (`int`): the processes.
        dtype (`str`): of the weights.
        document_lengths (`tuple[int, ...]`): of the row.
        num_parameters (`int`): trainable ones, each of which was compared.
        step_losses_cp1, step_losses_cpN (`tuple[float, ...]`): by optimizer step; `loss_...` is the first.
        loss_drift (`float`): signed mean of the relative differences of the losses.
        update_drift (`float`): by how much, as a share, all updates together are too large.
        checks (`tuple[Check, ...]`): every comparison.
        cause, diagnosis (`str`): name of the likely cause of a failure, and the sentence for the user; else "".
    """

    cp_size: int
    ring_degree: int
    ulysses_degree: int
    world_size: int
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
    loss_drift: float
    worst_update_relative_error: float
    worst_update_name: str
    update_drift: float
    checks: tuple[Check, ...]
    cause: str = ""
    diagnosis: str = ""

    @property
    def passed(self) -> bool:
        """Whether every difference is within what is allowed."""
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """One line: that both compute the same, or what fails worst and why."""
        if self.passed:
            return Verdict(OK, f"{self.cp_size} processes compute what one process computes.")
        failed = [check.name for check in self.checks if not check.ok]
        return Verdict(
            PROBLEM,
            f"{len(failed)} of {len(self.checks)} comparisons ({failed[0]}{', ...' if failed[1:] else ''}); worst "
            f"gradient {self.worst_gradient_name}. {self.diagnosis}".rstrip(),
        )

    def to_json(self) -> str:
        """All fields and the verdict as a JSON object."""
        return to_json({**dataclasses.asdict(self), "passed": self.passed})

    def comparison(self) -> Table:
        """One row for each check."""
        size, unit = f"cp {self.cp_size}", "process" if self.cp_size == 1 else "processes"
        title = (
            f"{len(self.document_lengths)} documents, {sum(self.document_lengths):,} tokens in one row, {self.dtype}; "
            f"the untouched model in 1 process against {self.cp_size} {unit} "
            f"(ring {self.ring_degree} x Ulysses {self.ulysses_degree})"
        )
        rows = [
            (c.name, c.cp1, c.cpN, f"{c.difference:.1e}", f"{c.allowed:.0e}", "ok" if c.ok else "FAILED")
            for c in self.checks
        ]
        return Table(title, ("", "cp 1", size, "difference", "allowed", ""), rows)

    def table(self) -> str:
        """The comparison as plain text, with the verdict and the likely cause where it fails."""
        return f"{self.comparison().text()}\n{self.verdict}"


def worst_of_all_processes(report: VerifyReport, mesh: ContextParallelMesh) -> VerifyReport:
    """The report of the process that is farthest off, on every process. All must call it."""
    failed = sum(not check.ok for check in report.checks)
    worst = max(excess(check.difference, check.allowed) for check in report.checks)
    by_rank = gather_over_world([failed, min(worst, sys.float_info.max)], mesh=mesh)
    source = max(range(len(by_rank)), key=by_rank.__getitem__)
    content = list(pickle.dumps(report)) if mesh.rank == source else []
    (size,) = sum_over_world([len(content)], mesh=mesh)
    # all others add zeros, so the sum is the content
    return pickle.loads(bytes(sum_over_world(content or [0] * size, mesh=mesh)))


def apart(errors: list[float]) -> float:
    """How far the largest is from the smallest; NaN if one is NaN."""
    return math.nan if any(map(math.isnan, errors)) else max(errors) - min(errors)
