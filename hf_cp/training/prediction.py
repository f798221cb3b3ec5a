"""Logits of shared samples, back in the order of the data set: what `predict()` and `compute_metrics` need.

Every rank has the logits of its own slots only. `preprocess_logits_for_metrics` sees them there, chunk by chunk, so
logits of a whole shard never exist on the device; what it returns goes to the host, is gathered over all processes,
and is put back by the sample's layout and the packing manifest. So the result is what the stock Trainer returns for
the same data set, one sequence at a time: entry i is feature i of the data set, token j its j-th token (the logits
there predict token j + 1), shorter ones are padded with -100 on the right, labels are not shifted. Three things have
no counterpart there:

- a feature that became several documents (`seq_lengths`, `overflow="split"`) is put together again; the first label of
  each later document is -100, since no token predicts it;
- a feature without a document (empty, or dropped as too long) keeps its entry, -100 throughout;
- padding at either end of a feature was cut off when it was read, so token 0 is its first real one.

Invariant: each token of the data set is in the result once, whatever the split; all processes hold the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction

from hf_cp import _compat
from hf_cp.config import IGNORE_INDEX, ContextParallelConfig
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.manifest import PackingManifest
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree, gather_objects
from hf_cp.models.loss import token_losses
from hf_cp.models.moe import token_loss_only
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import SAMPLE_KEY

MAX_BYTES = 4 * 2**30


class Slot(NamedTuple):
    """Where the tokens of a document are in the result."""

    feature: int
    start: int


class Predictions:
    """Collects the results of an evaluation, one micro-step after another.

    Args:
        loader (`ContextParallelDataLoader`): unshuffled; gives the manifest and the documents.
        comm (`Communicator`): the loader's.
        preprocess (`Callable`, *optional*): `(logits [1, n, vocabulary], labels [1, n])` to tensors [1, n, ...], or
            nested tuples, lists and dicts of them. It is called with some of a rank's slots at a time, so it must
            treat each token by itself. The labels are not shifted.
        max_bytes (`int`): most memory that the result may take, in every process.
        with_losses (`bool`): whether `losses` is asked for.
    """

    def __init__(
        self,
        loader: ContextParallelDataLoader,
        *,
        comm: Communicator,
        preprocess: Callable[[torch.Tensor, torch.Tensor], Any] | None = None,
        max_bytes: int = MAX_BYTES,
        with_losses: bool = False,
    ):
        self._documents, self._manifest, self._mesh = loader.packed.documents, loader.manifest, comm.mesh
        self._comm, self._config = comm, loader.dataset.collator.config
        self._preprocess, self._max_bytes, self._with_losses = preprocess, max_bytes, with_losses
        self._slots = list(_slots_of_documents(self._manifest))
        ends = [slot.start + length for slot, length in zip(self._slots, self._manifest.lengths, strict=True)]
        self.shape = (loader.packed.num_features, max(ends))
        self._structure: Any = None
        self._results: list[torch.Tensor] = []  # of every leaf of the structure; token losses are the last
        self._step = 0

    def start_step(self, labels: torch.Tensor) -> ShardOutputs:
        """What takes the logits of this rank's next micro-step; `labels` [1, n] are those of its batch."""
        return ShardOutputs(labels, self._preprocess, self._check_size)

    def finish_step(self, outputs: ShardOutputs, token_losses: torch.Tensor) -> None:
        """Gathers a micro-step of all ranks; an error of one of them is raised on all.

        Args:
            outputs (`ShardOutputs`): of this rank.
            token_losses (`torch.Tensor`): [n], of this rank.
        """
        leaves, self._structure = outputs.leaves(), outputs.structure  # first: it may find an error
        agree("predictions", comm=self._comm, step=self._step, error=outputs.error, scope="world")
        if self._with_losses:
            leaves.append(token_losses.double().cpu())
        if not self._results:
            self._results = [torch.full((*self.shape, *x.shape[1:]), IGNORE_INDEX, dtype=x.dtype) for x in leaves]
        first_sample = self._step * self._mesh.dp_size
        layouts = [self._layout(sample) for sample in range(first_sample, first_sample + self._mesh.dp_size)]
        gathered = self._gather(leaves, layouts)
        for dp_rank, layout in enumerate(layouts):
            if layout is not None:
                tokens = layout.unshard([gathered[rank] for rank in self._mesh.ranks[dp_rank].flat])
                self._place(first_sample + dp_rank, tokens)
        self._step += 1

    @property
    def predictions(self) -> Any:
        """Arrays [features, longest, ...], in the structure that `preprocess` returned."""
        count = self._structure.num_leaves
        return _compat.unflatten_tree([result.numpy() for result in self._results[:count]], self._structure)

    @property
    def label_ids(self) -> np.ndarray:
        """int64 [features, longest]; -100 at the first token of a document that is not its feature's first."""
        labels = self._from_documents("labels")
        for slot in self._slots:
            if slot.start:
                labels[slot] = IGNORE_INDEX
        return labels

    @property
    def inputs(self) -> np.ndarray:
        """int64 [features, longest]: the ids, -100 after the last one."""
        return self._from_documents("input_ids")

    @property
    def losses(self) -> np.ndarray:
        """fp64 [features]: the mean token loss of each feature, 0 for one without targets."""
        sums, counts = torch.zeros(2, self.shape[0], dtype=torch.float64)
        for document, slot in zip(self._documents, self._slots, strict=True):
            sums[slot.feature] += self._results[-1][slot.feature, slot.start :][: len(document)].sum()
            counts[slot.feature] += int((document.shift_labels != IGNORE_INDEX).sum())
        return (sums / counts.clamp(min=1)).numpy()

    def _check_size(self, leaves: list[torch.Tensor]) -> None:
        """`leaves` [n, ...] are the results of some tokens."""
        per_token = sum(leaf.itemsize * prod(leaf.shape[1:]) for leaf in leaves)
        total = per_token * prod(self.shape)
        if total > self._max_bytes:
            raise ValueError(
                f"The predictions of {self.shape[0]:,} features of up to {self.shape[1]:,} tokens, {per_token:,} "
                f"bytes a token, take {total:,} bytes in the memory of every process; max_prediction_bytes allows "
                f"{self._max_bytes:,}.\n"
                "  Reduce logits where they are made, with preprocess_logits_for_metrics=lambda logits, labels: "
                "logits.argmax(-1), take fewer features, or raise trainer.max_prediction_bytes."
            )

    def _layout(self, sample: int) -> SequenceLayout | None:
        """Of a sample of the manifest; `None` for a sample without targets, where samples ran out."""
        if sample >= len(self._manifest.samples):
            return None
        return SequenceLayout([self._manifest.lengths[d] for d in self._manifest.samples[sample]], self._config)

    def _gather(self, leaves: list[torch.Tensor], layouts: list[SequenceLayout | None]) -> list[torch.Tensor]:
        """uint8 [slots, bytes of a token] of every rank, out of this rank's leaves [slots, ...]."""
        own = torch.cat([_as_bytes(leaf) for leaf in leaves], dim=1)
        lengths = np.zeros(self._mesh.world_size, dtype=int)
        for dp_rank, layout in enumerate(layouts):
            lengths[self._mesh.ranks[dp_rank]] = 0 if layout is None else layout.local_length
        gathered = gather_objects(own[: lengths[self._mesh.rank]].numpy(), comm=self._comm)
        widths = [part.shape[1] for part in gathered]
        if len(set(widths)) > 1:
            raise ValueError(
                f"The ranks have results of other sizes for a token: {widths} bytes by rank.\n"
                "  Let preprocess_logits_for_metrics return the same types and sizes for all tokens."
            )
        return [torch.from_numpy(part) for part in gathered]

    def _place(self, sample: int, tokens: torch.Tensor) -> None:
        """Puts a whole sample, uint8 [num_tokens, bytes of a token], where its documents belong."""
        documents = self._manifest.samples[sample]
        lengths = [self._manifest.lengths[document] for document in documents]
        offset = 0
        for result in self._results:
            shape = result.shape[2:]
            stop = offset + result.itemsize * prod(shape)
            values = tokens[:, offset:stop].contiguous().view(result.dtype).reshape(-1, *shape)
            for document, part in zip(documents, values.split(lengths), strict=True):
                feature, start = self._slots[document]
                result[feature, start : start + len(part)] = part
            offset = stop

    def _from_documents(self, column: str) -> np.ndarray:
        array = np.full(self.shape, IGNORE_INDEX, dtype=np.int64)
        for document, slot in zip(self._documents, self._slots, strict=True):
            array[slot.feature, slot.start : slot.start + len(document)] = getattr(document, column)
        return array


