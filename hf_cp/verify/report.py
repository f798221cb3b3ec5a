"""The report of a verification: what one process and the group found, whether they agree, and the likely cause if not.

All processes get the same report, and so the same verdict: that of the process that is farthest off.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from hf_cp.output import OK, PROBLEM, Table, Verdict, to_json
from hf_cp.verify.compare import EXACT, Comparison, Settings
from hf_cp.verify.errors import Worst, excess
from hf_cp.verify.runs import Sample


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

    `cp1` is one process with the untouched model on the whole sample (in fp32 if the weights are bf16 or fp16), `cpN`
    the group. The relative error of a tensor is max|difference| / max|reference|.

    Args:
        cp_size, ring_degree, ulysses_degree, world_size (`int`): the processes.
        dtype (`str`): of the weights.
        document_lengths (`tuple[int, ...]`): of the sample.
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

    @property
    def severity(self) -> tuple[int, float]:
        """Orders the reports of several processes: comparisons that fail, and the largest `difference / allowed`."""
        failed = sum(not check.ok for check in self.checks)
        return failed, max(excess(check.difference, check.allowed) for check in self.checks)

    def to_json(self) -> str:
        """All fields and the verdict as a JSON object."""
        return to_json({**dataclasses.asdict(self), "passed": self.passed})

    def comparison(self) -> Table:
        """One row for each check."""
        size, unit = f"cp {self.cp_size}", "process" if self.cp_size == 1 else "processes"
        title = (
            f"{len(self.document_lengths)} documents, {sum(self.document_lengths):,} tokens in one packed sample, "
            f"{self.dtype}; the untouched model in 1 process against {self.cp_size} {unit} "
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


def build_report(sample: Sample, found: Comparison, settings: Settings) -> VerifyReport:
    """The numbers of this process and its checks, without a diagnosis."""
    return VerifyReport(
        cp_size=sample.mesh.cp_size,
        ring_degree=sample.mesh.ring_size,
        ulysses_degree=sample.mesh.ulysses_size,
        world_size=sample.mesh.world_size,
        dtype=str(sample.dtype).removeprefix("torch."),
        document_lengths=sample.layout.doc_lengths,
        num_parameters=len(sample.parameters),
        num_targets_cp1=sample.num_targets,
        num_targets_cpN=found.num_targets,
        loss_cp1=found.reference.losses[0],
        loss_cpN=found.group.losses[0],
        grad_norm_cp1=found.reference.grad_norm,
        grad_norm_cpN=found.group.grad_norm,
        worst_gradient_relative_error=found.gradient.error,
        worst_gradient_name=found.gradient.name,
        step_losses_cp1=found.reference.losses,
        step_losses_cpN=found.group.losses,
        loss_drift=found.errors.loss_drift,
        worst_update_relative_error=found.update.error,
        worst_update_name=found.update.name,
        update_drift=found.errors.update_drift,
        checks=(*_checks(sample, found, settings), *_own_code_checks(sample, found, settings)),
    )


def _checks(sample: Sample, found: Comparison, settings: Settings) -> list[Check]:
    """The group against the untouched model."""
    allowed, errors = found.allowed, found.errors
    first, second = sample.num_targets, found.num_targets
    losses = zip(found.reference.losses, found.group.losses, errors.losses, strict=True)
    norms = (f"{found.reference.grad_norm:.7f}", f"{found.group.grad_norm:.7f}")
    leaked = sum(leak.others + leak.past for leak in found.leaks)
    blind = sum(not leak.reached for leak in found.leaks)
    steps = f"{settings.steps} step{'s' if settings.steps > 1 else ''}"
    drift = errors.update_drift
    return [
        Check("targets", f"{first:,}", f"{second:,}", float(abs(first - second)), 0.0),
        Check("logits of every token", "", "", float(found.logits.max()), allowed.logits),
        *(Check(f"loss, step {number}", f"{cp1:.7f}", f"{cpn:.7f}", error, allowed.loss)
          for number, (cp1, cpn, error) in enumerate(losses, 1)),
        Check("gradient norm", *norms, errors.grad_norm, allowed.grad_norm),
        Check(f"worst of {len(sample.parameters)} gradients", "", "", found.gradient.error, found.gradient.allowed),
        Check(f"worst update after {steps}", "", "", found.update.error, found.update.allowed),
        Check("drift of all updates", "", f"{drift:+.1e}", abs(drift), allowed.update_drift),
        Check(f"processes apart after {steps}", "", "", found.apart.distance, 0.0),
        Check("tokens that see what they must not", "0", str(leaked), float(leaked), 0.0),
        Check("probes that see nothing", "0", str(blind), float(blind), 0.0),
    ]  # fmt: skip


def _own_code_checks(sample: Sample, found: Comparison, settings: Settings) -> list[Check]:
    """Our code in one process: against the untouched model, and against the group (without the same loss cast)."""
    alone = Worst.of(found.alone_gradients, found.allowed.gradients)
    checks = [
        Check("our code in 1 process: logits", "", "", float(found.alone_logits.max()), found.allowed.logits),
        Check("our code in 1 process: gradients", "", "", alone.error, alone.allowed),
    ]
    if sample.is_low:  # the order of a sum shows in 16 bits
        return checks
    is_exact = sample.dtype == torch.float64
    allowed_loss, allowed = (EXACT, EXACT) if is_exact else (settings.loss_tolerance, settings.gradient_tolerance)
    return [
        *checks,
        Check("our code, split: loss", "", "", found.split_loss, allowed_loss),
        Check("our code, split: gradients", "", "", max(found.split_gradients.values()), allowed),
    ]
