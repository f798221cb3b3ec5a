"""Ranks as threads of one process: the engines run on one device, what they send is handed over in memory.

Only the transport is replaced (`start_hop`, `start_exchange`, `start_all_gather`, `start_return`); schedules, kernels
and sums are the package's own. Autograd is not involved: its single device thread cannot wait for itself, so the
engines' forward and backward methods are called directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from hf_cp import ContextParallelConfig, SequenceLayout
from hf_cp.attention import allgather, exchange, ring
from hf_cp.attention.block import BlockBackward, BlockForward, Call, Engine
from hf_cp.attention.kernels import Kernel
from hf_cp.sequence.plan import AttentionPlan

WAIT_SECONDS = 60


@dataclass
class Board:
    """Where threads leave messages for each other: message number n of a rank is for number n of the others."""

    size: int
    messages: dict[tuple[int, int], Any] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def post(self, number: int, rank: int, message: Any) -> None:
        with self.changed:
            self.messages[number, rank] = message
            self.changed.notify_all()

    def read(self, number: int, rank: int) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: (number, rank) in self.messages, timeout=WAIT_SECONDS):
                raise TimeoutError(f"rank {rank} did not send its message number {number}")
            return self.messages[number, rank]


@dataclass
class LoopbackMesh:
    """What the engines need of a mesh."""

    ring_rank: int
    ring_size: int


@dataclass
class LoopbackCommunicator:
    """What the engines need of a communicator."""

    mesh: LoopbackMesh
    board: Board
    sent: int = 0  # messages so far

    def next_number(self) -> int:
        self.sent += 1
        return self.sent


@dataclass
class Pending:
    """A message under way; `wait` reads it from the board."""

    wait: Callable[[], torch.Tensor]


def _hop(tensor: torch.Tensor, comm: LoopbackCommunicator, *, received_length: int, tag: int = 0) -> Pending:
    mesh = comm.mesh
    number, previous = comm.next_number(), (mesh.ring_rank - 1) % mesh.ring_size
    comm.board.post(number, mesh.ring_rank, tensor)
    return Pending(lambda: comm.board.read(number, previous).clone())


def _exchange(tensor: torch.Tensor, comm: LoopbackCommunicator, *, sent: list[int], received: list[int]) -> Pending:
    number, mesh = comm.next_number(), comm.mesh
    comm.board.post(number, mesh.ring_rank, tensor.split(sent))
    ranks = range(mesh.ring_size)
    return Pending(lambda: torch.cat([comm.board.read(number, rank)[mesh.ring_rank] for rank in ranks]))


def _all_gather(tensor: torch.Tensor, comm: LoopbackCommunicator) -> Pending:
    number, mesh = comm.next_number(), comm.mesh
    comm.board.post(number, mesh.ring_rank, tensor)
    return Pending(lambda: torch.cat([comm.board.read(number, rank) for rank in range(mesh.ring_size)]))


def _return(blocks: torch.Tensor, comm: LoopbackCommunicator) -> Pending:
    number, own = comm.next_number(), comm.mesh.ring_rank
    comm.board.post(number, own, blocks)
    others = [rank for rank in range(comm.mesh.ring_size) if rank != own]
    return Pending(lambda: torch.stack([comm.board.read(number, rank)[own] for rank in others]))


def _engine(config: ContextParallelConfig) -> Engine:
    by_name = {
        "p2p": ring.Ring,
        "exchange": exchange.Exchange,
        "allgather": partial(allgather.Gather, config.head_chunks),
    }
    return by_name[config.ring_comm]()


def attention(
    row: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    doc_lengths: list[int],
    config: ContextParallelConfig,
    kernel: Kernel,
    *,
    window: int | None = None,
) -> list[torch.Tensor]:
    """Whole-row (out, grad_q, grad_k, grad_v) of q, k, v, grad_out [tokens, heads, head_dim], a thread per rank."""
    layout, size = SequenceLayout(doc_lengths, config), config.ring_degree
    board = Board(size)
    plans = [AttentionPlan(layout, window=window) for _ in range(size)]  # a plan's caches are not for several threads

    def rank(ring_rank: int) -> list[torch.Tensor]:
        q, k, v, grad_out = (layout.shard(x, ring_rank) for x in row)
        scale, device = q.shape[-1] ** -0.5, q.device
        comm = LoopbackCommunicator(LoopbackMesh(ring_rank, size), board)
        engine = _engine(config)
        grad_dtype = q.dtype if config.grad_comm_dtype == "compute" else None
        call = Call(comm, plans[ring_rank], kernel, scale, device, grad_dtype)
        forward = BlockForward(q, kernel, scale)
        engine.forward(forward, k, v, call)
        total, lse = forward.result()
        out = total.to(q.dtype)
        backward = BlockBackward(q, out, lse, grad_out, kernel, scale)
        grad_kv = torch.zeros((len(k), 2, *k.shape[1:]), dtype=total.dtype, device=device)
        engine.backward(backward, k, v, grad_kv, call)
        return [out, backward.grad_q(), grad_kv[:, 0], grad_kv[:, 1]]

    with ExitStack() as patches:
        patches.enter_context(patch.object(ring, "start_hop", _hop))
        patches.enter_context(patch.object(exchange, "start_exchange", _exchange))
        patches.enter_context(patch.object(allgather, "start_return", _return))
        patches.enter_context(patch.object(allgather, "start_all_gather", _all_gather))
        with ThreadPoolExecutor(size) as threads:
            shards = list(threads.map(rank, range(size)))
    return [layout.unshard(list(parts)) for parts in zip(*shards, strict=True)]
