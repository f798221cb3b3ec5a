"""One process of a test world: waits for calls, runs each in a fresh gloo group, sends back what happened.

Invariant: nothing of one call is seen by the next. Before every call the process group, the environment variables,
the random seeds, the default dtype and accelerate's shared state are those of a process that has just started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Request:
    """A call: its number (names the process group), the caller's `sys.path`, and the pickled (fn, args, kwargs)."""

    number: int
    sys_path: tuple[str, ...]
    call: bytes


@dataclass(frozen=True)
class Started:
    """The function is imported and the process group stands: the time of the case starts here."""


@dataclass(frozen=True)
class Returned:
    """The function returned; `value` is pickled, so tensors travel by value."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """The function, or the import of its module, raised."""

    type_name: str
    message: str
    traceback: str


def serve(
    rank: int, size: int, store_port: int, connection: Connection, log_path: str, environment: dict[str, str]
) -> None:
    """Answer requests until None or the end of the pipe. `environment`: this process is a fork, with another's."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it then closes the world
    log = open(log_path, "a", buffering=1)  # noqa: SIM115 (open as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=GROUP_TIMEOUT)
    connection.send_bytes(pickle.dumps(Started()))
    while (request := _receive(connection)) is not None:
        connection.send_bytes(pickle.dumps(_answer(request, rank, size, store, environment, connection)))
        sys.stdout.flush()
        sys.stderr.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


def _receive(connection: Connection) -> Request | None:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return None


def _answer(
    request: Request, rank: int, size: int, store: dist.Store, environment: dict[str, str], connection: Connection
) -> Returned | Raised:
    try:
        _restore_process(request, environment)
        fn, args, kwargs = pickle.loads(request.call)
        _fresh_group(request.number, rank, size, store)
        connection.send_bytes(pickle.dumps(Started()))
        return Returned(pickle.dumps(fn(*args, **kwargs)))
    except (Exception, SystemExit) as error:
        frames = error.__traceback__.tb_next or error.__traceback__  # the first frame is this function
        text = "".join(traceback.format_exception(type(error), error, frames))
        return Raised(type(error).__name__, str(error), text)


def _restore_process(request: Request, environment: dict[str, str]) -> None:
    """Undo what an earlier call may have changed in this process."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = request.sys_path
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def _fresh_group(number: int, rank: int, size: int, store: dist.Store) -> None:
    """Replace the default process group, and with it every group that an earlier call made."""
    if dist.is_initialized():
        dist.destroy_process_group()
    call_store = dist.PrefixStore(f"call{number}", store)
    dist.init_process_group("gloo", store=call_store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:  # the parent ended before the line above
            os._exit(1)
