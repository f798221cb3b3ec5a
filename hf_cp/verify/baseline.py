"""A baseline of one process, kept in a small file and replayed later: after an update, with another kernel, split.

The untouched model is run on one row by one process, in fp32 if its weights are bf16 or fp16. The file keeps the
documents, the losses of the steps, a norm and one projection of every token's logits, and a norm and 16 projections of
every gradient. A projection of a tensor on random signs s has E <s, difference>^2 = |difference|^2, so their root mean
square measures a difference without keeping the tensor. The signs follow from the tensor's name.

A replay runs the untouched model of today and, where the model is patched, the group. If the first is off, the cause
is outside of this package (what changed in the fingerprint is named); if only the second is off, it is inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_cp.distributed.collectives import sum_over_cp
from hf_cp.models.patch import context_parallel_state
from hf_cp.output import OK, PROBLEM, Table, Verdict, to_json
from hf_cp.verify.errors import Allowed, Errors, Worst, logits_errors, relative, relative_size, token_losses_of
from hf_cp.verify.fingerprint import Change, Fingerprint
from hf_cp.verify.measure import EXACT
from hf_cp.verify.report import Check, worst_of_all_processes
from hf_cp.verify.runs import LOW_PRECISION, Row, Run, count_targets, in_fp32, prepared, run_sgd

FORMAT = 1
NUM_PROJECTIONS = 16
ESTIMATE_FACTOR = 1.5  # a difference that 16 projections estimate, beside one that was measured


@dataclass(frozen=True)
class Recipe:
    """How the model and the run were made; a replay makes them alike."""

    dtype: str
    layers: int | None = None
    lora: int | None = None
    seed: int = 0
    steps: int = 3
    learning_rate: float = 0.01


@dataclass(frozen=True)
class Numbers:
    """What one run gave.

    Args:
        losses (`list[float]`): by step.
        num_targets (`int`): of the row.
        grad_norm (`float`): of all gradients of the first step.
        logits (`list[list[float]]`): by token, the norm and a projection.
        gradients (`dict`): name -> the norm and the projections.
    """

    losses: list[float]
    num_targets: int
    grad_norm: float
    logits: list[list[float]]
    gradients: dict[str, list[float]]

    @classmethod
    def of(cls, run: Run, num_targets: int, logits: torch.Tensor) -> Numbers:
        """`logits` are [num_tokens, 2], of [`summarise_logits`]."""
        gradients = {name: summarise(name, gradient) for name, gradient in run.gradients.items()}
        return cls(list(run.losses), num_targets, run.grad_norm, logits.tolist(), gradients)


@dataclass(frozen=True)
class Baseline:
    """The file: what was run, on what, what came out, and how far a replay may be off."""

    created: str
    recipe: Recipe
    fingerprint: Fingerprint
    documents: list[dict[str, list[int]]]
    numbers: Numbers
    allowed_loss: float
    allowed_grad_norm: float
    allowed_logits: float
    allowed_gradients: dict[str, float]
    format: int = FORMAT

    def save(self, path: str | os.PathLike) -> None:
        """One line of JSON; a file that is there is replaced."""
        Path(path).write_text(json.dumps(json.loads(to_json(self)), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Baseline:
        """Raises ValueError if the file is no baseline of this version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            found = content["format"]
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
            raise ValueError(f"{path} is no baseline. Give a file that was written with --save-baseline.") from None
        if found != FORMAT:
            raise ValueError(f"{path} has format {found}, this version reads {FORMAT}. Save the baseline again.")
        parts = {"recipe": Recipe, "fingerprint": Fingerprint, "numbers": Numbers}
        return cls(**content | {name: kind(**content[name]) for name, kind in parts.items()})


