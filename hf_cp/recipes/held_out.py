"""Loss of every held-out document, and whether a drop of the mean is more than chance.

Under context parallelism a rank holds parts of many documents. Each rank adds up its token losses by document (the
layout says which token belongs to which), and the sums are added over all ranks, on the host, in fp64. So each
document is counted once, whatever the split.

Documents, not tokens, are the independent draws: tokens of one file rise and fall together. The standard error of a
drop is therefore taken over the paired differences of documents:

>>> before = DocumentLosses(sums=(4.0, 3.0, 5.0), targets=(2, 1, 2))
>>> after = DocumentLosses(sums=(3.0, 2.5, 4.0), targets=(2, 1, 2))
>>> drop = LossDrop(before, after, required_stderr=3.0)
>>> before.mean, after.mean, drop.drop, drop.stderr, drop.passed
(2.4, 1.9, 0.5, 0.0, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.patch import base_causal_lm, local_token_losses
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.packing import PackingManifest

__all__ = ["DocumentLosses", "LossDrop", "document_losses"]


@dataclass(frozen=True)
class DocumentLosses:
    """Summed token losses and number of targets of each document, in the order of the loader's manifest."""

    sums: tuple[float, ...]
    targets: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean over all tokens; a document counts by its targets."""
        return sum(self.sums) / max(1, sum(self.targets))


@dataclass(frozen=True)
class LossDrop:
    """Two evaluations of the same documents: how far the mean token loss fell, against its standard error.

    Args:
        before, after (`DocumentLosses`): of the same documents.
        required_stderr (`float`): standard errors by which the loss must fall to pass; 0 asks for nothing.

    Raises:
        ValueError: the two were not taken on the same documents, or fewer than two documents have a target.
    """

    before: DocumentLosses
    after: DocumentLosses
    required_stderr: float = 0.0

    def __post_init__(self):
        if self.before.targets != self.after.targets:
            raise ValueError(
                f"The losses belong to different documents ({len(self.before.targets)} with "
                f"{sum(self.before.targets):,} targets, {len(self.after.targets)} with {sum(self.after.targets):,}).\n"
                "  Evaluate the same ones both times."
            )
        counted = sum(n > 0 for n in self.before.targets)
        if counted < 2:
            raise ValueError(f"A standard error needs at least 2 documents with targets, got {counted}. Give more.")

    @property
    def drop(self) -> float:
        """Fall of the mean token loss, D."""
        return self.before.mean - self.after.mean

    @property
    def stderr(self) -> float:
        """Standard error of the drop over n documents.

        With n_i targets in document i and d_i the drop of its own mean loss, D = sum(n_i d_i) / sum(n_i) and
        stderr^2 = n/(n-1) * sum((n_i (d_i - D))^2) / sum(n_i)^2; for equal n_i that is the usual variance / n.
        """
        documents = zip(self.before.targets, self.before.sums, self.after.sums, strict=True)
        deviations = [(a - b) - targets * self.drop for targets, a, b in documents if targets]
        n = len(deviations)
        return math.sqrt(n / (n - 1) * sum(x * x for x in deviations)) / sum(self.before.targets)

    @property
    def passed(self) -> bool:
        """Whether the loss fell, by as much as was asked for; no change at all does not pass."""
        return not self.required_stderr or (self.drop > 0 and self.drop >= self.required_stderr * self.stderr)

    def __str__(self) -> str:
        multiple = f"{self.drop / self.stderr:.1f}" if self.stderr else "infinitely many"
        return (
            f"{'PASSED' if self.passed else 'FAILED'}: held-out loss {self.before.mean:.4f} -> {self.after.mean:.4f}, "
            f"a drop of {self.drop:.4f} +- {self.stderr:.4f} = {multiple} standard errors "
            f"({self.required_stderr:g} required)"
        )


@torch.no_grad()
def document_losses(
    model: torch.nn.Module, loader: ContextParallelDataLoader, *, mesh: ContextParallelMesh
) -> DocumentLosses:
    """Evaluates every document of `loader`; all ranks must call it and get the same result.

    Args:
        model (`torch.nn.Module`): the patched model (untouched at cp_size 1), also inside PEFT. Its
            precision is used, or that of an autocast around the call.
        loader (`ContextParallelDataLoader`): unshuffled.
        mesh (`ContextParallelMesh`): the loader's.

    Raises:
        ValueError: the loader shuffles rows, drops the last ones or has rows to skip, so that its rows are not all
            those of the manifest, in order.
    """
    _check_loader(loader)
    manifest = loader.manifest
    sums = torch.zeros(len(manifest.lengths), dtype=torch.float64)
    targets = torch.zeros(len(manifest.lengths), dtype=torch.int64)
    device, was_training = base_causal_lm(model).device, model.training
    model.eval()
    try:
        for step, batch in enumerate(loader):
            batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()}
            # A rank without a row (masked labels) joins in: ZeRO-3 gathers parameters in step.
            losses = local_token_losses(model, batch).double().cpu()
            row = step * mesh.dp_size + mesh.dp_rank
            if row < len(manifest.rows):
                is_target = batch["shift_labels"][0].cpu() != IGNORE_INDEX
                slots = _documents_of_slots(batch, manifest, row, mesh)[is_target]
                sums.index_add_(0, slots, losses[is_target])
                targets.index_add_(0, slots, torch.ones_like(slots))
    finally:
        model.train(was_training)
    return DocumentLosses(
        tuple(sum_over_world(sums.tolist(), comm=Communicator(mesh))),
        tuple(sum_over_world(targets.tolist(), comm=Communicator(mesh))),
    )


def _check_loader(loader: ContextParallelDataLoader) -> None:
    """The loader must give every row of its manifest, in order: that is how a document is recognised."""
    order, position = loader.order, loader.state_dict()["next_step"]
    if order.shuffle:
        raise ValueError("The loader shuffles rows (shuffle=True), so its documents are unknown. Use shuffle=False.")
    if order.drop_last:
        raise ValueError(
            f"The loader may drop some of its {len(loader.manifest.rows)} rows (drop_last=True), and with them "
            "documents.\n  Use drop_last=False."
        )
    if position:
        raise ValueError(
            f"The loader stands at micro-step {position} of {len(loader)}: the documents before it would be missing.\n"
            "  Call loader.skip(0) to start at the first row."
        )


def _documents_of_slots(
    batch: dict, manifest: PackingManifest, row: int, mesh: ContextParallelMesh
) -> torch.Tensor:  # int64 [n]
    """For each local slot of a row, its document's number in the manifest (anything for padding)."""
    documents = torch.tensor(manifest.rows[row])
    sample = batch.get("hf_cp_sample")
    layout = None if sample is None else sample.layout
    if layout is None:  # whole rows
        layout = SequenceLayout([manifest.lengths[document] for document in documents], ContextParallelConfig())
    return documents[layout.document_ids(mesh.cp_rank)]
