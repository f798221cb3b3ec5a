"""How far a run is from its reference, and how far it may be.

In fp32 and fp64 the relative error of a tensor is max|difference| / max|reference|, and the allowed errors are fixed
numbers. In bf16 and fp16 one process is itself far from fp32, by an amount that depends on the model: a split run may
be at most twice as far from an fp32 reference as the untouched low-precision model is. There, root mean squares take
the place of the maxima, since the largest of a few hundred rounding errors is luck. NaN counts as infinite.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from hf_cp.config import IGNORE_INDEX
from hf_cp.verify.runs import Gradients, Run

LOW_PRECISION_FACTOR = 2.0  # flash-attention's own tests use it
CHUNK_TOKENS = 1024  # tokens whose logits are compared at a time


@dataclass(frozen=True)
class Errors:
    """Differences of one run from its reference.

    Args:
        losses (`tuple[float, ...]`): relative, by step.
        loss_drift (`float`): signed mean of the relative differences of the losses.
        grad_norm (`float`): relative.
        gradients, updates (`dict`): name -> relative error.
        gradient_distance (`float`): norm of the difference of all gradients, over that of the reference.
        update_drift (`float`): part of the updates' difference that points along the updates themselves,
            <difference, reference> / <reference, reference>: 0.01 if all updates are one percent too large. Rounding
            has no direction and cancels here, a one-sided fault does not.
        update_distance (`float`): norm of the difference of all updates, over that of the reference.
    """

    losses: tuple[float, ...]
    loss_drift: float
    grad_norm: float
    gradients: dict[str, float]
    gradient_distance: float
    updates: dict[str, float]
    update_drift: float
    update_distance: float

    @classmethod
    def between(cls, reference: Run, found: Run, *, rms: bool = False) -> Errors:
        """`rms`: tensors by root mean squares, not maxima, as in low precision."""
        pairs = list(zip(reference.losses, found.losses, strict=True))
        signed = [(b - a) / abs(a) if a else b - a for a, b in pairs]
        _, gradient_distance = alignment(reference.gradients, found.gradients)
        drift, update_distance = alignment(reference.updates, found.updates)
        return cls(
            losses=tuple(nan_last(abs(x)) for x in signed),
            loss_drift=sum(signed) / len(signed),
            grad_norm=relative(reference.grad_norm, found.grad_norm),
            gradients=tensor_errors(reference.gradients, found.gradients, rms=rms),
            gradient_distance=gradient_distance,
            updates=tensor_errors(reference.updates, found.updates, rms=rms),
            update_drift=drift - 1,
            update_distance=update_distance,
        )


@dataclass(frozen=True)
class Allowed:
    """The largest differences that pass; the names are those of [`Errors`], `logits` and `token_loss` are by token."""

    loss: float
    grad_norm: float
    gradients: dict[str, float]
    updates: dict[str, float]
    update_drift: float
    logits: float
    token_loss: float

    @classmethod
    def fixed(cls, names: Iterable[str], *, loss: float, gradient: float, logits: float) -> Allowed:
        """The same for every model; a tenth of `gradient` for what rounding cancels in."""
        by_name = dict.fromkeys(names, gradient)
        return cls(loss, gradient, by_name, by_name, gradient / 10, logits, logits)

    @classmethod
    def twice(cls, own: Errors, logits: torch.Tensor, token_losses: torch.Tensor, mean_loss: float) -> Allowed:
        """Twice the errors that the untouched model makes in its own precision.

        One number can be right by luck, so a scalar may also be off by what the errors of its parts allow: a mean by
        their root mean square, a norm by the norm of the difference, and a parameter of few elements by the median
        error of all parameters.

        Args:
            own (`Errors`): of the untouched model in low precision, against fp32.
            logits, token_losses (`torch.Tensor`): [num_tokens], its errors by token.
            mean_loss (`float`): of the reference.
        """
        typical_loss = float(token_losses.square().mean().sqrt()) / max(mean_loss, 1e-6)

        def by_name(errors: dict[str, float]) -> dict[str, float]:
            median = statistics.median(errors.values())
            return {name: LOW_PRECISION_FACTOR * max(error, median) for name, error in errors.items()}

        return cls(
            loss=LOW_PRECISION_FACTOR * max(*own.losses, typical_loss),
            grad_norm=LOW_PRECISION_FACTOR * max(own.grad_norm, own.gradient_distance),
            gradients=by_name(own.gradients),
            updates=by_name(own.updates),
            update_drift=LOW_PRECISION_FACTOR * max(abs(own.update_drift), own.update_distance),
            logits=LOW_PRECISION_FACTOR * float(logits.max()),
            token_loss=LOW_PRECISION_FACTOR * float(token_losses.max()),
        )


@dataclass(frozen=True)
class Worst:
    """The tensor that is farthest beyond what it may be off."""

    name: str
    error: float
    allowed: float

    @classmethod
    def of(cls, errors: dict[str, float], allowed: dict[str, float]) -> Worst:
        """The name with the largest `error / allowed`."""
        name = max(errors, key=lambda name: excess(errors[name], allowed[name]))
        return cls(name, errors[name], allowed[name])


def excess(error: float, allowed: float) -> float:
    """`error / allowed`, above 1 exactly if it does not pass.

    >>> excess(0.0, 0.0), excess(1.0, 0.0), excess(math.nan, 1.0), excess(1.0, 2.0)
    (0.0, inf, inf, 0.5)
    """
    if math.isnan(error) or math.isnan(allowed):
        return math.inf
    return error / allowed if allowed else (math.inf if error else 0.0)


def tensor_errors(
    reference: Gradients, found: Gradients, *, rms: bool = False, factor: float = 1.0
) -> dict[str, float]:
    """The relative error of every tensor, of maxima or of root mean squares; `found` is divided by `factor` first."""
    errors = {}
    for name, expected in reference.items():
        tensors = (found[name].to(expected.dtype) / factor - expected, expected)
        difference, size = (float(t.double().norm() if rms else t.abs().max()) for t in tensors)
        errors[name] = nan_last(relative_size(difference, size))
    return errors


def alignment(reference: Gradients, found: Gradients) -> tuple[float, float]:
    """<found, reference> / <reference, reference> over all tensors, and norm(found - reference) / norm(reference)."""
    product = square = distance = 0.0
    for name, expected in reference.items():
        a, b = expected.double(), found[name].double()
        product, square = product + float((a * b).sum()), square + float(a.square().sum())
        distance += float((b - a).square().sum())
    return (product / square if square else 1.0), relative_size(math.sqrt(distance), math.sqrt(square))


def logits_errors(reference: torch.Tensor, found: torch.Tensor, *, scale: float) -> torch.Tensor:
    """max|difference| of every token's logits over `scale`, fp64 [n]; both are [n, vocabulary]."""
    pairs = zip(reference.split(CHUNK_TOKENS), found.split(CHUNK_TOKENS), strict=True)
    return torch.cat([(b.double() - a.double()).abs().amax(-1) for a, b in pairs]) / scale


def token_losses_of(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every token, fp64 [n]; 0 where there is no target."""
    pairs = zip(logits.split(CHUNK_TOKENS), shift_labels.split(CHUNK_TOKENS), strict=True)
    return torch.cat([cross_entropy(x.double(), y, ignore_index=IGNORE_INDEX, reduction="none") for x, y in pairs])


def relative(reference: float, found: float) -> float:
    """|difference| / |reference|."""
    return relative_size(abs(found - reference), abs(reference))


def relative_size(difference: float, size: float) -> float:
    """`difference / size`; a difference from zero is infinitely large."""
    return difference / size if size else (math.inf if difference else 0.0)


def apart(values: list[float]) -> float:
    """How far the largest is from the smallest; NaN if one is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values) - min(values)


def nan_last(error: float) -> float:
    """The error as a key for `max`: NaN is larger than every number."""
    return math.inf if math.isnan(error) else error
