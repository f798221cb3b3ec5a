"""Two hosts on one machine: two network namespaces, joined by a cable (a veth pair).

    with two_hosts() as hosts:
        hosts.limit("200mbit")
        process = hosts.start(0, ["python", "script.py"])

A process on a host sees that host's network only: its own loopback and one interface, `hosts[i].interface`. Needs
Linux, iproute2 and root; `missing()` says what is not there. Invariant: namespaces and processes are gone afterwards,
and what a killed run has left is removed by the next one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "hfcp-"
NETWORK = "10.231.77"  # exists inside the namespaces only


@dataclass(frozen=True)
class Host:
    """One namespace: its name, its end of the cable, and its address there."""

    namespace: str
    interface: str
    address: str


@dataclass
class Hosts:
    """The two hosts, and what was started on them."""

    first: Host
    second: Host
    processes: list[subprocess.Popen] = field(default_factory=list)

    def __getitem__(self, index: int) -> Host:
        return (self.first, self.second)[index]

    def start(
        self, index: int, arguments: Sequence[str], *, environment: dict[str, str], **settings: Any
    ) -> subprocess.Popen:
        """Starts a command on a host; gloo and NCCL are told which interface to use.

        Args:
            index (`int`): 0 or 1.
            arguments (`Sequence[str]`): the command.
            environment (`dict`): of the process.
            settings: more arguments of `subprocess.Popen`.
        """
        host = self[index]
        names = {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
        command = ["ip", "netns", "exec", host.namespace, *arguments]
        process = subprocess.Popen(command, env=environment | names, start_new_session=True, **settings)
        self.processes.append(process)
        return process

    def limit(self, rate: str) -> None:
        """Limits both directions of the cable to `rate`, in the words of tc ("200mbit"); replaces an earlier limit.

        The queue holds two seconds' worth, so that nothing is dropped: the networks of clusters are lossless.
        """
        for host in (self.first, self.second):
            shaper = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "2s"]
            _run("ip", "netns", "exec", host.namespace, "tc", "qdisc", "replace", "dev", host.interface, *shaper)

    def cut(self) -> None:
        """Takes the cable out: nothing arrives any more, and nobody is told."""
        _run("ip", "-n", self.first.namespace, "link", "set", self.first.interface, "down")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Makes the hosts; ends their processes and removes them, whatever happens inside."""
    remove_left_over()
    token = secrets.token_hex(3)
    hosts = Hosts(
        *(
            Host(f"{PREFIX}{os.getpid()}-{token}-{side}", f"hc{token}{side}", f"{NETWORK}.{number}")
            for number, side in enumerate("ab", start=1)
        )
    )
    try:
        for host in (hosts.first, hosts.second):
            _run("ip", "netns", "add", host.namespace)
        first, second = hosts.first, hosts.second
        cable = ["type", "veth", "peer", "name", second.interface, "netns", second.namespace]
        _run("ip", "link", "add", first.interface, "netns", first.namespace, *cable)
        for host in (first, second):
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _run("ip", "-n", host.namespace, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in (hosts.first, hosts.second):
            _remove(host.namespace)
        for process in hosts.processes:
            process.wait(timeout=30)


def missing() -> str | None:
    """Why two hosts cannot be made here; `None` if they can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"{command} is not installed (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"


def remove_left_over() -> None:
    """Removes the namespaces of runs whose process has ended."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not Path(f"/proc/{name.split('-')[1]}").exists():
            _remove(name)


def _remove(namespace: str) -> None:
    """Ends the processes of a namespace and deletes it; its end of the cable goes with it, and so does the other."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
