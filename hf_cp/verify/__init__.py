"""The proof that a split run computes what one process computes, on the user's own model and documents.

One packed row is trained on from the same parameters, with plain SGD, by the untouched Hugging Face model in one
process, by our code in one process and by the group (`verify_runs`). Logits of every token, the loss, the number of
targets and every gradient of every trainable parameter are compared; after `steps` steps every update and every loss.
A token of a document is exchanged, to see that no other document notices. What fails is diagnosed.

A trainable parameter that is all zeros is filled with seeded random numbers first: with LoRA's ordinary B = 0 every
gradient of A is zero, and comparing zeros proves nothing. Dropout is off meanwhile. The parameters, gradients and
modes that the model came with are put back exactly. All processes get the same report: that of the process that is
farthest off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from hf_cp.distributed.reduce import gather_over_world
from hf_cp.models.patch import context_parallel_state
from hf_cp.verify.diagnosis import diagnose
from hf_cp.verify.errors import Worst
from hf_cp.verify.evidence import evidence
from hf_cp.verify.measure import EXACT, Measured, Settings
from hf_cp.verify.report import Check, VerifyReport, worst_of_all_processes
from hf_cp.verify.runs import LOW_PRECISION, Row, prepared

__all__ = ["VerifyReport", "verify_context_parallel"]


def verify_context_parallel(
    model: torch.nn.Module,
    documents: Sequence[Mapping[str, Sequence[int]]],
    *,
    steps: int = 3,
    learning_rate: float = 0.01,
    seed: int = 0,
    loss_tolerance: float = 1e-5,
    gradient_tolerance: float = 1e-4,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares one process on a whole packed row with the group on its shares; every process must call it.

    Args:
        model (`torch.nn.Module`): patched with [`apply_context_parallel`], with or without adapters, not yet wrapped
            by DeepSpeed, FSDP or DDP; equal on all processes. It is put back as it came.
        documents (sequence of mappings): `input_ids` and, if not all tokens are targets, unshifted `labels` (-100
            where there is no target). All documents together are the row, which one process must be able to hold.
        steps (`int`): SGD steps; the first one gives the gradients.
        learning_rate (`float`): of the SGD steps.
        seed (`int`): of the random numbers that replace all-zero trainable parameters.
        loss_tolerance (`float`): allowed relative difference of a loss.
        gradient_tolerance (`float`): allowed relative difference of logits, of a gradient, of an update and of the
            gradient norm; a tenth of it for the drift of the updates. Both tolerances are for fp32 and fp64. If a
            weight is bf16 or fp16, the group may be twice as far from fp32 as the untouched model is.
        progress (callable, *optional*): told in a line what is computed next.

    Raises:
        ValueError: the model is not patched, is wrapped or has nothing to train; the documents hold no target.
        RuntimeError: the processes do not hold the same parameters.
    """
    if context_parallel_state(model) is None:
        raise ValueError(
            f"The comparison needs a patched model, but {type(model).__name__} is not context-parallel.\n"
            "  Call apply_context_parallel(model, config) first; with cp_size 1 use a config with force=True."
        )
    settings = Settings(steps, learning_rate, loss_tolerance, gradient_tolerance)
    row = Row.of(model, documents)
    with prepared(model, row.parameters, seed):
        measured = Measured.of(row, settings, progress or (lambda text: None))
        report = build_report(row, measured, settings)
        failed = sum(not everywhere[0] for everywhere in gather_over_world([float(report.passed)], mesh=row.mesh))
        if failed:  # on any process: all take part in what follows
            cause, diagnosis = diagnose(evidence(row, measured))
            if not report.passed:
                report = dataclasses.replace(report, cause=cause, diagnosis=diagnosis)
    return worst_of_all_processes(report, row.mesh)


