"""Gathers per-token results of an evaluation on the host of every process.

The results of a token may be several numbers of several types, so they travel as bytes: nothing is rounded, and 16-bit
types need no support from the backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_cp.distributed.faults import Watched
from hf_cp.distributed.mesh import ContextParallelMesh


def gather_rows(rows: torch.Tensor, *, mesh: ContextParallelMesh, lengths: list[int]) -> list[torch.Tensor]:
    """The rows of every process, in rank order, on every process.

    Args:
        rows (`torch.Tensor`): uint8 [lengths[rank], bytes of a row], on the host; equally many bytes on all ranks.
        mesh (`ContextParallelMesh`): its `status_group` (gloo, over the world) carries them.
        lengths (`list[int]`): rows of each process.

    Raises:
        ValueError: a row does not have equally many bytes everywhere; on all ranks.
    """
    if mesh.status_group is None:
        return [rows]
    with Watched(mesh, "world", "the gather of predictions"):
        widths = [torch.zeros(1, dtype=torch.int64) for _ in lengths]
        dist.all_gather(widths, torch.tensor([rows.shape[1]]), group=mesh.status_group)
        widths = [int(width) for width in widths]
        if len(set(widths)) > 1:
            raise ValueError(
                f"The ranks have results of other sizes for a token: {widths} bytes by rank.\n"
                "  Let preprocess_logits_for_metrics return the same types and sizes for all tokens."
            )
        padded = rows.new_zeros(max(lengths), rows.shape[1])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=mesh.status_group)
    return [part[:length] for part, length in zip(gathered, lengths, strict=True)]
