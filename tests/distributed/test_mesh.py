from __future__ import annotations

import copy
import os
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.mesh import ContextParallelMesh

pytestmark = pytest.mark.distributed


def groups(ring_degree: int, ulysses_degree: int, ranks=None) -> dict[str, list[int]]:
    mesh = ContextParallelMesh(ContextParallelConfig(ring_degree, ulysses_degree), ranks=ranks)
    found = {}
    for axis in ("cp", "dp", "ring", "ulysses"):
        group = getattr(mesh, f"{axis}_group")
        found[axis] = dist.get_process_group_ranks(group)
        assert dist.get_rank(group) == getattr(mesh, f"{axis}_rank")
        assert dist.get_world_size(group) == getattr(mesh, f"{axis}_size")
        everyone = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(everyone, group=group)
        assert everyone.item() == sum(found[axis])
    return found


def test_two_replicas_of_a_ring_of_two(world4):
    found = world4.run(groups, 2, 1)
    assert [f["cp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["dp"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["ring"] for f in found] == [f["cp"] for f in found]


def test_ulysses_is_the_inner_axis(world4):
    found = world4.run(groups, 2, 2)
    assert [f["cp"] for f in found] == [[0, 1, 2, 3]] * 4
    assert [f["ulysses"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["ring"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_placed_by_hand(world4):
    found = world4.run(groups, 2, 1, ranks=[[[0], [2]], [[1], [3]]])
    assert [f["cp"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def order_of_a_group(ranks) -> list[int]:
    """What an all-gather over the ring brings, in the order in which it arrives."""
    mesh = ContextParallelMesh(ContextParallelConfig(2, 1), ranks=ranks)
    assert dist.get_rank(mesh.ring_group) == mesh.ring_rank and dist.get_rank(mesh.cp_group) == mesh.cp_rank
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=mesh.ring_group)
    return [int(rank) for rank in gathered]


def test_ranks_that_do_not_rise_keep_their_order(world4):
    assert world4.run(order_of_a_group, [[[3], [0]], [[2], [1]]]) == [[3, 0], [2, 1], [2, 1], [3, 0]]


def test_a_mesh_cannot_be_pickled():
    with pytest.raises(TypeError, match="remove_context_parallel"):
        pickle.dumps(ContextParallelMesh(ContextParallelConfig()))


def wrong_mesh(ring_degree: int, ulysses_degree: int, ranks=None) -> None:
    ContextParallelMesh(ContextParallelConfig(ring_degree, ulysses_degree), ranks=ranks)


@pytest.mark.parametrize(
    ("ring_degree", "ulysses_degree", "message"),
    [(3, 1, "cp_size=3"), (8, 1, "cp_size=8"), (3, 2, "cp_size=6"), (0, 1, "ring_degree must be a positive integer")],
)
def test_impossible_sizes_are_refused_on_every_rank(world4, ring_degree, ulysses_degree, message):
    for error in world4.run(wrong_mesh, ring_degree, ulysses_degree, timeout=5, expect_error=True):
        assert error.type_name == "ValueError"
        assert message in error.message
        assert "4 launched processes" in error.message or ring_degree == 0


def test_ranks_must_be_all_ranks_once(world4):
    for error in world4.run(wrong_mesh, 2, 1, [[[0], [1]], [[2], [2]]], timeout=5, expect_error=True):
        assert "each of the 4 ranks once" in error.message


def timeouts(config: ContextParallelConfig) -> list[timedelta]:
    mesh = ContextParallelMesh(config)
    made = (mesh.cp_group, mesh.dp_group, mesh.ring_group, mesh.ulysses_group, mesh.host_group)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in made]


def test_every_group_has_the_time_limit_of_the_world(world4):
    """The test worlds are made with 60 seconds."""
    assert world4.run(timeouts, ContextParallelConfig(2, 2)) == [[timedelta(seconds=60)] * 5] * 4


def test_a_time_limit_in_the_config_wins(world4):
    assert world4.run(timeouts, ContextParallelConfig(2, 2, timeout_seconds=33.0)) == [[timedelta(seconds=33)] * 5] * 4


def sizes_of_one() -> None:
    mesh = ContextParallelMesh(ContextParallelConfig())
    assert (mesh.cp_size, mesh.dp_size, mesh.cp_group) == (1, 2, None)
    assert mesh.dp_group is dist.group.WORLD
    assert copy.deepcopy(mesh) is mesh


def test_without_context_parallelism_everything_is_dp(world2):
    world2.run(sizes_of_one)


def test_one_process_needs_no_process_group(world1):
    mesh = ContextParallelMesh(ContextParallelConfig())
    assert (mesh.rank, mesh.world_size, mesh.cp_rank, mesh.dp_rank, mesh.host_group) == (0, 1, 0, 0, None)
    with pytest.raises(ValueError, match="does not divide the 1 launched"):
        ContextParallelMesh(ContextParallelConfig(2))


def test_launched_but_not_initialised(monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="not initialised yet"):
        ContextParallelMesh(ContextParallelConfig(2))