def build_report(row: Row, measured: Measured, settings: Settings) -> VerifyReport:
    """The numbers of this process and its checks, without a diagnosis."""
    m = measured
    return VerifyReport(
        cp_size=row.mesh.cp_size,
        ring_degree=row.mesh.ring_size,
        ulysses_degree=row.mesh.ulysses_size,
        world_size=row.mesh.world_size,
        dtype=str(row.dtype).removeprefix("torch."),
        document_lengths=row.layout.doc_lengths,
        num_parameters=len(row.parameters),
        num_targets_cp1=row.num_targets,
        num_targets_cpN=m.num_targets,
        loss_cp1=m.reference.losses[0],
        loss_cpN=m.group.losses[0],
        grad_norm_cp1=m.reference.grad_norm,
        grad_norm_cpN=m.group.grad_norm,
        worst_gradient_relative_error=m.gradient.error,
        worst_gradient_name=m.gradient.name,
        step_losses_cp1=m.reference.losses,
        step_losses_cpN=m.group.losses,
        loss_drift=m.errors.loss_drift,
        worst_update_relative_error=m.update.error,
        worst_update_name=m.update.name,
        update_drift=m.errors.update_drift,
        checks=(*_checks(row, m, settings), *_own_code_checks(row, m, settings)),
    )


def _checks(row: Row, m: Measured, settings: Settings) -> list[Check]:
    """The group against the untouched model."""
    first, second = row.num_targets, m.num_targets
    pairs = zip(m.reference.losses, m.group.losses, m.errors.losses, strict=True)
    norms = (m.reference.grad_norm, m.group.grad_norm)
    leaked = sum(leak.others + leak.past for leak in m.leaks)
    blind = sum(not leak.reached for leak in m.leaks)
    steps = f"{settings.steps} step{'s' if settings.steps > 1 else ''}"
    checks = [
        Check("targets", f"{first:,}", f"{second:,}", float(abs(first - second)), 0.0),
        Check("logits of every token", "", "", _largest(m.tokens.logits), m.allowed.logits),
    ]
    for number, (cp1, cpn, error) in enumerate(pairs, 1):
        checks.append(Check(f"loss, step {number}", f"{cp1:.7f}", f"{cpn:.7f}", error, m.allowed.loss))
    return [
        *checks,
        Check("gradient norm", *(f"{norm:.7f}" for norm in norms), m.errors.grad_norm, m.allowed.grad_norm),
        Check(f"worst of {len(row.parameters)} gradients", "", "", m.gradient.error, m.gradient.allowed),
        Check(f"worst update after {steps}", "", "", m.update.error, m.update.allowed),
        Check("drift of all updates", "", f"{m.errors.update_drift:+.1e}", abs(m.errors.update_drift),
              m.allowed.update_drift),
        Check(f"processes apart after {steps}", "", "", m.distance_apart, 0.0),
        Check("tokens that see what they must not", "0", str(leaked), float(leaked), 0.0),
        Check("probes that see nothing", "0", str(blind), float(blind), 0.0),
    ]  # fmt: skip


def _own_code_checks(row: Row, m: Measured, settings: Settings) -> list[Check]:
    """Our code in one process: against the untouched model, and against the group (without the same loss cast)."""
    gradient = Worst.of(m.alone_errors.gradients, m.allowed.gradients)
    checks = [
        Check("our code in 1 process: logits", "", "", _largest(m.alone_tokens.logits), m.allowed.logits),
        Check("our code in 1 process: gradients", "", "", gradient.error, gradient.allowed),
    ]
    if row.dtype in LOW_PRECISION:
        return checks
    tolerances = (settings.loss_tolerance, settings.gradient_tolerance)
    loss_tolerance, gradient_tolerance = (EXACT, EXACT) if row.dtype == torch.float64 else tolerances
    split = Worst.of(m.split_errors.gradients, dict.fromkeys(row.parameters, 1.0))
    return [
        *checks,
        Check("our code, split: loss", "", "", m.split_errors.losses[0], loss_tolerance),
        Check("our code, split: gradients", "", "", split.error, gradient_tolerance),
    ]


def _largest(errors: torch.Tensor) -> float:
    """The largest error; NaN stays NaN."""
    return float(errors.max())
