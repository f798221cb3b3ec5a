"""The load-balancing loss of mixture-of-experts routers, over the whole packed sample.

With P_e the mean probability and f_e the mean number of choices of expert e, taken over all layers and tokens, the
loss is E * sum_e f_e P_e (Switch Transformer, arXiv:2101.03961, equations 4 to 6; as in transformers). It is no sum
over tokens, so ranks cannot each compute it on their shard. They add up their counts and probabilities first.

Which tokens: those of one packed sample, which is what one process sees in a micro-step; padding slots do not count. A
dummy sample (no target at all; made where other replicas have one sample more) has no such loss, as it has no token
loss.

Gradient: f_e is made of counts and has none, and P_e = sum over ranks of S_re / T, with S_re the sum of rank r's
probabilities and T = layers x tokens of the sample. So rank r's part is E * sum_e f_e S_re / T: the parts of all ranks
add up to the loss, and their gradients to its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from hf_cp.attention.merge import accumulator_dtype
from hf_cp.config import IGNORE_INDEX
from hf_cp.distributed.collectives import sum_over_cp
from hf_cp.distributed.communicator import Communicator
from hf_cp.sequence.layout import SequenceLayout


class BalanceLoss(NamedTuple):
    """The load-balancing loss of a sample (scalar, without graph) and this rank's part of it (scalar, with graph)."""

    value: torch.Tensor
    part: torch.Tensor


def is_mixture(model: nn.Module) -> bool:
    """Whether a causal LM has routers with a load-balancing loss."""
    return hasattr(model, "router_aux_loss_coef")


def token_loss_only(model: nn.Module) -> dict[str, bool]:
    """What a forward call of `model`, wrapped or not, is given so that its loss is that of the tokens alone."""
    return {"output_router_logits": False} if any(map(is_mixture, model.modules())) else {}


def uses_balance_loss(model: nn.Module, *, requested: bool | None, with_labels: bool, own_head: bool = False) -> bool:
    """Whether a forward call adds the load-balancing loss: asked for by the call or by the config, and with labels.

    Args:
        model (`nn.Module`): the causal LM.
        requested (`bool`, *optional*): the call's `output_router_logits`; `None` leaves it to the config.
        with_labels (`bool`): whether the call computes a loss.
        own_head (`bool`): whether another library computes it, on the shard's hidden states.

    Raises:
        ValueError: a call without labels asks for it, or one whose loss is not computed here.
    """
    if requested and not with_labels:
        raise ValueError(
            "output_router_logits=True was given without labels: the load-balancing loss is part of the loss of a "
            "sample.\n  Pass labels and shift_labels, or leave output_router_logits out."
        )
    if requested is None:
        requested = getattr(model.config, "output_router_logits", False)
    is_used = is_mixture(model) and bool(requested) and with_labels
    if is_used and own_head:
        raise ValueError(
            f"{type(model).__name__} has output_router_logits=True, and a loss that another library computes "
            "(fused_lm_head): its load-balancing loss would be that of a shard.\n"
            "  Use the model's own loss (in TRL: loss_type='nll'), or output_router_logits=False."
        )
    return is_used


def balance_loss(
    model: nn.Module,
    router_logits: tuple[torch.Tensor, ...],
    shift_labels: torch.Tensor,
    layout: SequenceLayout,
    comm: Communicator,
) -> BalanceLoss:
    """The load-balancing loss of the sample; every rank of the group must call it.

    Args:
        model (`nn.Module`): the causal LM, for its number of experts and of choices per token.
        router_logits (tuple of `torch.Tensor`): [n, num_experts] of every layer with experts.
        shift_labels (`torch.Tensor`): int64 [1, n].
        layout (`SequenceLayout`): of the sample.
        comm (`Communicator`): of the ranks that share the sample.

    Raises:
        ValueError: gradients are on, but reentrant checkpointing has cut them off the router logits.
    """
    _check_graph(model, router_logits)
    num_tokens = int((layout.indices(comm.mesh.cp_rank) >= 0).sum())  # on the host; padding is at the end
    choices, probabilities = _local_sums(router_logits, num_tokens, top_k=model.num_experts_per_tok)
    num_targets = (shift_labels != IGNORE_INDEX).sum().to(choices).view(1)
    sums = sum_over_cp(torch.cat([choices, probabilities, num_targets]), comm)
    total_choices, total_probabilities, total_targets = sums.split([len(choices), len(choices), 1])
    num_tokens_seen = layout.num_tokens * len(router_logits)  # T: a token counts once in every layer
    # d(loss)/d(S_re) = E f_e / T with f_e = choices_e / T; 0 for a sample without targets
    weights = total_choices * (model.num_experts * (total_targets > 0) / num_tokens_seen**2)
    return BalanceLoss(value=weights @ total_probabilities, part=weights @ probabilities)


def add_balance_loss(
    loss: torch.Tensor, balance: BalanceLoss, *, coefficient: float, cp_size: int, summed: bool
) -> torch.Tensor:
    """The loss of [`reduce_losses`] with `coefficient` times the load-balancing loss.

    As in transformers it is added once per sample and not divided by the targets: the sum over the samples of an
    optimizer step.

    Args:
        summed (`bool`): whether `loss` is this rank's part of a sum over ranks (`num_items_in_batch` was given), else
            it is the mean of the group, equal on its ranks.
    """
    if summed:
        return loss + coefficient * balance.part
    # value: that of the sample; gradient: cp_size * d(part), as in `reduce_losses`
    return loss + coefficient * (balance.value + cp_size * (balance.part - balance.part.detach()))


def _local_sums(
    router_logits: tuple[torch.Tensor, ...], num_tokens: int, *, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices and probabilities of every expert, [num_experts] each, summed over layers and the first `num_tokens`."""
    choices, probabilities = [], []
    for logits in router_logits:
        layer = logits[:num_tokens].to(accumulator_dtype(logits.dtype)).softmax(dim=-1)  # [tokens, E]
        chosen = torch.zeros_like(layer).scatter(1, layer.topk(top_k, dim=-1).indices, 1.0)
        choices.append(chosen.sum(dim=0))
        probabilities.append(layer.sum(dim=0))
    return torch.stack(choices).sum(dim=0), torch.stack(probabilities).sum(dim=0)


def _check_graph(model: nn.Module, router_logits: tuple[torch.Tensor, ...]) -> None:
    """Reentrant checkpointing runs a layer without a graph: its router logits would give no gradient, silently."""
    decoder = model.get_decoder()
    is_checkpointed = getattr(decoder, "gradient_checkpointing", False) and decoder.training
    if torch.is_grad_enabled() and is_checkpointed and not any(logits.requires_grad for logits in router_logits):
        raise ValueError(
            f"None of the {len(router_logits)} router logits has a gradient: reentrant checkpointing (use_reentrant="
            "True) drops it, and the load-balancing loss would train nothing.\n"
            '  Use gradient_checkpointing_kwargs={"use_reentrant": False}, or output_router_logits=False.'
        )
