"""All ranks learn of a problem on any rank, at the same moment.

Before a micro-step (and when a loader is made) every rank says how it is doing and what row it holds, in one small
gather on the host. Each rank then sees the same reports and reaches the same verdict: go on, or raise. So an error
that is local to one rank ends the run everywhere, with that rank's name, instead of leaving the others waiting in a
collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from hf_cp.distributed.clock import Waiting
from hf_cp.distributed.faults import Watched
from hf_cp.distributed.mesh import ContextParallelMesh


class Status(IntEnum):
    """How a rank is doing."""

    OK = 0
    EXHAUSTED = 1
    ERROR = 2


@dataclass(frozen=True)
class Report:
    """What a rank says about one step.

    Args:
        status (`Status`): whether it has a row.
        step (`int`): number of the micro-step; -1 while the loader is being made.
        digest (`int`): signed 64-bit hash of what must be equal among ranks.
        dp_rank (`int`): the context-parallel group that the rank is in.
        size (`int`): local slots of its row.
    """

    status: Status
    step: int
    digest: int
    dp_rank: int
    size: int


def exchange_status(
    what: str,
    *,
    mesh: ContextParallelMesh,
    step: int = -1,
    digest: int = 0,
    is_exhausted: bool = False,
    error: Exception | None = None,
    scope: str = "cp",
    size: int = 0,
) -> int:
    """Tells every rank how this one is doing; returns if all are well and agree, else raises on all of them.

    With one process nothing is communicated. Otherwise 5 integers are gathered; messages travel after an error.

    Args:
        what (`str`): what `digest` is of, for messages ("row", "packing").
        mesh (`ContextParallelMesh`): its `status_group` carries the reports.
        step (`int`): number of the micro-step.
        digest (`int`): signed 64-bit hash of what must be equal.
        is_exhausted (`bool`): this rank has no more rows.
        error (`Exception`, *optional*): what this rank's own work raised.
        scope (`str`): the digest must be equal within the context-parallel group (`"cp"`) or everywhere (`"world"`).
        size (`int`): local slots of this rank's row.

    Returns:
        `int`: the largest `size` of any rank.

    Raises:
        RuntimeError: some rank had an error, or ranks are at different steps, or their digests differ.
        CommunicationError: a rank has ended or does not answer.
        Exception: `error` itself, if every rank had the same one.
    """
    status = Status.ERROR if error is not None else Status.EXHAUSTED if is_exhausted else Status.OK
    reports = _gather(Report(status, step, digest, mesh.dp_rank, size), what, mesh)
    if any(report.status == Status.ERROR for report in reports):
        _raise_error(error, what, step, mesh)
    expected, first = reports[0], {}
    for rank, report in enumerate(reports):
        if (report.status, report.step) != (expected.status, expected.step):
            raise RuntimeError(
                f"The ranks are at different places in the data: rank 0 is at {_place(expected)}, rank {rank} at "
                f"{_place(report)}.\n  Every rank must take the same number of batches from its loader."
            )
        peer = 0 if scope == "world" else first.setdefault(report.dp_rank, rank)
        if report.digest != reports[peer].digest:
            _raise_difference(what, step, (peer, reports[peer]), (rank, report), scope)
    return max(report.size for report in reports)


def _gather(report: Report, what: str, mesh: ContextParallelMesh) -> list[Report]:
    """Every rank's report, in rank order."""
    if mesh.status_group is None:
        return [report]
    own = torch.tensor([report.status, report.step, report.digest, report.dp_rank, report.size], dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(mesh.world_size)]
    with Waiting(mesh, "world", "the exchange of reports", during=f"agreeing on the {what}{_at(report.step)}"):
        dist.all_gather(gathered, own, group=mesh.status_group)
    return [Report(Status(status), *rest) for status, *rest in (tensor.tolist() for tensor in gathered)]


def _raise_error(error: Exception | None, what: str, step: int, mesh: ContextParallelMesh) -> None:
    message = None if error is None else f"{type(error).__name__}: {error}"
    messages = [message]
    if mesh.status_group is not None:
        messages = [None] * mesh.world_size
        with Watched(mesh, "world", "the exchange of error messages", during=f"agreeing on the {what}{_at(step)}"):
            dist.all_gather_object(messages, message, group=mesh.status_group)
    if error is not None and len(set(messages)) == 1:
        raise error  # a mistake that every rank made: it keeps its type and traceback
    failed = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in failed)
    raise RuntimeError(
        f"{len(failed)} of {mesh.world_size} ranks could not make their {what}{_at(step)}:\n{lines}\n"
        "  All ranks stop here. Fix the cause on the ranks named, and see that all ranks read the same data set."
    ) from error


def _raise_difference(what: str, step: int, first: tuple[int, Report], second: tuple[int, Report], scope: str) -> None:
    (rank_a, a), (rank_b, b) = first, second
    group = "The world" if scope == "world" else f"Context-parallel group {a.dp_rank} (dp_rank)"
    raise RuntimeError(
        f"{group} disagrees on its {what}{_at(step)}: rank {rank_a} has digest {a.digest & _MASK:016x}, rank {rank_b} "
        f"has {b.digest & _MASK:016x}.\n"
        "  Give all of these ranks the same documents in the same order, the same seed and the same max_tokens."
    )


_MASK = 2**64 - 1  # shows a signed digest as unsigned hex


def _at(step: int) -> str:
    return "" if step < 0 else f" for micro-step {step}"


def _place(report: Report) -> str:
    return f"micro-step {report.step}" + (" (no rows left)" if report.status == Status.EXHAUSTED else "")
