"""A pool of gloo processes on this machine, for tests that need several ranks.

    def add_ranks(offset):                      # an importable, top-level function
        t = torch.tensor(offset + dist.get_rank())
        dist.all_reduce(t)
        return t.item()

    def test_add_ranks(world2):                 # fixtures world1 .. world4 are in tests/conftest.py
        assert world2.run(add_ranks, 10) == [21, 21]

Invariant: a call ends within its time limit, whatever the ranks do, and the next call works. A rank that raises is
named with its traceback; a rank that hangs is named with the place where it hangs. The processes start once, as forks
of one that has imported everything (template.py); every call gets a new process group, fresh seeds and a fresh
environment (worker.py).
"""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.distributed.template import process_context, set_variables
from tests.distributed.worker import Raised, Request, Returned, Started, serve

START_SECONDS = 180.0  # processes start, or a call's module is imported, on a busy machine
GRACE_SECONDS = 5.0  # once a rank has raised, the others get this long to answer
TAIL_LINES = 25


class WorldError(RuntimeError):
    """A rank raised, died or did not answer in time. The message names the ranks and shows where each one was."""


class RankError(NamedTuple):
    """What a rank raised, as `run(..., expect_error=True)` returns it."""

    type_name: str
    message: str


@dataclass(frozen=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    log: Path


class World:
    """`size` processes with ranks 0 to size − 1. They start with the first call and stop with `close()`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix=f"hf_cp_world{size}_"))
        self._store: dist.TCPStore | None = None
        self._workers: list[_Worker] = []
        self._calls = 0
        self._suspect = False
        atexit.register(self.close)

    def run(
        self, fn: Callable, *args: Any, timeout: float = 60.0, expect_error: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Args:
            fn: an importable top-level function; it, its arguments and its result are pickled (tensors by value).
            timeout: seconds for the call itself; starting processes and importing the module of `fn` do not count.
            expect_error: every rank must raise; returns a `RankError` (type name, message) for each.

        Raises:
            WorldError: a rank raised (or did not, with `expect_error`), died, or did not answer in time.
        """
        call = _pickle_call(fn, args, kwargs)
        name = getattr(fn, "__qualname__", repr(fn))
        if self._suspect and not self._still_works():
            self._kill()
        if not self._workers:
            self._start()
        answers = self._exchange(call, name, timeout, timeout if expect_error else GRACE_SECONDS)
        raised = {rank: answer for rank, answer in answers.items() if isinstance(answer, Raised)}
        self._suspect = bool(raised)
        if expect_error:
            return _expected_errors(name, answers)
        if raised:
            raise WorldError(f"{name} raised on {_ranks(raised)} of {self.size}.\n{self._report(raised)}")
        return [pickle.loads(answers[rank].value) for rank in range(self.size)]

    def close(self) -> None:
        """Stop the processes. A later `run` starts new ones."""
        for worker in self._workers:
            try:
                worker.connection.send_bytes(pickle.dumps(None))
            except OSError:
                pass  # it has ended already; _kill collects it
        deadline = time.monotonic() + 5.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        """Start the processes; the store that they meet at lives here, so its port is free for certain."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = process_context()
        for rank in range(self.size):
            here, there = context.Pipe()
            log = self._folder / f"rank{rank}.log"
            variables = dict(os.environ) | self._rank_environment(rank)
            arguments = (rank, self.size, self._store.port, there, str(log), variables)
            # Not a daemon: a daemon may not start the workers of a torch DataLoader. worker.py ends with its parent.
            process = context.Process(target=serve, args=arguments)
            with set_variables(variables):
                process.start()
            there.close()
            self._workers.append(_Worker(process, here, log))
        try:
            failed = self._wait(set(range(self.size)), "start", START_SECONDS, GRACE_SECONDS, until=Started)
            if failed:
                raise WorldError(f"the processes did not start.\n{self._report(failed)}")
        except BaseException:
            self._kill()
            raise

    def _rank_environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "TORCH_EXTENSIONS_DIR": str(self._folder / "torch_extensions"),
        }

    def _exchange(self, call: bytes, name: str, timeout: float, grace: float) -> dict[int, Returned | Raised]:
        """Send one call to every rank and wait for all answers; kill the processes when one is missing."""
        self._calls += 1
        request = pickle.dumps(Request(self._calls, tuple(sys.path), call))
        everyone = set(range(self.size))
        try:
            for worker in self._workers:
                worker.connection.send_bytes(request)
            answers = self._wait(everyone, f"import for {name}", START_SECONDS, grace, until=Started)
            answers |= self._wait(everyone - set(answers), name, timeout, grace, earlier=answers)
        except BaseException:  # KeyboardInterrupt and pytest-timeout too: the ranks are in the middle of a call
            self._kill()
            raise
        return answers

    def _wait(
        self,
        pending: set[int],
        name: str,
        timeout: float,
        grace: float,
        until: type = Returned,
        earlier: dict[int, Raised] | None = None,
    ) -> dict[int, Returned | Raised]:
        """Wait until every pending rank has sent an `until` or has raised. Returns the final answers among them."""
        answers: dict[int, Returned | Raised] = {}
        earlier = earlier or {}
        pending = set(pending)
        began = time.monotonic()
        deadline = began + (min(timeout, grace) if earlier else timeout)
        while pending:
            by_connection = {self._workers[rank].connection: rank for rank in pending}
            ready = wait(list(by_connection), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorldError(self._hang_report(name, time.monotonic() - began, pending, earlier | answers))
            for connection in ready:
                rank = by_connection[connection]
                message = self._receive(rank)
                if not isinstance(message, Started):
                    answers[rank] = message
                if isinstance(message, until | Raised):
                    pending.discard(rank)
                if isinstance(message, Raised):
                    deadline = min(deadline, time.monotonic() + grace)
        return answers

    def _receive(self, rank: int) -> Started | Returned | Raised:
        worker = self._workers[rank]
        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            worker.process.join(5.0)
            what = f"the process ended with exit code {worker.process.exitcode}"
            return Raised("ProcessEnded", what, f"{what}; the end of its output:\n{_tail(worker.log)}\n")

    def _still_works(self) -> bool:
        """After a call that raised: can the ranks still meet?"""
        try:
            answers = self._exchange(_pickle_call(dist.barrier, (), {}), "check", 10.0, GRACE_SECONDS)
        except (WorldError, OSError):
            return False
        return all(isinstance(answer, Returned) for answer in answers.values())

    def _report(self, raised: dict[int, Raised]) -> str:
        """Each distinct traceback once, with the ranks that raised it."""
        by_text: dict[str, list[int]] = {}
        for rank, error in sorted(raised.items()):
            by_text.setdefault(error.traceback, []).append(rank)
        return "\n".join(f"--- {_ranks(ranks)}:\n{text}" for text, ranks in by_text.items())

    def _hang_report(self, name: str, seconds: float, pending: set[int], answers: dict[int, Any]) -> str:
        raised = {rank: answer for rank, answer in answers.items() if isinstance(answer, Raised)}
        lines = [f"{name}: {_ranks(pending)} of {self.size} did not answer within {seconds:.0f} s."]
        if raised:
            lines += [f"Before that it raised on {_ranks(raised)}.", self._report(raised)]
        for rank in sorted(pending):
            lines += [f"--- rank {rank} hangs here (most recent call first):", self._stack(rank)]
        return "\n".join(lines)

    def _stack(self, rank: int) -> str:
        """Where a rank is now, written by its faulthandler."""
        worker = self._workers[rank]
        before = worker.log.stat().st_size if worker.log.exists() else 0
        if worker.process.pid is None or not worker.process.is_alive():
            return "the process has ended"
        if not before and not worker.log.exists():
            return "the process has not started yet"  # no handler so far: the signal would end it
        os.kill(worker.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and worker.log.stat().st_size == before:
            time.sleep(0.05)
        time.sleep(0.1)
        return worker.log.read_bytes()[before:].decode(errors="replace")

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []
        self._store = None
        self._suspect = False


class InProcessWorld:
    """A world of one: the same `run`, but the function is called here, without torch.distributed."""

    size = 1

    def run(
        self, fn: Callable, *args: Any, timeout: float = 60.0, expect_error: bool = False, **kwargs: Any
    ) -> list[Any]:
        """As `World.run`; the time limit is that of the test, and an error passes through unchanged."""
        if not expect_error:
            return [fn(*args, **kwargs)]
        try:
            fn(*args, **kwargs)
        except Exception as error:
            return [RankError(type(error).__name__, str(error))]
        raise WorldError(f"{fn.__qualname__} was expected to raise, but did not.")


def _pickle_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{fn!r} or its arguments cannot be sent to the ranks: {error}.\n"
            "  Use a function at the top level of a module, not a lambda or a nested one, and plain values or tensors."
        ) from error


def _expected_errors(name: str, answers: dict[int, Returned | Raised]) -> list[RankError]:
    silent = [rank for rank, answer in answers.items() if isinstance(answer, Returned)]
    if silent:
        raise WorldError(f"{name} was expected to raise on every rank, but {_ranks(silent)} returned.")
    return [RankError(answers[rank].type_name, answers[rank].message) for rank in sorted(answers)]


def _ranks(ranks: Any) -> str:
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])
