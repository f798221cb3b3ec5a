"""Runs one packed sample in all ways and measures how far the runs are apart.

Invariant: all processes make the same calls in the same order, whatever they find, so that none waits for another; and
no number is judged here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_cp.distributed.host import gather_objects
from hf_cp.verify.errors import (
    Allowed,
    Errors,
    Worst,
    apart,
    logits_errors,
    nan_last,
    relative,
    relative_size,
    tensor_errors,
    token_losses_of,
)
from hf_cp.verify.inputs import count_targets
from hf_cp.verify.runs import Run, Sample, in_fp32, run_sgd

EXACT = 1e-10  # fp64, where transformers' fp32 loss has no part


@dataclass(frozen=True)
class Settings:
    """How the comparison is made; the arguments of [`verify_context_parallel`]."""

    steps: int
    learning_rate: float
    loss_tolerance: float
    gradient_tolerance: float


class Reference(NamedTuple):
    """One process with the untouched model: its steps, logits [num_tokens, vocabulary], and losses [num_tokens]."""

    run: Run
    logits: torch.Tensor
    token_losses: torch.Tensor

    @property
    def scale(self) -> float:
        """The largest logit: errors of logits are relative to it."""
        return float(self.logits.abs().max())


class Leak(NamedTuple):
    """What an exchanged token changed.

    Args:
        document, token (`int`): the token, by document and position in it.
        reached (`int`): tokens of its own document, from itself on, whose logits changed: they should.
        past (`int`): earlier tokens of its document that changed: none may.
        others (`int`): tokens of other documents that changed: none may.
    """

    document: int
    token: int
    reached: int
    past: int
    others: int


class Apart(NamedTuple):
    """The tensor whose sum differs most between the processes of a group, relative to the sum of its sizes."""

    name: str
    distance: float


@dataclass(frozen=True)
class Comparison:
    """All runs of one sample, and how far they are apart.

    Args:
        reference, group (`Run`): one process, untouched; the group.
        scale (`float`): the largest logit of the reference.
        errors (`Errors`): of the group against the reference.
        logits, token_losses (`torch.Tensor`): [num_tokens], the group's errors by token.
        alone_logits, alone_gradients: errors of our code in one process, by token and by parameter.
        split_loss, split_gradients: the group against our code in one process.
        copies (`torch.Tensor`): [num_tokens], processes that hold the token.
        num_targets (`int`): of the group.
        apart (`Apart`): of the processes of the group, after all steps.
        leaks (`tuple[Leak, ...]`): of the exchanged tokens.
        allowed (`Allowed`): how large the errors may be.
    """

    reference: Run
    group: Run
    scale: float
    errors: Errors
    logits: torch.Tensor
    token_losses: torch.Tensor
    alone_logits: torch.Tensor
    alone_gradients: dict[str, float]
    split_loss: float
    split_gradients: dict[str, float]
    copies: torch.Tensor
    num_targets: int
    apart: Apart
    leaks: tuple[Leak, ...]
    allowed: Allowed

    @property
    def gradient(self) -> Worst:
        """The worst of the group, in the first step."""
        return Worst.of(self.errors.gradients, self.allowed.gradients)

    @property
    def update(self) -> Worst:
        """The worst of the group, the total of all steps."""
        return Worst.of(self.errors.updates, self.allowed.updates)


def compare(sample: Sample, settings: Settings, progress: Callable[[str], None]) -> Comparison:
    """Runs everything; all processes must call it.

    Raises:
        RuntimeError: on every process, see [`check_equal_start`].
    """
    progress("1 of 4: the untouched model in one process")
    with in_fp32(sample.model) if sample.is_low else contextlib.nullcontext():
        reference = _run_untouched(sample, settings)
    check_equal_start(sample, reference.run.losses[0], settings.loss_tolerance)
    allowed = _allowed(sample, settings, reference)
    progress("2 of 4: our code in one process")
    alone = sample.alone()
    progress(f"3 of 4: {sample.mesh.cp_size} processes")
    group = run_sgd(sample.group, sample.parameters, settings.steps, settings.learning_rate)
    progress("4 of 4: exchanged tokens")
    local = sample.group_logits()
    token_losses = sample.in_order(sample.group_token_losses())
    return Comparison(
        reference=reference.run,
        group=group,
        scale=reference.scale,
        errors=Errors.between(reference.run, group, rms=sample.is_low),
        logits=errors_in_order(sample, reference.logits, local, reference.scale),
        token_losses=(token_losses - reference.token_losses).abs(),
        alone_logits=logits_errors(reference.logits, alone.logits, scale=reference.scale),
        alone_gradients=tensor_errors(reference.run.gradients, alone.gradients, rms=sample.is_low),
        split_loss=nan_last(relative(alone.loss, group.losses[0])),
        split_gradients=tensor_errors(alone.gradients, group.gradients),
        copies=sample.in_order(torch.ones(sample.layout.local_length, device=local.device)),
        num_targets=int(sample.sum_over_group(count_targets(sample.share))),
        apart=_farthest_apart(group.updates, sample),
        leaks=probe_leaks(sample, local),
        allowed=allowed,
    )


def check_equal_start(sample: Sample, loss: float, tolerance: float) -> None:
    """The one-process loss must be the same in every process of a group, or they started from different models.

    All processes look at the losses of all, so that all raise or none.

    Raises:
        RuntimeError: with the parameter that differs most; or the loss is not finite in any process of a group, so
            there is nothing to compare with.
    """
    losses = gather_objects(loss, comm=sample.comm)
    groups = sample.mesh.ranks.reshape(sample.mesh.dp_size, -1).tolist()
    for members in groups:
        if not any(math.isfinite(losses[rank]) for rank in members):
            raise RuntimeError(
                f"The untouched model in one process has the loss {losses[members[0]]} on this sample, in each of "
                f"ranks {members}: there is nothing to compare with.\n"
                "  Look for weights that are not finite, for a sample without targets, and for a dtype that overflows."
            )
    by_group = [[losses[rank] for rank in members] for members in groups]
    is_equal = [apart(found) <= tolerance * abs(found[0]) for found in by_group]  # NaN is not
    if all(is_equal):
        return
    members = groups[is_equal.index(False)]
    name = gather_objects(_farthest_apart(dict(sample.model.named_parameters()), sample).name, comm=sample.comm)
    raise RuntimeError(
        f"The processes do not hold the same model: the one-process loss of ranks {members} is "
        f"{', '.join(f'{losses[rank]:.7f}' for rank in members)}; {name[members[0]]} differs most.\n"
        "  Load the same weights everywhere and set the seed before adapters are made."
    )


def probe_leaks(sample: Sample, logits: torch.Tensor) -> tuple[Leak, ...]:
    """Does one document reach another? Exchanges a token of a document at a time, and counts the logits that change.

    It is the middle token of the first, the longest and the last document: the first can leak forward, the last
    backward, and the longest is the one that is cut over ranks. The group's logits are compared with themselves,
    computed twice by the same kernels on the same shapes, so what must not change is equal to the last bit.

    Args:
        logits (`torch.Tensor`): [local slots, vocabulary], of the group, of the unchanged sample.
    """
    lengths = sample.layout.doc_lengths
    chosen = dict.fromkeys([0, lengths.index(max(lengths)), len(lengths) - 1])
    return tuple(_probe(sample, logits, document) for document in chosen)


def _probe(sample: Sample, logits: torch.Tensor, document: int) -> Leak:
    layout, ids = sample.layout, sample.share["input_ids"]
    first, token = int(layout.doc_starts[document]), layout.doc_lengths[document] // 2
    is_exchanged = (layout.indices(sample.mesh.cp_rank) == first + token).to(ids.device)
    changed = sample.group_logits(input_ids=ids.where(~is_exchanged, (ids + 1) % logits.shape[-1]))
    is_changed = sample.in_order((changed != logits).any(-1)) > 0
    last = first + layout.doc_lengths[document]
    own, past = int(is_changed[first:last].sum()), int(is_changed[first : first + token].sum())
    return Leak(document, token, own - past, past, int(is_changed.sum()) - own)


def errors_in_order(sample: Sample, logits: torch.Tensor, local: torch.Tensor, scale: float) -> torch.Tensor:
    """fp64 [num_tokens]: each process compares its own slots `local` with its tokens' `logits`."""
    slots = sample.layout.indices(sample.mesh.cp_rank).to(local.device)
    errors = logits_errors(logits[slots.clamp(min=0)], local, scale=scale)
    return sample.in_order(errors.masked_fill(slots < 0, 0.0))  # padding has no reference