@dataclass(frozen=True)
class ReplayReport:
    """A replay against its baseline.

    Args:
        created (`str`): when the baseline was made.
        changed_inputs, changed_setup (`tuple[Change, ...]`): what is not as it was then.
        untouched (`tuple[Check, ...]`): the untouched model of today in one process.
        group (`tuple[Check, ...]`): the patched model; empty if it is not patched.
    """

    created: str
    changed_inputs: tuple[Change, ...]
    changed_setup: tuple[Change, ...]
    untouched: tuple[Check, ...]
    group: tuple[Check, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every comparison, the untouched model's first."""
        return self.untouched + self.group

    @property
    def passed(self) -> bool:
        """Whether the inputs are those of the baseline and every difference is within what it allows."""
        return not self.changed_inputs and all(check.ok for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """One line that names what changed."""
        changes = "; ".join(map(str, self.changed_setup)) or "nothing"
        if self.changed_inputs:
            named = "; ".join(map(str, self.changed_inputs))
            text = f"other inputs than those of the baseline ({named}): the numbers cannot be compared."
            return Verdict(PROBLEM, f"{text} Save a new one.")
        if not all(check.ok for check in self.untouched):
            text = f"the untouched model in one process is not what it was on {self.created}."
            return Verdict(PROBLEM, f"{text} Changed since: {changes}.")
        if not self.passed:
            text = f"the untouched model is what it was, our code is not. Changed since {self.created}: {changes}. For"
            return Verdict(PROBLEM, f"{text} a diagnosis run `hf-cp verify` on this model without --baseline.")
        return Verdict(OK, f"the numbers of the baseline of {self.created}. Changed since: {changes}.")

    def tables(self) -> list[Table]:
        """What changed, and every comparison."""
        changes = [(change.name, change.before, change.now) for change in (*self.changed_inputs, *self.changed_setup)]
        rows = [
            (c.name, c.cp1, c.cpN, f"{c.difference:.1e}", f"{c.allowed:.0e}", "ok" if c.ok else "FAILED")
            for c in self.checks
        ]
        compared = Table("Compared", ("", "baseline", "now", "difference", "allowed", ""), rows)
        return [Table("Changed", ("", "baseline", "now"), changes), compared] if changes else [compared]


def make_baseline(
    model: torch.nn.Module,
    documents: Sequence[Mapping[str, Sequence[int]]],
    recipe: Recipe,
    *,
    created: str,
    loss_tolerance: float = 1e-5,
    gradient_tolerance: float = 1e-4,
    tokenizer: Any = None,
) -> Baseline:
    """Runs the untouched model in this process.

    Args:
        model (`torch.nn.Module`): not patched; put back as it came.
        documents (sequence of mappings): see [`verify_context_parallel`].
        recipe (`Recipe`): how the model was made; its seed and steps are used here.
        created (`str`): the time, to be shown later.

    Raises:
        ValueError: the model has nothing to train, or the documents hold no target.
    """
    row = Row.of(model, documents)
    is_low, own = row.dtype in LOW_PRECISION, None
    with prepared(model, row.parameters, recipe.seed):
        fingerprint = Fingerprint.of(model, documents, tokenizer=tokenizer)
        with in_fp32(model) if is_low else contextlib.nullcontext():
            run, logits = _run(row.untouched, row, recipe), row.untouched_logits()
        allowed = Allowed.fixed(
            row.parameters,
            loss=loss_tolerance,
            gradient=gradient_tolerance,
            logits=EXACT if row.dtype == torch.float64 else gradient_tolerance,
        )
        if is_low:
            own = _run(row.untouched, row, recipe)
            allowed = _low_precision(row, run, own, logits)
    return Baseline(
        created=created,
        recipe=recipe,
        fingerprint=fingerprint,
        documents=[_plain(document) for document in documents],
        numbers=Numbers.of(run, row.num_targets, summarise_logits(logits)),
        allowed_loss=allowed.loss,
        allowed_grad_norm=allowed.grad_norm,
        allowed_logits=allowed.logits,
        allowed_gradients=allowed.gradients,
    )


def replay_baseline(model: torch.nn.Module, baseline: Baseline, *, tokenizer: Any = None) -> ReplayReport:
    """Runs today's model, patched or not, and compares it with the baseline; every process must call it.

    Args:
        model (`torch.nn.Module`): made by `baseline.recipe`; put back as it came.
        baseline (`Baseline`): of [`Baseline.load`].
    """
    row, recipe = Row.of(model, baseline.documents), baseline.recipe
    is_patched = context_parallel_state(model) is not None
    group: tuple[Check, ...] = ()
    with prepared(model, row.parameters, recipe.seed):
        run = _run(row.untouched, row, recipe)
        numbers = Numbers.of(run, row.num_targets, summarise_logits(row.untouched_logits()))
        untouched = _checks("untouched", baseline, numbers)
        if is_patched:
            run = _run(row.group, row, recipe)
            local = summarise_logits(row.group_logits())
            in_order = torch.stack([row.in_row_order(column) for column in local.unbind(1)], dim=1)
            num_targets = int(sum_over_cp(count_targets(row.share), row.mesh))
            group = _checks(f"cp {row.mesh.cp_size}", baseline, Numbers.of(run, num_targets, in_order))
        fingerprint = Fingerprint.of(model, baseline.documents, tokenizer=tokenizer)
    report = ReplayReport(
        created=baseline.created,
        changed_inputs=tuple(fingerprint.changed_inputs(baseline.fingerprint)),
        changed_setup=tuple(fingerprint.changed_setup(baseline.fingerprint)),
        untouched=untouched,
        group=group,
    )
    return worst_of_all_processes(report, row.mesh) if is_patched else report


def summarise(name: str, tensor: torch.Tensor) -> list[float]:
    """Norm and projections of a tensor, seen as a matrix M: u' M v, random signs u and v follow from `name`."""
    matrix = tensor.detach().double().reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    rows = _signs(f"{name}/rows", NUM_PROJECTIONS, matrix.shape[0]).to(matrix.device)
    columns = _signs(f"{name}/columns", NUM_PROJECTIONS, matrix.shape[1]).to(matrix.device)
    return [float(matrix.norm()), *((rows @ matrix) * columns).sum(1).tolist()]


def summarise_logits(logits: torch.Tensor) -> torch.Tensor:
    """fp64 [n, 2]: norm and projection of every token's logits [n, vocabulary]."""
    signs = _signs("logits", 1, logits.shape[-1])[0].to(logits.device)
    chunks = [chunk.double() for chunk in logits.split(1024)]
    return torch.cat([torch.stack([chunk.norm(dim=-1), chunk @ signs], dim=1) for chunk in chunks])


def _signs(name: str, count: int, size: int) -> torch.Tensor:
    """fp64 [count, size] of +1 and -1, from a hash: the same on every machine and with every version."""
    bits = np.frombuffer(hashlib.shake_128(name.encode()).digest(-(-count * size // 8)), dtype=np.uint8)
    signs = np.unpackbits(bits)[: count * size].reshape(count, size)
    return torch.from_numpy(signs.astype(np.float64)) * 2 - 1


def _checks(what: str, baseline: Baseline, now: Numbers) -> tuple[Check, ...]:
    before = baseline.numbers
    targets = (before.num_targets, now.num_targets)
    losses = [relative(a, b) for a, b in zip(before.losses, now.losses, strict=True)]
    checks = [
        Check(f"{what}: targets", f"{targets[0]:,}", f"{targets[1]:,}", float(abs(targets[0] - targets[1])), 0.0),
        Check(f"{what}: logits of every token", "", "", _logits_error(before, now), baseline.allowed_logits),
    ]
    for number, (first, second, error) in enumerate(zip(before.losses, now.losses, losses, strict=True), 1):
        checks.append(
            Check(f"{what}: loss, step {number}", f"{first:.7f}", f"{second:.7f}", error, baseline.allowed_loss)
        )
    norms = (before.grad_norm, now.grad_norm)
    shown = (f"{norm:.7f}" for norm in norms)
    checks.append(Check(f"{what}: gradient norm", *shown, relative(*norms), baseline.allowed_grad_norm))
    if before.gradients.keys() != now.gradients.keys():
        missing = len(before.gradients.keys() ^ now.gradients.keys())
        return (*checks, Check(f"{what}: parameters that the other lacks", "", "", float(missing), 0.0))
    worst = Worst.of(_gradient_errors(before, now), baseline.allowed_gradients)
    return (*checks, Check(f"{what}: gradient {worst.name}", "", "", worst.error, worst.allowed))


def _logits_error(before: Numbers, now: Numbers) -> float:
    """Largest difference of a token's norm or projection, over the largest norm."""
    if len(before.logits) != len(now.logits):
        return math.inf
    a, b = (torch.tensor(numbers.logits, dtype=torch.float64) for numbers in (before, now))
    return relative_size(float((b - a).abs().max()), float(a[:, 0].max()))


def _gradient_errors(before: Numbers, now: Numbers) -> dict[str, float]:
    """Root mean square of the projections' differences (and the difference of the norms), over the norm."""
    errors = {}
    for name, (norm, *projections) in before.gradients.items():
        found_norm, *found = now.gradients[name]
        squares = [(b - a) ** 2 for a, b in zip(projections, found, strict=True)]
        distance = max(math.sqrt(sum(squares) / len(squares)), abs(found_norm - norm))
        errors[name] = relative_size(distance, norm)
    return errors


def _low_precision(row: Row, reference: Run, own: Run, logits: torch.Tensor) -> Allowed:
    """Twice the untouched model's own error, in the measures that a replay uses."""
    found = row.untouched_logits()
    losses, found_losses = (token_losses_of(x, row.whole["shift_labels"][0]) for x in (logits, found))
    by_token = logits_errors(logits, found, scale=float(logits.abs().max()))
    allowed = Allowed.twice(
        Errors.between(reference, own, rms=True), by_token, (found_losses - losses).abs(), reference.losses[0]
    )
    before, now = summarise_logits(logits), summarise_logits(found)
    largest = relative_size(float((now - before).abs().max()), float(before[:, 0].max()))
    return dataclasses.replace(
        allowed,
        logits=2 * ESTIMATE_FACTOR * largest,
        gradients={name: ESTIMATE_FACTOR * error for name, error in allowed.gradients.items()},
    )


def _plain(document: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(map(int, document[name])) for name in ("input_ids", "labels") if name in document}


def _run(step: Callable, row: Row, recipe: Recipe) -> Run:
    return run_sgd(step, row.parameters, recipe.steps, recipe.learning_rate)
