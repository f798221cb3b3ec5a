"""Two hosts with two processes each, started by `accelerate launch` on both: a row is shared by all four.

The ring runs between the hosts and Ulysses inside of them. Updates are those of one process; when a process dies, the
other host says so and ends.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.examples.launch import ROOT, environment
from tests.multihost.cut import LIMIT
from tests.multihost.hosts import PREFIX, Hosts, missing, two_hosts
from tests.training.test_zero import check_run, trained
from tests.training.tiny import REF, make_documents, make_model, train, worst_difference
from tests.training.zero_cases import LENGTHS

pytestmark = [pytest.mark.distributed, pytest.mark.multihost]

PORT = "29500"  # free for certain: the hosts have just been made


@dataclass(frozen=True)
class Run:
    """What the four processes wrote, what each host printed, and the seconds between the end of one and the other."""

    results: list[dict]
    outputs: list[str]
    statuses: list[int]
    ended_apart: float


def launch(hosts: Hosts, index: int, *arguments: str, output: Path) -> subprocess.Popen:
    """`accelerate launch` as a user types it on each host."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "2"]
    command += ["--deepspeed_multinode_launcher", "standard", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_machines", "2", "--machine_rank", str(index), "--num_processes", "4"]
    command += ["--main_process_ip", hosts[0].address, "--main_process_port", PORT]
    return hosts.start(
        index,
        [*command, *arguments],
        environment=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output.open("w"),
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, deepspeed_extension) -> Run:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    logs = [folder / "host0.log", folder / "host1.log"]
    with two_hosts() as hosts:
        processes = [launch(hosts, i, "-m", "tests.multihost.cases", str(folder), output=logs[i]) for i in (0, 1)]
        try:
            processes[1].wait(timeout=300)
            began = time.monotonic()
            processes[0].wait(timeout=100)
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(log.read_text()[-4000:] for log in logs)) from None
    files = [folder / f"rank{rank}.pt" for rank in range(4)]
    outputs = [log.read_text() for log in logs]
    assert all(file.exists() for file in files), "\n".join(output[-4000:] for output in outputs)
    results = [torch.load(file, weights_only=False) for file in files]
    return Run(results, outputs, [process.returncode for process in processes], time.monotonic() - began)


def test_the_hosts_are_two(run):
    first, second, third, fourth = (result["host"] for result in run.results)
    assert first == second != third == fourth


def test_ddp_equals_one_process(run):
    reference = train(REF, make_documents(LENGTHS), gradient_accumulation_steps=2)
    start = dict(make_model().named_parameters())
    for result in run.results:
        difference = worst_difference(result["ddp"], reference, start)
        assert max(vars(difference).values()) < 1e-10, difference


def test_zero_equals_one_process(run):
    for result in run.results:
        check_run(result["zero"], trained(), trained(dtype=torch.float32))
        assert result["zero"].engine == "DeepSpeedEngine"


def test_a_killed_process_ends_the_other_host(run):
    """Rank 3 dies and takes rank 2 with it; their ring peers on the first host are ranks 1 and 0, one is the first."""
    text = " ".join(re.sub(r"\[rank\d\]:", "", run.outputs[0]).split())
    message = r"rank ([01]) of 4 \(dp 0, ring 0, ulysses \1\) lost its peers on the ring axis, ranks \[([23])\]"
    lost = re.search(message, text)
    assert lost is not None and int(lost[2]) == int(lost[1]) + 2, run.outputs[0][-4000:]
    assert "micro-step 1, attention of layer 1, backward pass" in text
    assert re.search(r"hf_cp: rank [01] of 4 \([^)]*\), optimizer step 1", text)
    assert "Signal 9 (SIGKILL)" in run.outputs[1]
    assert all(status != 0 for status in run.statuses)
    assert run.ended_apart < 60


@pytest.fixture
def _can_make_hosts() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def wait_for(files: list[Path], processes: list[subprocess.Popen], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline and all(process.poll() in (None, 0) for process in processes)
        time.sleep(0.05)


@pytest.mark.usefixtures("_can_make_hosts")
def test_a_host_that_is_cut_off(tmp_path):
    """Nobody is told: both sides wait for the time limit, then name each other."""
    with two_hosts() as hosts:
        meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "WORLD_SIZE": "2"}
        processes = [
            hosts.start(
                rank,
                [sys.executable, "-m", "tests.multihost.cut", str(tmp_path)],
                environment=environment() | meeting | {"RANK": str(rank)},
                cwd=ROOT,
            )
            for rank in (0, 1)
        ]
        wait_for([tmp_path / f"ready{rank}" for rank in (0, 1)], processes)
        hosts.cut()
        (tmp_path / "cut").touch()
        for process in processes:
            assert process.wait(timeout=60) == 0
    for rank in (0, 1):
        seconds, message = (tmp_path / f"lost{rank}").read_text().split("\n", 1)
        assert LIMIT - 1 < float(seconds) < LIMIT + 15
        assert f"rank {rank} of 2" in message and f"ranks [{1 - rank}]" in message and "time limit 5 s" in message


@pytest.mark.usefixtures("_can_make_hosts")
def test_nothing_is_left_of_the_hosts():
    with pytest.raises(KeyError), two_hosts() as hosts:
        sleeper = hosts.start(0, ["sleep", "1000"], environment=environment())
        hosts.limit("200mbit")
        hosts.limit("100mbit")
        for host in (hosts[0], hosts[1]):
            shown = ["tc", "-n", host.namespace, "qdisc", "show", "dev", host.interface]
            assert " rate 100Mbit " in subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        hosts.cut()
        raise KeyError
    assert sleeper.returncode == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if line.startswith(hosts[0].namespace.rsplit("-", 1)[0])]
    assert hosts[0].namespace.startswith(PREFIX)
