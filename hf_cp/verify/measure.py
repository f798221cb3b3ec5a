"""Runs one row in all ways and measures how far the runs are apart.

Invariant: all processes make the same calls in the same order, whatever they find, so that none waits for another; and
no number is judged here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_cp.distributed.collectives import sum_over_cp
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.reduce import gather_over_world
from hf_cp.verify.errors import Allowed, Errors, Worst, logits_errors, token_losses_of
from hf_cp.verify.probes import Leak, probe_leaks
from hf_cp.verify.report import apart
from hf_cp.verify.runs import LOW_PRECISION, Row, Run, count_targets, in_fp32, run_sgd

EXACT = 1e-10  # fp64, where transformers' fp32 loss has no part


@dataclass(frozen=True)
class Settings:
    """How the comparison is made; the arguments of [`verify_context_parallel`]."""

    steps: int
    learning_rate: float
    loss_tolerance: float
    gradient_tolerance: float


@dataclass(frozen=True)
class Tokens:
    """By token of the row, in its order: errors of logits (over the largest logit) and of losses."""

    logits: torch.Tensor
    losses: torch.Tensor


@dataclass(frozen=True)
class Measured:
    """All runs of one row, and how far they are apart.

    Args:
        reference, group (`Run`): one process, untouched; the group.
        errors, alone_errors (`Errors`): of the group and of our code in one process, against `reference`.
        split_errors (`Errors`): of the group against our code in one process.
        tokens, alone_tokens (`Tokens`): errors by token.
        reference_logits (`torch.Tensor`): [num_tokens, vocabulary].
        copies (`torch.Tensor`): [num_tokens], processes that hold the token.
        leaks (`tuple[Leak, ...]`): of the probes.
        parameter_apart, distance_apart: the parameter that differs most between processes of the group, and how far.
        num_targets (`int`): of the group.
        allowed (`Allowed`): how large the errors may be.
    """

    reference: Run
    group: Run
    errors: Errors
    alone_errors: Errors
    split_errors: Errors
    tokens: Tokens
    alone_tokens: Tokens
    reference_logits: torch.Tensor
    copies: torch.Tensor
    leaks: tuple[Leak, ...]
    parameter_apart: str
    distance_apart: float
    num_targets: int
    allowed: Allowed

    @classmethod
    def of(cls, row: Row, settings: Settings, progress: Callable[[str], None]) -> Measured:
        """Runs everything; all processes must call it.

        Raises:
            RuntimeError: on every process, see [`check_equal_start`].
        """
        progress("1 of 4: the untouched model in one process")
        is_low = row.dtype in LOW_PRECISION
        with in_fp32(row.model) if is_low else contextlib.nullcontext():
            reference = _run(row.untouched, row, settings)
            logits = row.untouched_logits()
        check_equal_start(row, reference.losses[0], settings.loss_tolerance)
        losses = token_losses_of(logits, row.whole["shift_labels"][0])
        scale = float(logits.abs().max())
        allowed = Allowed.fixed(
            row.parameters,
            loss=settings.loss_tolerance,
            gradient=settings.gradient_tolerance,
            logits=EXACT if row.dtype == torch.float64 else settings.gradient_tolerance,
        )
        if is_low:
            allowed = _low_precision_baseline(row, settings, reference, logits, losses)
        progress("2 of 4: our code in one process")
        alone = run_sgd(row.alone, row.parameters, 1, settings.learning_rate)
        alone_logits = row.alone_logits()
        alone_tokens = Tokens(
            logits_errors(logits, alone_logits, scale=scale),
            (token_losses_of(alone_logits, row.whole["shift_labels"][0]) - losses).abs(),
        )
        del alone_logits
        progress(f"3 of 4: {row.mesh.cp_size} processes")
        group = _run(row.group, row, settings)
        parameter_apart, distance_apart = _ranks_apart(group, row.mesh)
        progress("4 of 4: exchanged tokens")
        local = row.group_logits()
        found_losses = row.in_row_order(row.group_token_losses())
        return cls(
            reference=reference,
            group=group,
            errors=Errors.between(reference, group, rms=is_low),
            alone_errors=Errors.between(_first_step(reference, settings), alone, rms=is_low),
            split_errors=Errors.between(alone, _first_step(group, settings)),
            tokens=Tokens(errors_in_row_order(row, logits, local, scale), (found_losses - losses).abs()),
            alone_tokens=alone_tokens,
            reference_logits=logits,
            copies=row.in_row_order(torch.ones(row.layout.local_length, device=local.device)),
            leaks=probe_leaks(row, local),
            parameter_apart=parameter_apart,
            distance_apart=distance_apart,
            num_targets=int(sum_over_cp(count_targets(row.share), row.mesh)),
            allowed=allowed,
        )

    @cached_property
    def scale(self) -> float:
        """The largest logit."""
        return float(self.reference_logits.abs().max())

    @property
    def gradient(self) -> Worst:
        """Of the group, in the first step."""
        return Worst.of(self.errors.gradients, self.allowed.gradients)

    @property
    def update(self) -> Worst:
        """Of the group, the total of all steps."""
        return Worst.of(self.errors.updates, self.allowed.updates)


def check_equal_start(row: Row, loss: float, tolerance: float) -> None:
    """The one-process loss must be the same in every process of a group, or they started from different models.

    All processes look at the losses of all, so that all raise or none.

    Raises:
        RuntimeError: with the parameter that differs most; or the loss is not finite in any process of a group, so
            there is nothing to compare with.
    """
    mesh = row.mesh
    losses = [values[0] for values in gather_over_world([loss], mesh=mesh)]
    groups = mesh.ranks.reshape(mesh.dp_size, -1).tolist()
    for members in groups:
        if not any(math.isfinite(losses[rank]) for rank in members):
            raise RuntimeError(
                f"The untouched model in one process has the loss {losses[members[0]]} on this row, in each of ranks "
                f"{members}: there is nothing to compare with.\n"
                "  Look for weights that are not finite, for a row without targets, and for a dtype that overflows."
            )
    spreads = [apart([losses[rank] for rank in members]) for members in groups]
    if all(spread <= tolerance * abs(losses[members[0]]) for spread, members in zip(spreads, groups, strict=True)):
        return
    tensors = dict(row.model.named_parameters())
    sums = gather_over_world([float(t.detach().double().sum()) for t in tensors.values()], mesh=mesh)
    for members, spread in zip(groups, spreads, strict=True):
        if not spread <= tolerance * abs(losses[members[0]]):
            by_name = [apart([sums[rank][i] for rank in members]) for i in range(len(tensors))]
            name = list(tensors)[max(range(len(by_name)), key=lambda i: _nan_first(by_name[i]))]
            raise RuntimeError(
                f"The processes do not hold the same model: the one-process loss of ranks {members} is "
                f"{', '.join(f'{losses[rank]:.7f}' for rank in members)}; {name} differs most.\n"
                "  Load the same weights everywhere and set the seed before adapters are made."
            )


def _run(step: Callable, row: Row, settings: Settings) -> Run:
    return run_sgd(step, row.parameters, settings.steps, settings.learning_rate)


def _first_step(run: Run, settings: Settings) -> Run:
    """As if the run had ended after one step."""
    updates = {name: gradient * -settings.learning_rate for name, gradient in run.gradients.items()}
    return Run(run.losses[:1], run.gradients, updates)


def _low_precision_baseline(
    row: Row, settings: Settings, reference: Run, logits: torch.Tensor, losses: torch.Tensor
) -> Allowed:
    """Twice the error that the untouched model makes in its own precision."""
    errors = Errors.between(reference, _run(row.untouched, row, settings), rms=True)
    found = row.untouched_logits()
    token_losses = (token_losses_of(found, row.whole["shift_labels"][0]) - losses).abs()
    by_token = logits_errors(logits, found, scale=float(logits.abs().max()))
    return Allowed.twice(errors, by_token, token_losses, reference.losses[0])


def errors_in_row_order(row: Row, logits: torch.Tensor, local: torch.Tensor, scale: float) -> torch.Tensor:
    """fp64 [num_tokens]: each process compares its own slots; padding has no reference."""
    slots = row.layout.indices(row.mesh.cp_rank).to(local.device)
    errors = logits_errors(logits[slots.clamp(min=0)], local, scale=scale)
    return row.in_row_order(errors.masked_fill(slots < 0, 0.0))


def _ranks_apart(run: Run, mesh: ContextParallelMesh) -> tuple[str, float]:
    """The parameter whose total update differs most between the processes of a group, relative to its size."""
    sums = [float(update.double().sum()) for update in run.updates.values()]
    sizes = [float(update.double().abs().sum()) for update in run.updates.values()]
    everywhere = gather_over_world(sums, mesh=mesh)
    members = mesh.ranks.reshape(mesh.dp_size, -1)[mesh.dp_rank].tolist()
    spreads = [apart([everywhere[rank][i] for rank in members]) for i in range(len(sums))]
    relative_spreads = [spread / size if size else spread for spread, size in zip(spreads, sizes, strict=True)]
    worst = max(range(len(sums)), key=lambda i: _nan_first(relative_spreads[i]))
    return list(run.updates)[worst], relative_spreads[worst]


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value
