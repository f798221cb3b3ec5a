"""The proof that a split run computes what one process computes, on the user's own model and documents.

One packed row is trained on twice, from the same parameters, with plain SGD:

    cp 1   the untouched Hugging Face model and its own loss, in every process, on the whole row
    cp N   the patched model, each process on its share of the row; losses and gradients are summed over the group

After the first backward pass every gradient of every trainable parameter is compared; after `steps` steps every update
and every loss is compared. A trainable parameter that is all zeros is filled with seeded random numbers first: with
LoRA's ordinary B = 0 every gradient of A is zero, and comparing zeros proves nothing. Dropout is off meanwhile. The
parameters, gradients and modes that the model came with are put back exactly. All processes get the same report: of
each number, that of the process that is farthest off.

The reference shares no code with what is tested: its row is built here, from the documents, with a few lines.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_cp.config import IGNORE_INDEX
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.models.patch import context_parallel_disabled, context_parallel_state
from hf_cp.parallel.collectives import sum_over_cp
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.tools.verify_report import VerifyReport, gather_over_world, nan_last, worst_of_all_processes

__all__ = ["VerifyReport", "verify_context_parallel"]

ZERO_INIT_STD = 0.02  # spread of the random numbers that replace all-zero trainable parameters


def verify_context_parallel(
    model: torch.nn.Module,
    documents: Sequence[Mapping[str, Sequence[int]]],
    *,
    steps: int = 3,
    learning_rate: float = 0.01,
    seed: int = 0,
    loss_tolerance: float = 1e-5,
    gradient_tolerance: float = 1e-4,
) -> VerifyReport:
    """Compares one process on a whole packed row with the group on its shares; every process must call it.

    Args:
        model (`torch.nn.Module`): patched with [`apply_context_parallel`], with or without adapters, not yet wrapped
            by DeepSpeed, FSDP or DDP; equal on all processes, trainable parameters in fp32 or fp64. It is put back as
            it came.
        documents (sequence of mappings): `input_ids` and, if not all tokens are targets, unshifted `labels` (-100
            where there is no target). All documents together are the row, which one process must be able to hold.
        steps (`int`): SGD steps; the first one gives the gradients.
        learning_rate (`float`): of the SGD steps.
        seed (`int`): of the random numbers that replace all-zero trainable parameters.
        loss_tolerance (`float`): allowed relative difference of a loss.
        gradient_tolerance (`float`): allowed relative difference of a gradient, of an update and of the gradient norm.

    Raises:
        ValueError: the model is not patched, is wrapped, has nothing to train, or is in half precision (its rounding
            is as large as the faults that are looked for); the documents hold no target.
        RuntimeError: the processes do not hold the same parameters.
    """
    pair = _BothWays.of(model, documents)
    with _prepared(model, pair.parameters, seed):
        reference = _sgd(pair.one_process, pair.parameters, steps, learning_rate)
        _check_equal_start(reference.losses[0], pair.mesh, loss_tolerance)
        split = _sgd(pair.group, pair.parameters, steps, learning_rate)
    gradient, gradient_name = _worst(reference.gradients, split.gradients)
    update, update_name = _worst(reference.updates, split.updates)
    report = VerifyReport(
        cp_size=pair.mesh.cp_size,
        ring_degree=pair.mesh.ring_size,
        ulysses_degree=pair.mesh.ulysses_size,
        dtype=str(pair.dtype).removeprefix("torch."),
        document_lengths=tuple(len(document["input_ids"]) for document in documents),
        num_parameters=len(pair.parameters),
        num_targets_cp1=pair.num_targets,
        num_targets_cpN=int(sum_over_cp(_count_targets(pair.share), pair.mesh)),
        loss_cp1=reference.losses[0],
        loss_cpN=split.losses[0],
        grad_norm_cp1=reference.grad_norm,
        grad_norm_cpN=split.grad_norm,
        worst_gradient_relative_error=gradient,
        worst_gradient_name=gradient_name,
        step_losses_cp1=reference.losses,
        step_losses_cpN=split.losses,
        worst_update_relative_error=update,
        worst_update_name=update_name,
        loss_tolerance=loss_tolerance,
        gradient_tolerance=gradient_tolerance,
    )
    return worst_of_all_processes(report, list(pair.parameters), pair.mesh)


@dataclass(frozen=True)
class _BothWays:
    """One row, ready to be computed by one process (`row`) and by the group (`share` is this process's part)."""

    model: torch.nn.Module
    mesh: ContextParallelMesh
    parameters: dict[str, torch.nn.Parameter]
    row: dict[str, torch.Tensor]
    share: dict[str, Any]
    num_targets: int

    @classmethod
    def of(cls, model: torch.nn.Module, documents: Sequence[Mapping[str, Sequence[int]]]) -> _BothWays:
        """Checks the model and the documents and builds both batches."""
        state = context_parallel_state(model)
        if state is None:
            raise ValueError(
                "verify_context_parallel needs a patched model, but this one is untouched (cp_size 1 leaves it so).\n"
                "  Call apply_context_parallel(model, config) first, with cp_size > 1 or force=True."
            )
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_parameters(parameters)
        device = next(iter(parameters.values())).device
        row = _whole_row(documents)
        num_targets = int(_count_targets(row))
        if not num_targets:
            raise ValueError(
                f"None of the {len(documents)} documents has a target.\n"
                "  Give documents of at least two tokens, with labels that are not all -100."
            )
        collate = DataCollatorForContextParallel(state.config, cp_rank=state.mesh.cp_rank)
        row, share = _to_device(row, device), _to_device(collate([dict(d) for d in documents]), device)
        return cls(model, state.mesh, parameters, row, share, num_targets)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    def one_process(self) -> float:
        """Loss and gradients of the untouched model on the whole row."""
        with context_parallel_disabled(self.model):
            loss = self.model(**self.row, num_items_in_batch=self.num_targets, use_cache=False).loss
            loss.backward()
        return float(loss.detach())

    def group(self) -> float:
        """The same from the group: every process computes its part of the sums, and the parts are added up."""
        part = self.model(**self.share, num_items_in_batch=self.num_targets).loss
        part.backward()
        for parameter in self.parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = sum_over_cp(gradient, self.mesh)
        return float(sum_over_cp(part.double(), self.mesh))


@dataclass(frozen=True)
class _Run:
    """Losses of all steps, gradients of the first step, and the total change of every trainable parameter."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    updates: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.gradients.values()))


@torch.no_grad()
def _sgd(
    step: Callable[[], float], parameters: dict[str, torch.nn.Parameter], steps: int, learning_rate: float
) -> _Run:
    """Runs `steps` SGD steps and puts the parameters back to where they were."""
    start = {name: p.clone() for name, p in parameters.items()}
    updates = {name: torch.zeros_like(p) for name, p in parameters.items()}
    losses, first = [], {}
    for _ in range(steps):
        for p in parameters.values():
            p.grad = None
        with torch.enable_grad():
            losses.append(step())
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        for name, p in parameters.items():
            # The total step is summed beside p: p - start would show the rounding of p, not a difference of the runs.
            updates[name].sub_(gradients[name], alpha=learning_rate)
            p.sub_(gradients[name], alpha=learning_rate)
    for name, p in parameters.items():
        p.copy_(start[name])
    return _Run(tuple(losses), first, updates)


@contextlib.contextmanager
def _prepared(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], seed: int) -> Iterator[None]:
    """Training mode without dropout and without all-zero parameters; everything is put back afterwards."""
    generator = torch.Generator().manual_seed(seed)
    modes = {module: module.training for module in model.modules()}
    rates = {module: module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    values = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: p.grad for name, p in parameters.items()}
    try:
        model.train()
        for module in rates:
            module.p = 0.0
        for p in parameters.values():
            if not p.any():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * ZERO_INIT_STD
                p.data.copy_(noise)
        yield
    finally:
        for name, p in parameters.items():
            p.data.copy_(values[name])
            p.grad = gradients[name]
        for module, rate in rates.items():
            module.p = rate
        for module, mode in modes.items():
            module.training = mode


def _whole_row(documents: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """All documents one after the other, int64 [1, num_tokens]; positions restart, targets never cross a border.

    >>> row = _whole_row([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> row["position_ids"].tolist(), row["shift_labels"].tolist()
    ([[0, 1, 2, 0, 1]], [[6, 7, -100, 9, -100]])
    """
    columns: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "labels": [], "shift_labels": []}
    for document in documents:
        ids = [int(token) for token in document["input_ids"]]
        labels = [int(label) for label in document.get("labels", ids)]
        columns["input_ids"] += ids
        columns["position_ids"] += range(len(ids))
        columns["labels"] += labels
        columns["shift_labels"] += [*labels[1:], IGNORE_INDEX]
    return {name: torch.tensor([values], dtype=torch.int64) for name, values in columns.items()}


def _count_targets(batch: Mapping[str, Any]) -> torch.Tensor:
    return (batch["shift_labels"] != IGNORE_INDEX).sum()


def _to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}


def _worst(reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error over all tensors, and the name of that tensor; NaN counts as infinite."""
    errors = {}
    for name, expected in reference.items():
        difference, size = float((found[name] - expected).abs().max()), float(expected.abs().max())
        errors[name] = nan_last(difference / size if size else math.inf if difference else 0.0)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def _check_parameters(parameters: dict[str, torch.nn.Parameter]) -> None:
    """There is something to train, whole and in a precision in which faults can be told from rounding."""
    if not parameters:
        raise ValueError(
            "The model has no trainable parameter (0 with requires_grad). Add adapters or unfreeze a part first."
        )
    for name, p in parameters.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {p.dtype}: its rounding is as large as the faults that are looked for.\n"
                "  Load the model with dtype=torch.float32 (or float64) for the comparison."
            )
        if p.numel() == 0 or hasattr(p, "ds_id"):
            raise ValueError(
                f"{name} is sharded ({p.numel()} elements here): one process does not hold the model.\n"
                "  Compare before DeepSpeed or FSDP wraps it, without zero.Init."
            )


def _check_equal_start(loss: float, mesh: ContextParallelMesh, tolerance: float) -> None:
    """The one-process loss must be the same in every process of a group, or they started from different models.

    All processes look at the losses of all, so that all raise or none.
    """
    losses = [values[0] for values in gather_over_world([loss], mesh)]
    for members in mesh.ranks.reshape(mesh.dp_size, -1).tolist():
        group = [losses[rank] for rank in members]
        if not max(group) - min(group) <= tolerance * abs(group[0]) or any(map(math.isnan, group)):
            raise RuntimeError(
                f"The processes do not hold the same model: the one-process loss of ranks {members} is "
                f"{', '.join(f'{value:.7f}' for value in group)}.\n"
                "  Load the same weights everywhere and set the seed before adapters are made."
            )
