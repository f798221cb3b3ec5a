"""The process pool keeps its promises: without it a hang or a wrong rank order would spoil every distributed test."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import RankError, World, WorldError

pytestmark = pytest.mark.distributed


def rank_and_sum(offset: int, *, scale: int = 1) -> tuple[int, int]:
    total = torch.tensor(scale * (offset + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def return_tensor() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()), dtype=torch.float64)


def raise_on(ranks: tuple[int, ...]) -> str:
    if dist.get_rank() in ranks:
        raise ValueError(f"bad input on rank {dist.get_rank()}")
    return "fine"


def raise_and_leave_others_waiting() -> None:
    if dist.get_rank() == 0:
        raise ValueError("rank 0 left early")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.write(2, b"last words\n")
        os._exit(3)


def change_the_process() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank() + 7)
    random.seed(7)
    os.environ["LEFT_OVER"] = "1"
    for _ in range(3):
        dist.new_group([0, 1])


def look_at_the_process() -> tuple:
    environment = os.environ
    return (
        torch.get_default_dtype(),
        torch.rand(1).item(),
        random.random(),
        "LEFT_OVER" in environment,
        torch.get_num_threads(),
        environment["RANK"] == str(dist.get_rank()),
        environment["WORLD_SIZE"],
        len(dist.distributed_c10d._world.pg_map),
    )


def process_id() -> int:
    return os.getpid()


def sum_with_loader_workers() -> int:
    loader = torch.utils.data.DataLoader(range(8), batch_size=None, num_workers=1)
    return sum(int(item) for item in loader)


def test_results_come_in_rank_order(world2: World, world3: World) -> None:
    assert world2.run(rank_and_sum, 10) == [(0, 21), (1, 21)]
    assert world3.run(rank_and_sum, 1, scale=2) == [(0, 12), (1, 12), (2, 12)]


def test_tensors_come_by_value(world2: World) -> None:
    first, second = world2.run(return_tensor)
    assert first.tolist() == [0.0, 0.0] and second.tolist() == [1.0, 1.0]
    assert second.dtype == torch.float64 and not second.is_shared()


def test_an_exception_names_its_rank_and_the_processes_stay(world2: World) -> None:
    before = world2.run(process_id)
    with pytest.raises(WorldError, match=r"(?s)raise_on raised on rank 1 of 2.*ValueError: bad input on rank 1"):
        world2.run(raise_on, (1,))
    assert world2.run(process_id) == before


def test_each_distinct_traceback_is_shown_once(world3: World) -> None:
    with pytest.raises(WorldError, match="raised on ranks 0, 1, 2 of 3") as caught:
        world3.run(int, "no number")
    assert str(caught.value).count("ValueError: invalid literal") == 1
    assert "--- ranks 0, 1, 2:" in str(caught.value)


def test_a_rank_left_waiting_is_named_and_the_next_run_works(world2: World) -> None:
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world2.run(raise_and_leave_others_waiting)
    assert time.monotonic() - began < 30
    message = str(caught.value)
    assert "rank 1 of 2 did not answer" in message and "ValueError: rank 0 left early" in message
    assert "raise_and_leave_others_waiting" in message.partition("rank 1 hangs here")[2]
    assert world2.run(rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_hang_fails_in_time_and_the_next_run_works(world2: World) -> None:
    world2.run(process_id)  # the processes stand, so that only the hang is timed
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world2.run(hang_on_rank_1, timeout=1.0)
    assert time.monotonic() - began < 20
    message = str(caught.value)
    assert "rank 1 of 2 did not answer within 1 s" in message
    assert "in hang_on_rank_1" in message and "--- rank 0" not in message
    assert world2.run(rank_and_sum, 10) == [(0, 21), (1, 21)]


def test_a_process_that_ends_is_named_and_the_next_run_works(world2: World) -> None:
    with pytest.raises(WorldError, match=r"(?s)raised on rank 1 of 2.*exit code 3.*last words"):
        world2.run(exit_on_rank_1)
    assert world2.run(rank_and_sum, 10) == [(0, 21), (1, 21)]


def test_expected_errors_are_returned_per_rank(world2: World) -> None:
    errors = world2.run(raise_on, (0, 1), expect_error=True)
    assert errors == [RankError("ValueError", f"bad input on rank {rank}") for rank in range(2)]


def test_an_expected_error_that_is_missing_on_one_rank_fails(world2: World) -> None:
    with pytest.raises(WorldError, match="expected to raise on every rank, but rank 1 returned"):
        world2.run(raise_on, (0,), expect_error=True)


def test_nothing_is_left_for_the_next_call(world2: World) -> None:
    fresh = world2.run(look_at_the_process)
    assert fresh[0][:4] == fresh[1][:4]
    assert fresh[0][4:] == (1, True, "2", 1)
    world2.run(change_the_process)
    assert world2.run(look_at_the_process) == fresh


def test_a_nested_function_is_refused(world2: World) -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        world2.run(lambda: None)


def test_loader_workers_may_be_started(world2: World) -> None:
    assert world2.run(sum_with_loader_workers) == [28, 28]


def test_close_stops_the_processes() -> None:
    world = World(2)
    pids = world.run(process_id)
    world.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
