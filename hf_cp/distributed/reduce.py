"""Host-side sums and gathers over all processes: counts of targets, sums of losses, numbers for logs.

The numbers that every rank must agree on (targets in an accumulation window, the evaluation loss) are summed here, on
the host and in a type that does not round them: int64 for counts, fp64 for losses. With one process nothing is
communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_cp.distributed.clock import Waiting
from hf_cp.distributed.mesh import ContextParallelMesh


def sum_over_world(values: Sequence[float] | Sequence[int], *, mesh: ContextParallelMesh) -> list[float] | list[int]:
    """Adds up `values` element by element over every process of the mesh.

    Args:
        values (`Sequence[float]` or `Sequence[int]`): the same number of values, of the same type, on every rank.
        mesh (`ContextParallelMesh`): its `status_group` (gloo, over the world) carries them.

    Returns:
        `list`: the sums, bit-identical on every rank; ints are summed exactly.

    >>> from hf_cp.config import ContextParallelConfig
    >>> sum_over_world([3, 4], mesh=ContextParallelMesh(ContextParallelConfig()))
    [3, 4]
    """
    if mesh.status_group is None:
        return list(values)
    exact = all(isinstance(value, int) for value in values)
    tensor = torch.tensor(values, dtype=torch.int64 if exact else torch.float64)
    with Waiting(mesh, "world", "a sum of counts or losses over all processes"):
        dist.all_reduce(tensor, group=mesh.status_group)
    return tensor.tolist()


def gather_over_world(values: Sequence[float], *, mesh: ContextParallelMesh) -> list[list[float]]:
    """`values` of every process, in rank order, as fp64; the same number of values on every rank.

    The mesh's `status_group` carries them. With one process nothing is communicated.
    """
    if mesh.status_group is None:
        return [[float(value) for value in values]]
    own = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(mesh.world_size)]
    with Waiting(mesh, "world", "the gather of numbers of all processes"):
        dist.all_gather(gathered, own, group=mesh.status_group)
    return [tensor.tolist() for tensor in gathered]


def gather_objects(value: Any, *, mesh: ContextParallelMesh) -> list[Any]:
    """`value` of every process, in rank order, on every process. Objects are pickled between our own processes."""
    if mesh.status_group is None:
        return [value]
    gathered = [None] * mesh.world_size
    with Waiting(mesh, "world", "the gather of what all processes found"):
        dist.all_gather_object(gathered, value, group=mesh.status_group)
    return gathered
