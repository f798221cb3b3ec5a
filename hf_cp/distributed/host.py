"""Counts, objects and agreement: what ranks tell each other besides tensors.

Everything runs on the host over the mesh's `host_group` (gloo, over the world), but for [`gather_over_cp`], which
involves one context-parallel group only. With one process nothing is communicated. Numbers
that every rank must agree on (targets of an optimizer step, the evaluation loss) are summed in a type that does not
round them: int64 for counts, fp64 for losses.

Before a micro-step (and when a loader is made) every rank says how it is doing and what packed sample it holds
([`agree`]). Each rank sees the same reports and reaches the same verdict: go on, or raise. So an error that is local
to one rank ends the run everywhere, with that rank's name, instead of leaving the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from hf_cp.distributed.communicator import Communicator


def sum_over_world(values: Sequence[float] | Sequence[int], *, comm: Communicator) -> list[float] | list[int]:
    """Adds up `values` element by element over every process; bit-identical on every rank, ints exactly.

    Args:
        values (`Sequence[float]` or `Sequence[int]`): the same number of values, of the same type, on every rank.

    >>> from hf_cp import ContextParallelConfig, ContextParallelMesh
    >>> sum_over_world([3, 4], comm=Communicator(ContextParallelMesh(ContextParallelConfig())))
    [3, 4]
    """
    if comm.mesh.host_group is None:
        return list(values)
    exact = all(isinstance(value, int) for value in values)
    tensor = torch.tensor(values, dtype=torch.int64 if exact else torch.float64)
    with comm.waiting("world", "a sum of counts or losses over all processes"):
        dist.all_reduce(tensor, group=comm.mesh.host_group)
    return tensor.tolist()


def gather_objects(value: Any, *, comm: Communicator, what: str = "the gather of what all processes found") -> list:
    """`value` of every process, in rank order, on every process. Objects are pickled between our own processes."""
    if comm.mesh.host_group is None:
        return [value]
    gathered = [None] * comm.mesh.world_size
    with comm.waiting("world", what):
        dist.all_gather_object(gathered, value, group=comm.mesh.host_group)
    return gathered


def gather_over_cp(values: Sequence[int], *, comm: Communicator) -> list[list[int]]:
    """Ints of every rank of the context-parallel group, in cp_rank order; only this group takes part and waits."""
    mesh = comm.mesh
    if mesh.cp_size == 1:
        return [list(values)]
    own = torch.tensor(values, dtype=torch.int64, device=mesh.device_type)
    gathered = [torch.empty_like(own) for _ in range(mesh.cp_size)]
    with comm.waiting("cp", "the comparison of the ranks' batches"):
        dist.all_gather(gathered, own, group=mesh.cp_group)
    return [tensor.tolist() for tensor in gathered]


class Status(IntEnum):
    """How a rank is doing."""

    OK = 0
    EXHAUSTED = 1
    ERROR = 2


@dataclass(frozen=True)
class Report:
    """What a rank says about one step.

    Args:
        status (`Status`): whether it has a sample.
        step (`int`): number of the micro-step; -1 while the loader is being made.
        digest (`int`): signed 64-bit hash of what must be equal among ranks.
        dp_rank (`int`): the context-parallel group that the rank is in.
        size (`int`): local slots of its sample.
    """

    status: Status
    step: int
    digest: int
    dp_rank: int
    size: int


def agree(
    what: str,
    *,
    comm: Communicator,
    step: int = -1,
    digest: int = 0,
    is_exhausted: bool = False,
    error: Exception | None = None,
    scope: str = "cp",
    size: int = 0,
) -> int:
    """Tells every rank how this one is doing; returns if all are well and agree, else raises on all of them.

    Five integers are gathered; messages travel only after an error.

    Args:
        what (`str`): what `digest` is of, for messages ("sample", "packing").
        step, digest, size (`int`): see [`Report`].
        is_exhausted (`bool`): this rank has no more samples.
        error (`Exception`, *optional*): what this rank's own work raised.
        scope (`str`): the digest must be equal within the context-parallel group (`"cp"`) or everywhere (`"world"`).

    Returns:
        `int`: the largest `size` of any rank.

    Raises:
        RuntimeError: some rank had an error, or ranks are at different steps, or their digests differ.
        CommunicationError: a rank has ended or does not answer.
        Exception: `error` itself, if every rank had the same one.
    """
    status = Status.ERROR if error is not None else Status.EXHAUSTED if is_exhausted else Status.OK
    reports = _gather(Report(status, step, digest, comm.mesh.dp_rank, size), what, comm)
    if any(report.status == Status.ERROR for report in reports):
        _raise_error(error, what, step, comm)
    _compare(reports, what, scope)
    return max(report.size for report in reports)


def _compare(reports: list[Report], what: str, scope: str) -> None:
    """Raises unless all ranks are at one step, and those of a scope hold the same."""
    expected, first = reports[0], {}
    for rank, report in enumerate(reports):
        if (report.status, report.step) != (expected.status, expected.step):
            raise RuntimeError(
                f"The ranks are at different places in the data: rank 0 is at {_position(expected)}, rank {rank} at "
                f"{_position(report)}.\n  Every rank must take the same number of batches from its loader."
            )
        peer = 0 if scope == "world" else first.setdefault(report.dp_rank, rank)
        if report.digest != reports[peer].digest:
            _raise_difference(what, report.step, (peer, reports[peer]), (rank, report), scope)


def _gather(report: Report, what: str, comm: Communicator) -> list[Report]:
    """Every rank's report, in rank order; as integers, since this runs in every micro-step."""
    if comm.mesh.host_group is None:
        return [report]
    own = torch.tensor(astuple(report), dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(comm.mesh.world_size)]
    with comm.waiting("world", "the agreement of all ranks", during=f"agreeing on the {what}{_at(report.step)}"):
        dist.all_gather(gathered, own, group=comm.mesh.host_group)
    return [Report(Status(status), *rest) for status, *rest in (tensor.tolist() for tensor in gathered)]


