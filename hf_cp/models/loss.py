"""Cross-entropy on the local shard, `lm_head` included, without ever holding the logits of a whole shard.

The shard is cut into chunks; a chunk's logits exist only while its losses are computed, and once more in the backward
pass (activation checkpointing); those of a single chunk are kept. `lm_head` is called as the module it is, so ties,
LoRA and parameter gathering work.

With W = dp x cp ranks whose gradients are averaged, N targets in all, and S_r the sum of rank r's token losses, the
gradient of the global token mean (sum of all S_r) / N is the average of d(S_r W / N).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hf_cp.attention.merge import accumulator_dtype
from hf_cp.config import IGNORE_INDEX
from hf_cp.distributed.collectives import sum_over_cp
from hf_cp.distributed.communicator import Communicator
from hf_cp.models.chunk_gradients import Forward, summed_over_chunks


@torch.compiler.disable  # the number of chunks changes from sample to sample
def token_losses(
    hidden: torch.Tensor,
    lm_head: nn.Module,
    shift_labels: torch.Tensor,
    *,
    num_chunks: int,
    label_smoothing: float = 0.0,
    on_logits: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Cross-entropy of every local token.

    Args:
        hidden (`torch.Tensor`): [n, hidden_size], the last hidden states.
        lm_head (`nn.Module`): maps hidden states to logits.
        shift_labels (`torch.Tensor`): int64 [n], the next token of each slot, -100 where there is no target.
        num_chunks (`int`): calls of `lm_head`, the same on all ranks; logits of 1 / num_chunks of the slots exist at
            the same time.
        label_smoothing (`float`): e in (1 - e) * loss + e * (mean of -log p over the vocabulary), as in
            [`transformers.trainer_pt_utils.LabelSmoother`].
        on_logits (`Callable`, *optional*): is shown the logits [slots of the chunk, vocabulary] of every chunk that
            is not empty, in order; for evaluation, so only without gradients.

    Returns:
        `torch.Tensor` [n], fp32 (fp64 for an fp64 model), 0 where there is no target; it has a graph even if there is
        no target at all.

    Raises:
        ValueError: `on_logits` is given while gradients are recorded (chunks are computed twice then).
    """
    if on_logits is not None and torch.is_grad_enabled():
        raise ValueError("Logits are shown in evaluation only, but gradients are on. Use torch.no_grad().")
    chunks = zip(hidden.tensor_split(num_chunks), shift_labels.tensor_split(num_chunks), strict=True)
    if num_chunks == 1 or not torch.is_grad_enabled():  # a single chunk would be computed again as soon as it is done
        return torch.cat([_chunk_losses(h, labels, lm_head, label_smoothing, on_logits) for h, labels in chunks])
    head = summed_over_chunks(lm_head, lm_head, num_chunks)
    return torch.cat(
        [checkpoint(_chunk_losses, h, labels, head, label_smoothing, use_reentrant=False) for h, labels in chunks]
    )


def _chunk_losses(
    hidden: torch.Tensor,
    shift_labels: torch.Tensor,
    lm_head: Forward,
    label_smoothing: float,
    on_logits: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    logits = lm_head(hidden)
    logits = logits.to(accumulator_dtype(logits.dtype))
    if on_logits is not None and len(logits):
        on_logits(logits)
    return cross_entropy(
        logits, shift_labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=label_smoothing
    )


@torch.compiler.disable
def reduce_losses(
    losses: torch.Tensor,
    shift_labels: torch.Tensor,
    comm: Communicator,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The scalar loss of this rank.

    With `num_items_in_batch` it is the local sum over that number (0 counts as 1): summed over all ranks, the token
    mean; [`transformers.Trainer`] multiplies it by W. Without, it is the mean over the targets of the context-parallel
    group, equal on its ranks; averaged over all W ranks, the gradient is the mean of the groups' gradients (the token
    mean over the world needs `num_items_in_batch`).
    """
    local_sum = losses.sum()
    if num_items_in_batch is not None:
        return local_sum / torch.as_tensor(num_items_in_batch, device=losses.device).clamp(min=1)
    num_targets = sum_over_cp((shift_labels != IGNORE_INDEX).sum(), comm).clamp(min=1)
    share = local_sum / num_targets
    # value: the mean over the group's M targets; gradient: cp_size * d(local_sum) / M, so that the average over all
    # W = dp * cp ranks is the mean over the dp groups of d(sum over the group) / M
    return sum_over_cp(share, comm) + comm.mesh.cp_size * (share - share.detach())
