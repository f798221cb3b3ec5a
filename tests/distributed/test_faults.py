"""A lost or silent peer is reported with ranks, step and place, within the time limit."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed import collectives
from hf_cp.distributed.communicator import CommunicationError, Communicator
from hf_cp.distributed.host import agree, gather_objects, gather_over_cp, sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from tests.training.fsdp2 import fsdp2_arguments
from tests.training.tiny import make_documents, make_model, make_trainer

LIMIT = 5.0  # seconds; a busy machine needs some to make the groups


@dataclass(frozen=True)
class Lost:
    """What a rank saw of a failure."""

    message: str
    cause: str
    notes: str
    seconds: float


def caught(function, *args) -> Lost | None:
    began = time.monotonic()
    try:
        function(*args)
    except CommunicationError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        return Lost(str(error), type(error.__cause__).__name__, notes, time.monotonic() - began)
    return None


def wait_for_all(key: str) -> None:
    """Keeps a process alive until the others have seen what they had to see."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}{dist.get_rank()}", "here")
    store.wait([f"{key}{rank}" for rank in range(dist.get_world_size())])


def operations(comm: Communicator) -> dict[int, dict[str, callable]]:
    """The collectives of the package, by the rank that tries them while nobody else does."""
    rows, blocks = torch.zeros(2, 3), collectives.BlockTransfer(comm)
    return {
        0: {
            "the sum over the ranks of a sample": lambda: collectives.sum_over_cp(rows, comm),
            "the comparison of the ranks' batches": lambda: gather_over_cp([1], comm=comm),
        },
        3: {
            "a sum of counts or losses": lambda: sum_over_world([1], comm=comm),
            "agreeing on the sample for micro-step 4": lambda: agree("sample", comm=comm, step=4),
            "the gather of what": lambda: gather_objects(None, comm=comm),
        },
        1: {
            "a hop of the ring": lambda: collectives.start_hop(rows, comm, received_length=2).wait(),
            "the exchange of K/V tokens": lambda: collectives.start_exchange(
                rows, comm, sent=[1, 1], received=[1, 1]
            ).wait(),
            "the all-gather of K/V": lambda: collectives.start_all_gather(rows, comm).wait(),
            "the return of dK/dV": lambda: collectives.start_return(rows, comm).wait(),
        },
        2: {
            "the all-to-all of tokens and heads": lambda: (blocks.start(rows), blocks.finish()),
        },
    }


def try_operations() -> dict[str, Lost | None]:
    mesh = ContextParallelMesh(ContextParallelConfig(2, 2, timeout_seconds=LIMIT))
    found = {what: caught(call) for what, call in operations(Communicator(mesh))[mesh.rank].items()}
    wait_for_all("tried")
    return found


@pytest.mark.distributed
def test_every_operation_names_ranks_and_time_limit(world4):
    """Rank 1 waits for its ring peer 3, rank 2 for its Ulysses peer 3, rank 0 for its group and rank 3 for all."""
    peers = ["ranks [1, 2, 3]", "ranks [3]", "ranks [3]", "ranks [0, 1, 2]"]
    counts = []
    for rank, found in enumerate(world4.run(try_operations)):
        counts.append(len(found))
        for what, lost in found.items():
            assert lost is not None, what
            assert f"rank {rank} of 4 (dp 0, ring {rank // 2}, ulysses {rank % 2}) lost its peers" in lost.message
            assert what in lost.message and peers[rank] in lost.message and "time limit 5 s" in lost.message
            assert lost.cause in ("RuntimeError", "DistBackendError") and lost.seconds < 20
    assert counts == [2, 4, 1, 3]


class _Fault:
    """A hook of a layer that strikes when it is called for the second micro-step."""

    def __init__(self, strike: callable) -> None:
        self.strike, self.calls = strike, 0

    def __call__(self, *args) -> None:
        self.calls += 1
        if self.calls == 2:
            self.strike()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    raise ValueError("rank 1 leaves")


