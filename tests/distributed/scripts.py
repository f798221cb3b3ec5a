"""Scripts in forked processes: what `torchrun --nproc_per_node n SCRIPT` does, without an interpreter for each.

Invariant: a run ends within its time limit. A process that fails ends the others, as torchrun does; after the time
limit each process that is left writes where it hangs.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from tests.distributed.template import ROOT, process_context, set_variables
from tests.distributed.worker import die_with_parent


def run_script(
    words: Sequence[str], *, processes: int, variables: Mapping[str, str], timeout: float
) -> tuple[int, str]:
    """Exit status and output of `words` (a script, or `-m` and a module, and its arguments) on `processes` ranks.

    With one process there is no world: none of torchrun's variables is set.
    """
    context = process_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if processes > 1 else None
    with tempfile.TemporaryDirectory(prefix="hf_cp_script_") as folder:
        log, started = Path(folder) / "output", []
        for rank in range(processes):
            own = dict(variables) | (rank_variables(rank, processes, store.port) if store else {})
            with set_variables(own):
                process = context.Process(target=run_in_fork, args=(list(words), own, str(log)))
                process.start()
            started.append(process)
        status = wait_for_all(started, time.monotonic() + timeout, log)
        output = log.read_text(errors="replace") if log.exists() else ""
    if status is None:
        raise AssertionError(f"{list(words)} did not end within {timeout:.0f} s:\n{output[-6000:]}")
    return status, output


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets; the store is here, so its port is free for certain."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {name: str(value) for name, value in names.items()} | agent


def wait_for_all(started: list[BaseProcess], deadline: float, log: Path) -> int | None:
    """The first exit status that is not 0, or 0; `None` after the deadline. Nothing runs on afterwards."""
    pending, status = list(started), 0
    try:
        while pending and status == 0:
            if not wait([process.sentinel for process in pending], max(0.0, deadline - time.monotonic())):
                ask_where_they_are(pending, started, log)
                return None
            for process in [process for process in pending if not process.is_alive()]:
                pending.remove(process)
                status = status or process.exitcode
        if pending:
            wait([process.sentinel for process in pending], 2.0)  # their last words
        return status
    finally:
        for process in started:
            end_group(process)


def ask_where_they_are(pending: list[BaseProcess], started: list[BaseProcess], log: Path) -> None:
    """Each one writes its stack, under its rank."""
    for process in pending:
        with log.open("a") as file:
            file.write(f"\nrank {started.index(process)} of {len(started)} hangs here (most recent call first):\n")
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)


def end_group(process: BaseProcess) -> None:
    """With what it has started, which is in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended, or has no session yet
    process.kill()
    process.join()
    process.close()


def run_in_fork(words: list[str], variables: dict[str, str], log_path: str) -> None:
    """This process becomes what `python words` would be."""
    os.setsid()
    die_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(variables)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    os.chdir(ROOT)
    status = exit_status(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # DeepSpeed's processes do not always end by themselves


def exit_status(words: list[str]) -> int:
    is_module = words[0] == "-m"
    sys.argv[:] = words[1:] if is_module else words
    sys.path.insert(0, str(ROOT if is_module else Path(words[0]).parent))
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        print(f"rank {os.environ.get('RANK', '0')} raised:", traceback.format_exc(), sep="\n", file=sys.stderr)
        return 1
    return 0
