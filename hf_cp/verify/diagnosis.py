"""From what is wrong to what is likely broken.

Faults of a split run leave patterns: a factor on every gradient, wrong K/V projections beside right query projections,
a wrong token at every edge of a shard. The rules go in the order in which a training step computes: layout, logits,
token losses, gradients, updates. The first stage that is wrong is the one with the fault; later stages inherit it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hf_cp.config import head_counts
from hf_cp.models.state import base_causal_lm
from hf_cp.verify.compare import Comparison, errors_in_order
from hf_cp.verify.errors import alignment, tensor_errors
from hf_cp.verify.runs import Sample, in_fp32, without_rope

_INSIDE_ATTENTION = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "input_layernorm")
_LAYER = re.compile(r"\blayers\.(\d+)\.(.+)")


class Diagnosis(NamedTuple):
    """`cause` is a name to test for, `text` says it to the user."""

    cause: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """What was found wrong, by token and by parameter.

    Args:
        sample (`Sample`): that was compared.
        found (`Comparison`): what came out.
        is_right_without_rope (`bool`): logits pass when position embeddings do nothing.
    """

    sample: Sample
    found: Comparison
    is_right_without_rope: bool

    @cached_property
    def wrong_logits(self) -> torch.Tensor:
        """bool [num_tokens]; an error that is NaN is wrong."""
        return ~(self.found.logits <= self.found.allowed.logits).cpu()

    @cached_property
    def wrong_losses(self) -> torch.Tensor:
        """bool [num_tokens]"""
        return ~(self.found.token_losses <= self.found.allowed.token_loss).cpu()

    @cached_property
    def is_wrong(self) -> dict[str, bool]:
        """By parameter, whether its gradient fails."""
        allowed = self.found.allowed.gradients
        return {name: not error <= allowed[name] for name, error in self.found.errors.gradients.items()}

    @property
    def alone_is_right(self) -> bool:
        """Whether our attention and loss pass in one process."""
        return bool((self.found.alone_logits <= self.found.allowed.logits).all())

    @cached_property
    def at_edge(self) -> torch.Tensor:
        """bool [num_tokens]: the document goes on after the token, but the next slot of its shard holds another."""
        layout = self.sample.layout
        at_edge = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for cp_rank in range(layout.cp_size):
            indices = layout.indices(cp_rank)
            following = torch.cat([indices[1:], indices.new_tensor([-1])])
            at_edge[indices[(indices >= 0) & (following != indices + 1)]] = True
        at_edge[layout.cu_seqlens[1:].long() - 1] = False
        return at_edge

    @property
    def is_cut(self) -> list[bool]:
        """By document, whether its tokens are on more than one process."""
        layout = self.sample.layout
        holders = [set(layout.document_ids(rank).tolist()) for rank in range(layout.cp_size)]
        return [sum(document in held for held in holders) > 1 for document in range(len(layout.doc_lengths))]


def examine(sample: Sample, found: Comparison) -> Diagnosis:
    """The likely cause of a failed comparison. All processes must call it: one more experiment is made.

    These are logits without position embeddings: if the group agrees with one process then, nothing but positions can
    be wrong.
    """
    decoder, is_right = base_causal_lm(sample.model).get_decoder(), False
    if hasattr(decoder, "rotary_emb"):
        with without_rope(decoder):
            with in_fp32(sample.model) if sample.is_low else contextlib.nullcontext():
                logits = sample.untouched_logits()
            errors = errors_in_order(sample, logits, sample.group_logits(), found.scale)
        is_right = bool((errors <= found.allowed.logits).all())
    return diagnose(Evidence(sample, found, is_right))


def diagnose(evidence: Evidence) -> Diagnosis:
    """The likely cause of a failed comparison."""
    for stage in (_layout, _leaks, _logits, _labels, _ranks, _gradients):
        found = stage(evidence)
        if found is not None:
            return found
    return Diagnosis(
        "steps",
        "The first step is right, the next ones drift away: look at what is kept between steps (the optimizer, "
        "buffers of the model, a cache).",
    )


def _layout(e: Evidence) -> Diagnosis | None:
    wrong = int((e.found.copies != 1).sum())
    if not wrong:
        return None
    text = (
        f"{wrong} of {len(e.found.copies)} tokens are not on exactly one process: look at the layout and at cp_rank."
    )
    return Diagnosis("layout", text)


def _leaks(e: Evidence) -> Diagnosis | None:
    for leak in e.found.leaks:
        where = f"Exchanging token {leak.token} of document {leak.document} changed"
        if leak.others:
            text = f"{where} {leak.others} tokens of other documents: documents see each other. Look at the mask,"
            return Diagnosis("leak", f"{text} at cu_seqlens and at where a document begins.")
        if leak.past:
            text = f"{where} {leak.past} earlier tokens of the same document: attention is not causal"
            return Diagnosis("future", f"{text}; look at the bands of the tiles.")
        if not leak.reached:
            return Diagnosis("blind", f"{where} nothing at all: the model does not see its input_ids.")
    return None


def _logits(e: Evidence) -> Diagnosis | None:
    if not bool(e.wrong_logits.any()):
        return None
    count = f"Logits of {int(e.wrong_logits.sum())} of {len(e.wrong_logits)} tokens are wrong"
    if e.is_right_without_rope:
        text = f"{count}, but right without position embeddings: look at position_ids and RoPE of the shards."
        return Diagnosis("positions", text)
    if not e.alone_is_right:
        text = f"{count}, also in one process with our code: look at the attention kernel (scale, mask, dtype), or try"
        return Diagnosis("kernel", f"{text} --kernel eager.")
    return _wrong_documents(e, count) or Diagnosis(
        "attention",
        f"{count}, in documents of every kind, though one process with the same kernel is right: look at what "
        "attention exchanges (K/V of other processes, the merge of partial results, the all-to-all).",
    )


def _wrong_documents(e: Evidence, count: str) -> Diagnosis | None:
    """Only some documents are wrong, or only the tokens at edges."""
    if bool((e.wrong_logits <= e.at_edge).all()):
        text = f"{count}, all of them the last token of a piece of a shard: look at how shards are cut."
        return Diagnosis("edges", text)
    lengths = e.sample.layout.doc_lengths
    wrong = [bool(tokens.any()) for tokens in e.wrong_logits.split(lengths)]
    if all(is_wrong or length == 1 for is_wrong, length in zip(wrong, lengths, strict=True)):
        return None  # a token that sees only itself survives any fault of attention
    named = ", ".join(str(i) for i, is_wrong in enumerate(wrong) if is_wrong)
    if any(wrong) and wrong == e.is_cut:
        text = f"{count}: those of documents {named}, exactly the ones that are spread over processes. Look at what"
        return Diagnosis("cut_documents", f"{text} attention exchanges (K/V of other processes, the merge).")
    text = f"{count}, all in document {named}: look at its input_ids and at its borders (mask, cu_seqlens)."
    return Diagnosis("document", text)


def _labels(e: Evidence) -> Diagnosis | None:
    first, second = e.sample.num_targets, e.found.num_targets
    is_lost = first != second
    if not is_lost and not bool(e.wrong_losses.any()):
        return None
    if bool(e.wrong_losses.any()) and bool((e.wrong_losses <= e.at_edge).all()):
        count = f"{int(e.wrong_losses.sum())} tokens at the edges of shards"
        return Diagnosis(
            "labels_at_edges",
            f"Logits are right, but the losses of {count} are not: labels were shifted after sharding. Shift whole "
            "documents before they are cut.",
        )
    if is_lost:
        text = f"Targets were lost or counted twice ({first:,} in the sample, {second:,} in the group)"
        return Diagnosis("targets", f"{text}: look at the labels and at the collator.")
    text = f"Logits are right, but the losses of {int(e.wrong_losses.sum())} tokens are not: look at their labels"
    return Diagnosis("labels", f"{text} and at the chunks of the loss.")


def _ranks(e: Evidence) -> Diagnosis | None:
    if not e.found.apart.distance:
        return None
    text = f"Replicated parameters drift apart: {e.found.apart.name} is not equal on the processes of a group. Look at"
    return Diagnosis("ranks_apart", f"{text} the sum of gradients; every process must apply the same one.")


def _gradients(e: Evidence) -> Diagnosis | None:
    if not any(e.is_wrong.values()):
        return None
    scaled = _one_factor(e)
    if scaled is not None:
        return scaled
    num_layers = len(base_causal_lm(e.sample.model).get_decoder().layers)
    if any(is_wrong and _is_above_attention(name, num_layers) for name, is_wrong in e.is_wrong.items()):
        return Diagnosis(
            "loss_reduction",
            "Logits and token losses are right, but gradients are wrong from the head on and by no common factor: the "
            "processes' sums have unequal weights. Divide each by the targets of the whole optimizer step, not by its "
            "own.",
        )
    return _in_attention(e)


def _one_factor(e: Evidence) -> Diagnosis | None:
    """All gradients pass once they are divided by the factor that fits them best.

    Names every size that the factor is: cp_size and the data-parallel size may be equal.
    """
    reference, group, is_low = e.found.reference.gradients, e.found.group.gradients, e.sample.is_low
    factor, _ = alignment(reference, group)
    unscaled = tensor_errors(reference, group, rms=is_low, factor=factor or 1.0)
    if not all(error <= e.found.allowed.gradients[name] for name, error in unscaled.items()):
        return None
    mesh, tolerance = e.sample.mesh, 0.05 if is_low else 1e-3
    sizes = [("cp_size", mesh.cp_size), ("the data-parallel size", mesh.dp_size)]
    sizes = [(name, size) for name, size in sizes if size > 1]
    if len(sizes) == 2:
        sizes.append(("the number of processes", mesh.world_size))
    ratios = [(name, float(size)) for name, size in sizes] + [(f"1/{name}", 1 / size) for name, size in sizes]
    matching = [name for name, ratio in ratios if abs(factor / ratio - 1) < tolerance]
    if matching:
        return Diagnosis(
            "loss_scale",
            f"Gradients are {' or '.join(matching)} times too large (by {factor:.6g}): the loss is divided by the "
            "wrong number of targets, or gradients are summed where they are averaged (or the other way round).",
        )
    text = f"All gradients are {factor:.6g} times the right ones: look at what the loss is divided by."
    return Diagnosis("loss_scale", text)


def _in_attention(e: Evidence) -> Diagnosis:
    """The last layer with a wrong gradient is where the fault enters the backward pass: inside, who is wrong?"""
    places = [_Place.of(name) for name, is_wrong in e.is_wrong.items() if is_wrong]
    last = max(place.layer for place in places)
    wrong = {place.module for place in places if place.layer == last}

    def any_wrong(*names: str) -> bool:
        return not wrong.isdisjoint(names)

    if any_wrong("k_proj", "v_proj", "k_norm") and not any_wrong("q_proj", "q_norm", "o_proj"):
        mesh, (_, num_kv_heads) = e.sample.mesh, head_counts(base_causal_lm(e.sample.model).config)
        has_replicas = num_kv_heads % mesh.ulysses_size != 0  # repeated before the all-to-all
        replicas = "K/V heads are replicated: their gradients must be summed" if has_replicas else ""
        ring = "dK/dV of other ring ranks must come home and be added" if mesh.ring_size > 1 else ""
        where = "; ".join(text for text in (ring, replicas) if text) or "look at the all-to-all's way back"
        text = f"Only the K/V projections of layer {last} are wrong, queries are right: look at dK/dV of attention's"
        return Diagnosis("kv_gradients", f"{text} backward pass ({where}).")
    text = f"The forward pass is right, gradients are wrong from layer {last} down: look at attention's backward pass."
    return Diagnosis("attention_backward", text)


class _Place(NamedTuple):
    """Where a parameter is: the layer (-1: before or after all layers) and the projection or norm in it."""

    layer: int
    module: str

    @classmethod
    def of(cls, name: str) -> _Place:
        match = _LAYER.search(name)
        if match is None:
            return cls(-1, name)
        parts = match[2].split(".")
        return cls(int(match[1]), parts[1] if parts[0] in ("self_attn", "mlp") else parts[0])


def _is_above_attention(name: str, num_layers: int) -> bool:
    """Whether no attention layer's backward pass reaches the parameter: it is after the last one's heads."""
    place = _Place.of(name)
    if place.layer == -1:
        return "lm_head" in name or name.endswith("norm.weight")
    return place.layer == num_layers - 1 and place.module not in _INSIDE_ATTENTION