def _run_untouched(sample: Sample, settings: Settings) -> Reference:
    run = run_sgd(sample.untouched, sample.parameters, settings.steps, settings.learning_rate)
    logits = sample.untouched_logits()
    return Reference(run, logits, token_losses_of(logits, sample.targets))


def _allowed(sample: Sample, settings: Settings, reference: Reference) -> Allowed:
    """The tolerances; for 16 bits twice the error that the untouched model makes in its own precision."""
    if not sample.is_low:
        exact = EXACT if sample.dtype == torch.float64 else settings.gradient_tolerance
        names, loss = sample.parameters, settings.loss_tolerance
        return Allowed.fixed(names, loss=loss, gradient=settings.gradient_tolerance, logits=exact)
    own = _run_untouched(sample, settings)
    errors = Errors.between(reference.run, own.run, rms=True)
    logits = logits_errors(reference.logits, own.logits, scale=reference.scale)
    token_losses = (own.token_losses - reference.token_losses).abs()
    return Allowed.twice(errors, logits, token_losses, reference.run.losses[0])


def _farthest_apart(tensors: dict[str, torch.Tensor], sample: Sample) -> Apart:
    """Looks at the sum of every tensor, on every process of the group."""
    sums = {name: float(tensor.detach().double().sum()) for name, tensor in tensors.items()}
    everywhere, members, spreads = gather_objects(sums, comm=sample.comm), sample.mesh.peers("cp"), {}
    for name, tensor in tensors.items():
        spread = apart([everywhere[rank][name] for rank in members])
        spreads[name] = nan_last(relative_size(spread, float(tensor.detach().double().abs().sum())))
    worst = max(spreads, key=spreads.__getitem__)
    return Apart(worst, spreads[worst])