def make_eval_prediction(predictions: Predictions, include: list[str]) -> EvalPrediction:
    """What `compute_metrics` is given; `include` are the Trainer's `include_for_metrics`."""
    return EvalPrediction(
        predictions=predictions.predictions,
        label_ids=predictions.label_ids,
        inputs=predictions.inputs if "inputs" in include else None,
        losses=predictions.losses if "loss" in include else None,
    )


class ShardOutputs:
    """Takes the logits of one micro-step on this rank, and keeps on the host what is to be gathered.

    An error waits (`error`) until all ranks can be told: the others are in the middle of the same forward pass.
    """

    def __init__(
        self,
        labels: torch.Tensor,  # [1, n]
        preprocess: Callable[[torch.Tensor, torch.Tensor], Any] | None,
        check_size: Callable[[list[torch.Tensor]], None],
    ):
        self._labels, self._preprocess, self._check_size = labels, preprocess, check_size
        self._num_seen = 0
        self._chunks: list[list[torch.Tensor]] = []
        self.structure: Any = None
        self.error: Exception | None = None

    def __call__(self, logits: torch.Tensor) -> None:
        """`logits` [slots, vocabulary]: of the next slots of this rank."""
        labels = self._labels[:, self._num_seen : self._num_seen + len(logits)]
        self._num_seen += len(logits)
        if self.error is None:
            try:
                self._take(logits.unsqueeze(0), labels)
            except Exception as error:
                self.error = error

    def _take(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        results = logits if self._preprocess is None else self._preprocess(logits, labels)
        leaves, self.structure = _compat.flatten_tree(results)
        for leaf in leaves or [None]:
            _check_leaf(leaf, logits)
        leaves = [_storable(leaf[0]) for leaf in leaves]
        if not self._chunks:
            self._check_size(leaves)
        self._chunks.append([leaf.cpu() for leaf in leaves])

    def leaves(self) -> list[torch.Tensor]:
        """Tensors [n, ...] on the host, in the order of `structure`; none where there is an `error`."""
        if self.error is None:
            try:
                return [torch.cat(parts) for parts in zip(*self._chunks, strict=True)]
            except (RuntimeError, ValueError):
                self.error = _unlike_chunks(self._chunks)
        return []


def evaluate_sample(
    model: nn.Module, inputs: dict[str, Any], *, label_smoothing: float, on_logits: ShardOutputs | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's sum of token losses, and the losses [n] if logits are asked for. Call it without gradients.

    Args:
        model (`nn.Module`): as the Trainer has wrapped it.
        inputs (`dict`): this rank's batch of a sample, or a whole one for a model that is not patched.
        label_smoothing (`float`): as in training.
        on_logits (`ShardOutputs`, *optional*): takes the logits.
    """
    if SAMPLE_KEY in inputs:
        options = {"hf_cp_label_smoothing": label_smoothing, "hf_cp_on_logits": on_logits} | token_loss_only(model)
        outputs = model(**inputs, **options, num_items_in_batch=1)
        return outputs.loss.detach(), outputs.token_losses
    outputs = model(**inputs, **token_loss_only(model), num_items_in_batch=1)
    if not label_smoothing and on_logits is None:
        return outputs.loss.detach(), None
    losses = token_losses(
        outputs.logits[0],
        nn.Identity(),
        inputs["shift_labels"][0],
        num_chunks=-(-outputs.logits.shape[1] // ContextParallelConfig().loss_chunk_tokens),
        label_smoothing=label_smoothing,
        on_logits=on_logits,
    )
    return losses.sum() if label_smoothing else outputs.loss.detach(), losses


def _check_leaf(leaf: Any, logits: torch.Tensor) -> None:
    if not isinstance(leaf, torch.Tensor) or leaf.shape[:2] != logits.shape[:2]:
        shown = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise ValueError(
            f"preprocess_logits_for_metrics was given logits {list(logits.shape)} and returned {shown}; it is called "
            f"with parts of samples, so it must return [1, {logits.shape[1]}, ...], a result for each token.\n"
            "  Treat every token by itself (e.g. logits.argmax(-1)), and shift or sum in compute_metrics."
        )


def _unlike_chunks(chunks: list[list[torch.Tensor]]) -> ValueError:
    shapes = sorted({str([list(leaf.shape[1:]) for leaf in leaves]) for leaves in chunks})
    return ValueError(
        "preprocess_logits_for_metrics returned other results for some tokens than for others: by token, results of "
        f"the shapes {' and '.join(shapes)}.\n"
        "  Return the same number of tensors, with the same shape for each token, in every call."
    )


def _storable(leaf: torch.Tensor) -> torch.Tensor:
    """In a type that numpy has and that can hold -100."""
    if leaf.dtype == torch.bfloat16:
        return leaf.float()
    return leaf if leaf.dtype.is_signed else leaf.long()


def _as_bytes(leaf: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes], out of [n, ...]."""
    return leaf.reshape(len(leaf), -1).contiguous().view(torch.uint8)


def _slots_of_documents(manifest: PackingManifest) -> Iterator[Slot]:
    """The documents of a feature follow each other in the manifest, and so in the result."""
    previous, end = -1, 0
    for feature, length in zip(manifest.sources, manifest.lengths, strict=True):
        start = end if feature == previous else 0
        yield Slot(feature, start)
        previous, end = feature, start + length