def train_with_fault(config: ContextParallelConfig, kind: str) -> Lost | None:
    """Rank 1 fails in the second micro-step at layer 1: it dies in the forward pass, or raises in the backward one."""
    model = make_model()
    trainer = make_trainer(model, config, make_documents([32] * 4), gradient_accumulation_steps=2)
    if trainer.cp_mesh.rank == 1:
        attention: nn.Module = model.model.layers[1].self_attn
        if kind == "dies":
            attention.register_forward_pre_hook(_Fault(die))
        else:
            attention.register_full_backward_pre_hook(_Fault(leave))
    try:
        lost = caught(trainer.train)
    except ValueError as error:
        assert "rank 1 leaves" in str(error) and "optimizer step 1; micro-step 1" in error.__notes__[0]
        lost = None
    if kind != "dies":
        wait_for_all("trained")
    return lost


@pytest.mark.distributed
def test_a_rank_that_raises_in_the_backward_pass(world2):
    """The other one waits for no longer than the time limit."""
    config = ContextParallelConfig(ulysses_degree=2, timeout_seconds=LIMIT)
    lost, _ = world2.run(train_with_fault, config, "raises")
    assert "rank 0 of 2 (dp 0, ring 0, ulysses 0) lost its peers on the ulysses axis, ranks [1]" in lost.message
    assert "micro-step 1, attention of layer 1, backward pass" in lost.message
    assert "optimizer step 1" in lost.notes and lost.seconds < 30


class _LeavesBeforeTheUpdate(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            leave()


def train_to_a_failing_update() -> Lost | str:
    """FSDP 2; rank 1 raises between the second backward pass and the update, and says what its error is told."""
    config = ContextParallelConfig(2, timeout_seconds=LIMIT)
    trainer = make_trainer(make_model(), config, make_documents([32] * 4), arguments_from=fsdp2_arguments)
    if trainer.cp_mesh.rank == 1:
        trainer.add_callback(_LeavesBeforeTheUpdate())
    try:
        return caught(trainer.train)
    except ValueError as error:
        return "\n".join(error.__notes__)


@pytest.mark.distributed
def test_a_rank_that_raises_before_the_update(world2):
    """Outside of the Trainer's training_step, both ranks say where they were."""
    lost, note = world2.run(train_to_a_failing_update)
    assert note.startswith("hf_cp: rank 1 of 2 (dp 0, ring 1, ulysses 0), optimizer step 2; ")
    assert "rank 0 of 2 (dp 0, ring 0, ulysses 0) lost its peers on the world, ranks [1]" in lost.message
    assert "(time limit 5 s)" in lost.message and lost.seconds < 30
    assert lost.notes.startswith("hf_cp: rank 0 of 2 (dp 0, ring 0, ulysses 0), after optimizer step 2; ")


def die_and_tell() -> None:
    """The error reaches the test as that of the call: its rank 1 cannot return."""
    lost = train_with_fault(ContextParallelConfig(2), "dies")
    raise RuntimeError(f"{lost.message}\n{lost.notes}")


@pytest.mark.distributed
def test_a_rank_that_is_killed(world2):
    survivor, killed = world2.run(die_and_tell, expect_error=True)
    assert killed.message == "the process ended with exit code -9"
    assert "rank 0 of 2 (dp 0, ring 0, ulysses 0) lost its peers on the ring axis, ranks [1]" in survivor.message
    assert "micro-step 1, attention of layer 1, forward pass" in survivor.message
    assert "hf_cp: rank 0 of 2" in survivor.message and "optimizer step 1" in survivor.message


def test_other_errors_pass(world1):
    """Lack of memory and errors that are not the library's keep their type; ours is not wrapped twice."""
    mesh = ContextParallelMesh(ContextParallelConfig())
    for error in (torch.OutOfMemoryError("full"), ValueError("shape"), CommunicationError("said already")):
        with pytest.raises(type(error)) as caught_error, Communicator(mesh).calling("world", "a test"):
            raise error
        assert caught_error.value is error


def peers_of(axes: tuple[str, ...]) -> list[list[int]]:
    mesh = ContextParallelMesh(ContextParallelConfig(2))
    return [mesh.peers(axis) for axis in axes]


@pytest.mark.distributed
def test_peers(world4):
    """dp 2 x ring 2."""
    axes = ("dp", "ring", "ulysses", "cp", "world")
    found = world4.run(peers_of, axes)
    assert found[0] == [[0, 2], [0, 1], [0], [0, 1], [0, 1, 2, 3]]
    assert found[3] == [[1, 3], [2, 3], [3], [2, 3], [0, 1, 2, 3]]
