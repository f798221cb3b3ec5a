"""`hf-cp doctor --launch`: collectives, failures of one rank, lost peers. A launch is in tests/test_recipes_run.py."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed import collectives
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.tools.doctor import launched as launch
from hf_cp.tools.doctor import probes
from hf_cp.tools.doctor.check import Check, Result, ok

pytestmark = pytest.mark.distributed


def probe_all(*, break_rank: int | None = None) -> list[str]:
    """The probes over ring 2 x Ulysses 2, and over ring 2 with two replicas; a rank may lose a row on the way."""
    found = []
    real = collectives.Transfer.wait

    def broken(transfer):
        received = real(transfer)
        received[0] += 1
        return received

    patch = mock.patch.object(collectives.Transfer, "wait", broken)
    for config in (ContextParallelConfig(2, 2), ContextParallelConfig(ring_degree=2)):
        with patch if break_rank == dist.get_rank() else contextlib.nullcontext():
            try:
                found.append(" ".join(probes.check_collectives(Communicator(ContextParallelMesh(config, "cpu")))))
            except RuntimeError as error:
                found.append(str(error))
    return found


def test_collectives_and_their_values(world4):
    usp, replicas = world4.run(probe_all)[3]
    for name in ("ring hop", "ring uneven exchange", "ring all-gather", "ring return of blocks", "ulysses all-to-all"):
        assert name in usp
    assert "dp sum" in replicas and "ulysses" not in replicas and "world sum" in replicas
    broken = world4.run(probe_all, break_rank=2)
    assert "rank 2 of 4 (dp 0, ring 1, ulysses 0) received wrong values in hop" in broken[2][0]
    assert all("wrong values" not in text for text in broken[1])


def examine_with_one_failing_rank() -> list[Result]:
    """A check that fails on rank 1 only, and local results that differ."""
    mesh = ContextParallelMesh(ContextParallelConfig(ring_degree=2), "cpu")
    subject = SimpleNamespace(has_train=True, training=SimpleNamespace(seed=mesh.rank, data_seed=None))
    launched = SimpleNamespace(comm=Communicator(mesh), subject=subject)

    def run(launched):
        if mesh.rank == 1:
            raise OSError("the disk of rank 1")
        return ok("fine")

    (together, alike), lost = launch.examine_together(
        [Check("G", "disk", run), Check("G", "alike", launch.check_alike)], launched
    )
    assert not lost
    local = (
        Result("G", "kernel", "fail", "no kernel", "install it")
        if mesh.rank == 1
        else Result("G", "kernel", "ok", "x")
    )
    return [together, *launch.worst_by_check([local], Communicator(mesh)), alike]


def test_a_failure_of_one_rank_is_that_of_all(world2):
    for together, local, alike in world2.run(examine_with_one_failing_rank):
        assert (
            together.status == "fail" and "rank 1: OSError: the disk of rank 1" in f"{together.detail} {together.fix}"
        )
        assert local == Result("G", "kernel", "fail", "rank 1: no kernel", "install it")
        assert alike.status == "fail" and "rank 0 and rank 1 differ: seed 0 / 1" in alike.detail


def examine_with_a_rank_that_hangs() -> list[tuple[str, str]]:
    """Rank 1 comes too late to a sum; nothing after it is tried."""
    mesh = ContextParallelMesh(ContextParallelConfig(ring_degree=2, timeout_seconds=1.0), "cpu")
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_CPU"), device=torch.device("cpu"))

    def late(launched):
        time.sleep(3.0 * mesh.rank)
        return ok(str(sum_over_world([1], comm=Communicator(mesh))))

    launched = SimpleNamespace(comm=Communicator(mesh), accelerator=accelerator)
    checks = (Check("Launched", "sum", late), Check("Launched", "next", lambda launched: ok("never")))
    with (
        mock.patch.object(launch.Launched, "join", lambda *args: launched),
        mock.patch.object(launch, "CHECKS", checks),
    ):
        return [(result.status, result.detail) for result in launch.examine_launched(None, [], 1.0)]


def test_a_rank_that_hangs_ends_the_checks_within_the_time_limit(world2):
    for joining, late, following in world2.run(examine_with_a_rank_that_hangs):
        assert joining[0] == "ok" and following[0] == "skip"
        assert late[0] == "fail" and "lost its peers" in late[1] and "(time limit 1 s)" in late[1]
