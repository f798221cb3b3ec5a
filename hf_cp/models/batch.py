"""Checks a batch before any collective, and tells every rank of the group when one of them has a bad one."""

from __future__ import annotations

import logging

import torch

from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree, gather_over_cp, hex_digest
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample, replace

logger = logging.getLogger(__name__)


def sample_of(hf_cp_sample: PackedSample | None, hf_cp_layout: SequenceLayout | None) -> PackedSample | None:
    """What travels with a batch, under its name or that of earlier versions (a bare layout)."""
    if hf_cp_sample is not None or hf_cp_layout is None:
        return hf_cp_sample
    return hf_cp_layout if isinstance(hf_cp_layout, PackedSample) else PackedSample(hf_cp_layout)


@torch.compiler.disable
def agreed_sample(
    tokens: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    sample: PackedSample | None,
    comm: Communicator,
    *,
    in_step: bool = False,
) -> PackedSample:
    """The batch's sample, once the ranks of its group are known to hold the same one.

    Raises if this rank's batch does not fit its sample; tells the group, and raises if the ranks' samples differ.
    A sample from the packed loader has been compared before, and a batch with neither sample nor labels comes from
    somewhere else (maybe on this rank alone): then nothing is exchanged. One with labels is a training step, which the
    group takes together: peers that have their samples compare them now, and are told.

    Args:
        tokens, attention_mask, labels, shift_labels: of the call; see `_local_fault` for what they must be.
        in_step (`bool`, *optional*, defaults to `False`): all ranks of the world call the same modules, as where
            weights are gathered from all of them for each call. Then they all compare, and the sample gets the
            `common_length` of the longest one.

    Raises:
        ValueError: this rank's batch is at fault, or the samples of the group differ.
        RuntimeError: another rank's batch is at fault.
    """
    mesh = comm.mesh
    fault = _local_fault(tokens, attention_mask, labels, shift_labels, sample, mesh)
    is_alone = sample is None and labels is None and shift_labels is None
    if is_alone or (sample is not None and sample.is_agreed):  # nobody waits for this rank here
        if fault is not None:
            raise ValueError(fault)
        return sample
    if fault is not None:
        logger.error("cp_rank %d of %d: %s", mesh.cp_rank, mesh.cp_size, fault)  # in case that a peer never comes
    if in_step and mesh.dp_size > 1:
        error = None if fault is None else ValueError(fault)
        digest, size = (0, 0) if sample is None else (_digest(sample), sample.layout.local_length)
        return replace(sample, common_length=agree("sample", comm=comm, digest=digest, error=error, size=size))
    _compare(sample, fault, comm)
    return sample


def _compare(sample: PackedSample | None, fault: str | None, comm: Communicator) -> None:
    """Tells the group of this rank's fault, and raises for any fault or difference."""
    peers = gather_over_cp([fault is not None, 0 if sample is None else _digest(sample)], comm=comm)
    if fault is not None:
        raise ValueError(fault)
    bad = [cp_rank for cp_rank, (failed, _) in enumerate(peers) if failed]
    if bad:
        raise RuntimeError(
            f"The batch of cp_rank {bad} (out of {comm.mesh.cp_size}) is not valid; its own message is in the log of "
            "that process. All ranks of the group stop."
        )
    if len({digest for _, digest in peers}) > 1:
        raise ValueError(
            f"The ranks of one context-parallel group hold different samples: their digests by cp_rank "
            f"are {[hex_digest(digest) for _, digest in peers]}, here {sample.layout}.\n"
            "  Every rank of a group must shard the same documents: use this package's loader, or one sampler seed "
            "for the group (accelerator.prepare deals other batches of a loader to every rank)."
        )


def _digest(sample: PackedSample) -> int:
    """Of the whole content; of a batch that was made by hand only the layout's."""
    return int(sample.layout.digest[:15], 16) if sample.digest is None else sample.digest


def _local_fault(
    tokens: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    sample: PackedSample | None,
    mesh: ContextParallelMesh,
) -> str | None:
    """What is wrong with a batch.

    Args:
        tokens (`torch.Tensor`): [1, n] ids or [1, n, hidden_size] embeddings.
        attention_mask: must be `None` or all ones of [1, n]; padding is the collator's business. A mask of pairs of
            tokens, whatever it says, would be ignored: attention is causal within each document.
        labels, shift_labels (`torch.Tensor`, *optional*): [1, n]; with labels there must be shift_labels.
    """
    if sample is None:
        return (
            "The batch has no hf_cp_sample while context parallelism is on, so it did not come from "
            "DataCollatorForContextParallel.\n  Use that collator, or context_parallel_disabled(model) for whole "
            "samples (generate() needs use_cache=True)."
        )
    fault, layout = mesh.degrees_fault(sample.layout, "The batch"), sample.layout
    if fault is not None:
        return fault
    if sample.cp_rank not in (None, mesh.cp_rank):
        return (
            f"The batch is the part of cp_rank {sample.cp_rank}, but this process is cp_rank {mesh.cp_rank} of "
            f"{mesh.cp_size}. Make the collator with cp_rank=mesh.cp_rank, or without cp_rank."
        )
    expected = (1, layout.local_length)
    named = {"input_ids": tokens, "labels": labels, "shift_labels": shift_labels}
    for name, tensor in named.items():
        if tensor is not None and tuple(tensor.shape[:2]) != expected:
            return (
                f"{name} has shape {tuple(tensor.shape)}; cp_rank {mesh.cp_rank} of {mesh.cp_size} must get "
                f"{list(expected)} of the sample of {layout.num_tokens} tokens. Shard it with its layout."
            )
    if labels is not None and shift_labels is None:
        return (
            "The batch has labels but no shift_labels: on a shard the next token may be on another rank.\n"
            "  Shift before sharding, as DataCollatorForContextParallel does."
        )
    return None if attention_mask is None else _mask_fault(attention_mask, expected)


def _mask_fault(attention_mask: torch.Tensor, expected: tuple[int, int]) -> str | None:
    shape = getattr(attention_mask, "shape", None)  # transformers takes a dict of masks as well
    if shape != expected:
        named = type(attention_mask).__name__ if shape is None else f"of shape {tuple(shape)}"
        return (
            f"attention_mask ({named}) is not one number for each of the {expected[1]} slots. Attention is causal "
            "within each document here, and would ignore any other pattern.\n"
            "  Drop the mask. A model with bidirectional, prefix or other attention cannot be split."
        )
    if not bool((attention_mask == 1).all()):
        return (
            f"attention_mask of shape {expected} is not all ones. Padding and documents are in the layout: let "
            "DataCollatorForContextParallel strip padded tokens, and drop the mask."
        )
    return None
