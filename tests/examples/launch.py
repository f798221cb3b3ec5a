"""Starts an example as a user does: a launcher, several processes, an own port and a time limit."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

from tests.distributed.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_")


@dataclass(frozen=True)
class Finished:
    """Exit status and everything that was printed."""

    status: int
    output: str


def forked(*words: str, processes: int = 1, timeout: float = 300.0) -> Finished:
    """`torchrun --nproc_per_node processes words`, or `python words` for one: where the launch is not what is tested.

    A script is one of the examples. The processes are forks (tests/distributed/scripts.py).
    """
    return Finished(*run_script(in_examples(words), processes=processes, variables=environment(), timeout=timeout))


def accelerate_forked(options: Sequence[str], *words: str, processes: int, timeout: float = 300.0) -> Finished:
    """`accelerate launch options words` on this machine, with the variables that it would set; forks, as above."""
    variables = environment() | accelerate_variables([*options, "--main_process_port", str(free_port())])
    return Finished(*run_script(in_examples(words), processes=processes, variables=variables, timeout=timeout))


def in_examples(words: Sequence[str]) -> list[str]:
    return list(words) if words[0] == "-m" else [str(EXAMPLES / words[0]), *words[1:]]


def accelerate_variables(options: Sequence[str]) -> dict[str, str]:
    """What `accelerate launch options` sets for its processes, by its own functions."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args = launch.launch_command_parser().parse_args([*options, "none"])
    variables: dict[str, str] = {}
    with (
        patch.object(launch, "deepspeed_launcher", lambda a: variables.update(prepare_deepspeed_cmd_env(a)[1])),
        patch.object(launch, "multi_gpu_launcher", lambda a: variables.update(prepare_multi_gpu_env(a))),
    ):
        launch.launch_command(args)
    return {key: value for key, value in variables.items() if key.startswith(LAUNCHER_PREFIXES)}


def accelerate_launch(config_file: Path, *words: str, timeout: float = 300.0) -> Finished:
    """`accelerate launch --config_file config_file words`."""
    launcher = ["--config_file", str(config_file), "--main_process_port", str(free_port())]
    return run(["-m", "accelerate.commands.launch", *launcher, *words], timeout=timeout)


def together(*runs: Callable[[], Finished]) -> list[Finished]:
    """Several launches at the same time: one process alone leaves a core free."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(each) for each in runs]]


def run(arguments: list[str], *, timeout: float) -> Finished:
    """`python arguments` in the root of the clone; all its processes end with the time limit."""
    return run_command([sys.executable, *arguments], timeout=timeout)


def run_command(command: list[str], *, timeout: float, variables: Mapping[str, str] | None = None) -> Finished:
    """Any command, with more environment variables; see [`run`]."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} did not end within {timeout:.0f} s:\n{output[-4000:]}") from None
    return Finished(process.returncode, output)


def environment() -> dict[str, str]:
    """The user's environment without what an outer launcher or pool has set."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in outer and not k.startswith(("ACCELERATE_", "HF_CP_"))}
    return kept | {
        # this environment's ninja: another one would not read the build's log, and compile the extension again
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(extensions_folder()),
    }


def extensions_folder() -> Path:
    """Where DeepSpeed's compiled extension stays between runs."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / ".cache" / "torch_extensions"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def start_deepspeed_build() -> Future[Finished]:
    """Begins to compile what DeepSpeed compiles in its first launch on CPU, unless it is there; beside other tests."""
    return ThreadPoolExecutor(1).submit(build_once)


def build_once() -> Finished:
    """By one of the pytest processes; the others wait for it."""
    with (extensions_folder() / "building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for lock in extensions_folder().glob("*/lock"):  # a killed run leaves them for ever
            lock.unlink(missing_ok=True)
        if list(extensions_folder().glob("deepspeed_shm_comm/*.so")):
            return Finished(0, "")
        builder = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
        return run(["-c", builder], timeout=500)


def build_deepspeed_extension() -> None:
    """Waits until DeepSpeed's extension is there: one to two minutes, once."""
    finished = start_deepspeed_build().result()
    assert finished.status == 0, finished.output[-4000:]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
