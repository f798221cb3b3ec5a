"""From what is wrong to what is likely broken.

Faults of a split run leave patterns: a factor on every gradient, wrong K/V projections beside right query projections,
a wrong token at every edge of a shard. The rules go in the order in which a training step computes: layout, logits,
token losses, gradients, updates. The first stage that is wrong is the one with the fault; later stages inherit it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_cp.verify.probes import Leak

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
        cp_size, dp_size, ring_degree (`int`): the mesh.
        has_kv_replicas (`bool`): K/V heads are repeated before the all-to-all.
        num_layers (`int`): of the model.
        num_targets (`tuple[int, int]`): of one process and of the group.
        doc_lengths (`tuple[int, ...]`): of the row.
        is_cut (`tuple[bool, ...]`): whether a document is spread over several processes.
        at_edge (`torch.Tensor`): bool [num_tokens], the next token of the document is not the next one of the shard.
        copies (`torch.Tensor`): [num_tokens], processes that hold the token.
        wrong_logits, wrong_losses (`torch.Tensor`): bool [num_tokens].
        leaks (`tuple[Leak, ...]`): of the probes.
        alone_is_right (`bool`): our attention and loss in one process pass.
        is_right_without_rope (`bool`): logits pass when position embeddings do nothing.
        gradient_factor (`float`): best common factor of all gradients.
        is_one_factor (`bool`): divided by it, all gradients pass.
        factor_tolerance (`float`): precision of the factor.
        is_wrong (`dict[str, bool]`): by parameter, whether its gradient fails.
        parameter_apart (`str`): one that differs between the processes of a group after the steps, or "".
    """

    cp_size: int
    dp_size: int
    ring_degree: int
    has_kv_replicas: bool
    num_layers: int
    num_targets: tuple[int, int]
    doc_lengths: tuple[int, ...]
    is_cut: tuple[bool, ...]
    at_edge: torch.Tensor
    copies: torch.Tensor
    wrong_logits: torch.Tensor
    wrong_losses: torch.Tensor
    leaks: tuple[Leak, ...]
    alone_is_right: bool
    is_right_without_rope: bool
    gradient_factor: float
    is_one_factor: bool
    factor_tolerance: float
    is_wrong: dict[str, bool]
    parameter_apart: str


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
    wrong = int((e.copies != 1).sum())
    if not wrong:
        return None
    text = f"{wrong} of {len(e.copies)} tokens are not on exactly one process: look at the layout and at cp_rank."
    return Diagnosis("layout", text)


def _leaks(e: Evidence) -> Diagnosis | None:
    for leak in e.leaks:
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
    wrong = [bool(tokens.any()) for tokens in e.wrong_logits.split(e.doc_lengths)]
    if all(is_wrong or length == 1 for is_wrong, length in zip(wrong, e.doc_lengths, strict=True)):
        return None  # a token that sees only itself survives any fault of attention
    named = ", ".join(str(i) for i, is_wrong in enumerate(wrong) if is_wrong)
    if any(e.is_cut) and wrong == list(e.is_cut):
        text = f"{count}: those of documents {named}, exactly the ones that are spread over processes. Look at what"
        return Diagnosis("cut_documents", f"{text} attention exchanges (K/V of other processes, the merge).")
    text = f"{count}, all in document {named}: look at its input_ids and at its borders (mask, cu_seqlens)."
    return Diagnosis("document", text)


def _labels(e: Evidence) -> Diagnosis | None:
    is_lost = e.num_targets[0] != e.num_targets[1]
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
        first, second = e.num_targets
        text = f"Targets were lost or counted twice ({first:,} in the row, {second:,} in the group)"
        return Diagnosis("targets", f"{text}: look at the labels and at the collator.")
    text = f"Logits are right, but the losses of {int(e.wrong_losses.sum())} tokens are not: look at their labels"
    return Diagnosis("labels", f"{text} and at the chunks of the loss.")


def _ranks(e: Evidence) -> Diagnosis | None:
    if not e.parameter_apart:
        return None
    text = f"Replicated parameters drift apart: {e.parameter_apart} is not equal on the processes of a group. Look at"
    return Diagnosis("ranks_apart", f"{text} the sum of gradients; every process must apply the same one.")


def _gradients(e: Evidence) -> Diagnosis | None:
    if not any(e.is_wrong.values()):
        return None
    if e.is_one_factor:
        return _one_factor(e)
    if any(is_wrong and _is_above_attention(name, e.num_layers) for name, is_wrong in e.is_wrong.items()):
        return Diagnosis(
            "loss_reduction",
            "Logits and token losses are right, but gradients are wrong from the head on and by no common factor: the "
            "processes' sums have unequal weights. Divide each by the targets of the whole window, not by its own.",
        )
    return _in_attention(e)


def _one_factor(e: Evidence) -> Diagnosis:
    """Names every size that the factor is: cp_size and the data-parallel size may be equal."""
    factor = e.gradient_factor
    sizes = [("cp_size", e.cp_size), ("the data-parallel size", e.dp_size)]
    sizes = [(name, size) for name, size in sizes if size > 1]
    if len(sizes) == 2:
        sizes.append(("the number of processes", e.cp_size * e.dp_size))
    ratios = [(name, float(size)) for name, size in sizes] + [(f"1/{name}", 1 / size) for name, size in sizes]
    found = [name for name, ratio in ratios if abs(factor / ratio - 1) < e.factor_tolerance]
    if found:
        return Diagnosis(
            "loss_scale",
            f"Gradients are {' or '.join(found)} times too large (by {factor:.6g}): the loss is divided by the wrong "
            "number of targets, or gradients are summed where they are averaged (or the other way round).",
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
        replicas = "K/V heads are replicated: their gradients must be summed" if e.has_kv_replicas else ""
        ring = "dK/dV of other ring ranks must come home and be added" if e.ring_degree > 1 else ""
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