def _raise_error(error: Exception | None, what: str, step: int, comm: Communicator) -> None:
    message = None if error is None else f"{type(error).__name__}: {error}"
    messages = gather_objects(message, comm=comm, what=f"the gather of errors about the {what}{_at(step)}")
    if error is not None and len(set(messages)) == 1:
        raise error  # a mistake that every rank made: it keeps its type and traceback
    failed = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in failed)
    raise RuntimeError(
        f"{len(failed)} of {comm.mesh.world_size} ranks could not make their {what}{_at(step)}:\n{lines}\n"
        "  All ranks stop here. Fix the cause on the ranks named, and see that all ranks read the same data set."
    ) from error


def _raise_difference(what: str, step: int, first: tuple[int, Report], second: tuple[int, Report], scope: str) -> None:
    (rank_a, a), (rank_b, b) = first, second
    group = "The world" if scope == "world" else f"Context-parallel group {a.dp_rank} (dp_rank)"
    raise RuntimeError(
        f"{group} disagrees on its {what}{_at(step)}: rank {rank_a} has digest {hex_digest(a.digest)}, rank {rank_b} "
        f"has {hex_digest(b.digest)}.\n"
        "  Give all of these ranks the same documents in the same order, the same seed and the same max_tokens."
    )


def hex_digest(digest: int) -> str:
    """A signed 64-bit digest as 16 hex digits.

    >>> hex_digest(-1)
    'ffffffffffffffff'
    """
    return f"{digest & (2**64 - 1):016x}"


def _at(step: int) -> str:
    return "" if step < 0 else f" for micro-step {step}"


def _position(report: Report) -> str:
    return f"micro-step {report.step}" + (" (no samples left)" if report.status == Status.EXHAUSTED else "")
