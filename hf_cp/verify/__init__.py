"""The proof that a split run computes what one process computes, on the user's own model and documents.

One packed sample is trained on from the same parameters, with plain SGD, by the untouched Hugging Face model in one
process, by our code in one process and by the group (`runs`). Logits of every token, the loss, the number of targets
and every gradient of every trainable parameter are compared; after `steps` steps every update and every loss
(`compare`). A token of a document is exchanged, to see that no other document notices. What fails is diagnosed
(`diagnosis`).

A trainable parameter that is all zeros is filled with seeded random numbers first: with LoRA's ordinary B = 0 every
gradient of A is zero, and comparing zeros proves nothing. Dropout is off meanwhile. The parameters, gradients and
modes that the model came with are put back exactly. All processes get the same report: that of the process that is
farthest off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from hf_cp.distributed.host import gather_objects
from hf_cp.verify.compare import Settings, compare
from hf_cp.verify.diagnosis import examine
from hf_cp.verify.report import Check, VerifyReport, build_report
from hf_cp.verify.runs import Sample, prepared

__all__ = ["Check", "VerifyReport", "verify_context_parallel"]


def verify_context_parallel(
    model: torch.nn.Module,
    documents: Sequence[Mapping[str, Sequence[int]]],
    *,
    steps: int = 3,
    learning_rate: float = 0.01,
    seed: int = 0,
    loss_tolerance: float = 1e-5,
    gradient_tolerance: float = 1e-4,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares one process on a whole packed sample with the group on its shares; every process must call it.

    Args:
        model (`torch.nn.Module`): patched with [`apply_context_parallel`], with or without adapters, not yet wrapped
            by DeepSpeed, FSDP or DDP; equal on all processes. It is put back as it came.
        documents (sequence of mappings): `input_ids` and, if not all tokens are targets, unshifted `labels` (-100
            where there is no target). All documents together are the sample, which one process must be able to hold.
        steps (`int`): SGD steps; the first one gives the gradients.
        learning_rate (`float`): of the SGD steps.
        seed (`int`): of the random numbers that replace all-zero trainable parameters.
        loss_tolerance (`float`): allowed relative difference of a loss.
        gradient_tolerance (`float`): allowed relative difference of logits, of a gradient, of an update and of the
            gradient norm; a tenth of it for the drift of the updates. Both tolerances are for fp32 and fp64. If a
            weight is bf16 or fp16, the group may be twice as far from fp32 as the untouched model is.
        progress (callable, *optional*): told in a line what is computed next.

    Raises:
        ValueError: the model is not patched, is wrapped or has nothing to train; the documents hold no target.
        RuntimeError: the processes do not hold the same parameters.
    """
    settings, sample = Settings(steps, learning_rate, loss_tolerance, gradient_tolerance), Sample.of(model, documents)
    with prepared(model, sample.parameters, seed):
        return _report(sample, settings, progress or (lambda text: None))


def _report(sample: Sample, settings: Settings, progress: Callable[[str], None]) -> VerifyReport:
    """The report of the process that is farthest off, on every process, with the likely cause if it fails."""
    found = compare(sample, settings, progress)
    reports = gather_objects(build_report(sample, found, settings), comm=sample.comm)
    farthest = max(range(len(reports)), key=lambda rank: reports[rank].severity)
    if reports[farthest].passed:
        return reports[farthest]
    # a process that passes takes part too: the diagnosis makes one more run
    cause, text = gather_objects(examine(sample, found), comm=sample.comm)[farthest]
    return dataclasses.replace(reports[farthest], cause=cause, diagnosis=text)
