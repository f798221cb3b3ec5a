"""Runs a function in new processes, as a launcher would start them, and nothing else in between.

Every measurement starts from the same state: no warm allocator, no left-over process group. What a process has ever
held at once (`peak_bytes`) is then its own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import measure  # noqa: F401  (one thread a process; must come before torch)
import torch

LIMIT_SECONDS = 3600.0
CONTEXT = mp.get_context("spawn")


def run_fresh(function: Callable[..., Any], *args: Any, world_size: int = 1) -> list[Any]:
    """`function(*args)` on every one of `world_size` new processes with a launcher's environment; results by rank.

    Raises:
        SystemExit: a process failed (its traceback is above), or they took longer than `LIMIT_SECONDS`.
    """
    port, pipes, processes = _free_port(), [], []
    for rank in range(world_size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_process, args=(sender, rank, world_size, port, function, args))
        process.start()
        sender.close()  # so that the end of the process is the end of the pipe
        pipes.append(receiver)
        processes.append(process)
    try:
        return _results(pipes)
    finally:
        for process in processes:
            process.join(timeout=10)  # what it had to say is here
            process.kill()
            process.join()


@contextmanager
def busy_core(make: Callable[..., Callable[[], None]], *args: Any) -> Iterator[None]:
    """Keeps another core busy meanwhile: a process calls what `make(*args)` gives it again and again.

    Begins when the first call has come back, so that nothing is built during anyone's measurement.
    """
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_again_and_again, args=(sender, make, args))
    process.start()
    sender.close()
    try:
        _results([receiver])
        yield
        if not process.is_alive():
            raise SystemExit("The process that loads the other core has ended; its error is above.")
    finally:
        process.kill()
        process.join()


def peak_bytes() -> int:
    """Most memory that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _results(pipes: list[Connection]) -> list[Any]:
    """One message of every pipe, in whatever order they come."""
    results: dict[Connection, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in results], timeout=LIMIT_SECONDS)
        if not ready:
            raise SystemExit(f"The processes took more than {LIMIT_SECONDS:.0f} s.")
        for pipe in ready:
            try:
                results[pipe] = pipe.recv()
            except EOFError:
                raise SystemExit("A process failed; its error is above.") from None
    return [results[pipe] for pipe in pipes]


def _process(sender: Connection, rank: int, world_size: int, port: int, function: Callable, args: tuple) -> None:
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    result = function(*args)
    sender.send(result)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _again_and_again(sender: Connection, make: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    run = make(*args)
    run()
    sender.send(None)
    while mp.parent_process().is_alive():  # a killed benchmark leaves nothing behind
        run()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
