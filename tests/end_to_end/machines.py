"""Machines that are network namespaces of this one: each has an address, a Ray node and a /dev/shm of its own, and a
cable that can be pulled. Nothing outside them can be reached, or reaches them. Needs the right to make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.end_to_end.clusters import SECONDS, ray_environment, short_folder

NETWORK = "10.77.0"
HOLDER = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo ready && exec cat"
# A node that falls silent is given up after 5 s.
HEALTH = {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 2}


def why_not() -> str:
    """Why there can be no machines here; empty when there can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    trial = subprocess.run(["unshare", "-mn", "bash", "-c", HOLDER], stdin=subprocess.DEVNULL, capture_output=True)
    return "" if trial.returncode == 0 else "needs the right to make network namespaces"


@dataclass(frozen=True)
class Machine:
    """holder: the process that its namespaces live with."""

    index: int
    holder: subprocess.Popen
    environment: dict[str, str]

    @property
    def ip(self) -> str:
        return f"{NETWORK}.{self.index + 1}"

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-m", "-n", *words]

    def run(self, *words: str) -> None:
        done = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def pull_cable(self, hub: Machine) -> None:
        hub.run("ip", "link", "set", f"to{self.index}", "down")


def _holder() -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen(["unshare", "-mn", "bash", "-c", HOLDER], text=True, **pipes)
    assert holder.stdout.readline() == "ready\n"
    return holder


def _wire(machines: Sequence[Machine]) -> None:
    """Connects the first one, as a hub, with the others."""
    hub = machines[0]
    hub.run("ip", "link", "add", "hub", "type", "bridge")
    hub.run("ip", "addr", "add", f"{hub.ip}/24", "dev", "hub")
    hub.run("ip", "link", "set", "hub", "up")
    for machine in machines[1:]:
        cable = ["ip", "link", "add", f"to{machine.index}", "type", "veth"]
        hub.run(*cable, "peer", "name", "eth0", "netns", str(machine.holder.pid))
        hub.run("ip", "link", "set", f"to{machine.index}", "master", "hub", "up")
        machine.run("ip", "addr", "add", f"{machine.ip}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")


@contextmanager
def ray_machines(count: int) -> Iterator[list[Machine]]:
    """So many machines with one CPU each in one Ray cluster, whose head is the first."""
    environment = ray_environment(**{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()})
    del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # no loopback addresses here
    with short_folder() as folder:
        environment |= {"RAY_ADDRESS": f"{NETWORK}.1:6379", "TMPDIR": str(folder)}
        machines = [Machine(index, _holder(), environment) for index in range(count)]
        try:
            _wire(machines)
            for machine in machines:
                _start_ray(machine, folder)
            yield machines
        finally:
            for machine in machines:
                _end(machine)


def _start_ray(machine: Machine, folder: Path) -> None:
    ray = str(Path(sys.executable).parent / "ray")
    where = ["--head", "--include-dashboard", "false"] if machine.index == 0 else ["--address", f"{NETWORK}.1:6379"]
    own = ["--node-ip-address", machine.ip, "--temp-dir", str(folder / str(machine.index)), "--num-cpus", "1"]
    machine.run(ray, "start", *where, *own, "--object-store-memory", str(80 << 20), "--disable-usage-stats")


def _end(machine: Machine) -> None:
    """Ends everything in it, and so itself."""
    own = os.readlink(f"/proc/{machine.holder.pid}/ns/net")
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/ns/net") == own:
                process.kill()
        except (OSError, psutil.NoSuchProcess):
            continue  # it has just ended
    machine.holder.stdin.close()
    machine.holder.stdout.close()
    machine.holder.wait(timeout=SECONDS)
