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
from hf_cp.data.manifest import PackingManifest
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.models.patch import base_causal_lm, local_token_losses
from hf_cp.sequence.layout import SequenceLayout

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
    model: torch.nn.Module, loader: ContextParallelDataLoader, *, comm: Communicator
) -> DocumentLosses:
    """Evaluates every document of `loader`; all ranks must call it and get the same result.

    Args:
        model (`torch.nn.Module`): the patched model (untouched at cp_size 1), also inside PEFT. Its
            precision is used, or that of an autocast around the call.
        loader (`ContextParallelDataLoader`): unshuffled.
        comm (`Communicator`): of the mesh that the loader serves.

    Raises:
        ValueError: the loader shuffles samples, drops the last ones or has some to skip, so that its samples are
            not all those of the manifest, in order.
    """
    _check_loader(loader)
    manifest, mesh = loader.manifest, comm.mesh
    sums = torch.zeros(len(manifest.lengths), dtype=torch.float64)
    targets = torch.zeros(len(manifest.lengths), dtype=torch.int64)
    device, was_training = base_causal_lm(model).device, model.training
    model.eval()
    try:
        for step, batch in enumerate(loader):
            batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()}
            # A rank with a dummy sample joins in, because ZeRO-3 gathers parameters in step, but it adds nothing.
            losses = local_token_losses(model, batch).double().cpu()
            number = step * mesh.dp_size + mesh.dp_rank  # unshuffled samples go to dp ranks in turn
            if number < len(manifest.samples):
                is_target = batch["shift_labels"][0].cpu() != IGNORE_INDEX
                documents = _documents_of_slots(batch, manifest, number, mesh.cp_rank)[is_target]
                sums.index_add_(0, documents, losses[is_target])
                targets.index_add_(0, documents, torch.ones_like(documents))
    finally:
        model.train(was_training)
    return DocumentLosses(
        tuple(sum_over_world(sums.tolist(), comm=comm)), tuple(sum_over_world(targets.tolist(), comm=comm))
    )


def _check_loader(loader: ContextParallelDataLoader) -> None:
    """The loader must give every sample of its manifest, in order: that is how a document is recognised."""
    order, position = loader.order, loader.state_dict()["next_step"]
    if order.shuffle:
        raise ValueError(
            "The loader shuffles samples (shuffle=True), so its documents are unknown. Use shuffle=False."
        )
    if order.drop_last:
        raise ValueError(
            f"The loader may drop some of its {len(loader.manifest.samples)} samples (drop_last=True), and with them "
            "documents.\n  Use drop_last=False."
        )
    if position:
        raise ValueError(
            f"The loader stands at micro-step {position} of {len(loader)}: the documents before it would be missing.\n"
            "  Call loader.skip(0) to start at the first sample."
        )


def _documents_of_slots(batch: dict, manifest: PackingManifest, number: int, cp_rank: int) -> torch.Tensor:
    """For each local slot of a sample, its document's number in the manifest (anything for padding): int64 [n].

    The manifest says which documents the sample packs, the layout which of them a slot belongs to: with documents
    (7, 3) and a rank whose slots hold tokens of the second, then of the first one, that is 3, 3, ..., 7, 7, ...
    """
    documents, sample = torch.tensor(manifest.samples[number]), batch.get("hf_cp_sample")
    if sample is None:  # a whole sample on every process
        lengths = [manifest.lengths[document] for document in documents]
        return documents[SequenceLayout(lengths, ContextParallelConfig()).document_ids(cp_rank)]
    return documents[sample.layout.document_ids(cp_rank)]
