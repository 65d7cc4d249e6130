"""What scripts/chaos.py breaks: a service on a Ray of its own, of one machine or two, all of it on this one."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from chaos_load import TRIGGERS

START_SECONDS, END_SECONDS = 180.0, 90.0
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray replaces 127.0.0.1 by an address that others can reach
OBJECT_STORE_BYTES = 80 << 20


class Service:
    """`quadriga serve` in a folder of its own. With two nodes the ranks have places on both.

    The first node has those of all ranks but one, and is Ray's head; the other is this program's to kill.
    """

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        """args: model, tp and nodes. Starts nothing; see `start`, and `kill` when that or anything later fails."""
        self.name = f"chaos-{os.getpid()}"
        self._args, self._folder = args, folder
        self._environment = {**os.environ, "TMPDIR": folder, "QUADRIGA_FAULT": _faults(args.tp)}
        self._marks = [f"{folder}/"]  # one of them is in the command lines of its processes
        self._log_path = Path(folder, "serve.log")
        self.process: psutil.Popen | None = None
        self.url = ""

    def start(self) -> None:
        args, folder, address = self._args, self._folder, "local"
        if args.nodes > 1:
            os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
                self._environment[name] = os.environ[name]
            self._start_node(
                "head", HEAD, args.tp - 1, "--head", "--port=0", f"--temp-dir={folder}/ray", "--include-dashboard=false"
            )
            address = self.ray_address()
            self._marks.append(f"--address={address}")
            self.start_other_node()
        command = [sys.executable, "-m", "quadriga", "serve", "--model", args.model, "--tp", str(args.tp)]
        command += ["--executor", "ray", "--ray-address", address, "--name", self.name, "--port", "0"]
        command += ["--max-num-batched-tokens", "256", "--num-kv-blocks", "400"]
        command += ["--max-num-seqs", "16", "--max-queued-requests", "24"]
        with self._log_path.open("w") as log:
            self.process = psutil.Popen(command, stdout=log, stderr=log, env=self._environment)
        self.url = self._wait_ready()

    def start_other_node(self) -> None:
        self._start_node("other", OTHER, 1, f"--address={self.ray_address()}")

    def log(self) -> str:
        return self._log_path.read_text() if self._log_path.exists() else ""

    def ray_address(self) -> str:
        """Of its own Ray; there may be others on this machine."""
        arguments = next(process.cmdline() for process in self.processes("raylet/raylet"))
        return next(one.partition("=")[2] for one in arguments if one.startswith("--gcs-address="))

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Its own, those of its Ray and all that descend from them, by a part of their title."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            if any(mark in _title(process) for mark in self._marks):
                for one in (process, *_descendants(process)):
                    found[one.pid] = one
        if self.process is not None:
            found |= {one.pid: one for one in (self.process, *_descendants(self.process))}
        return [process for process in found.values() if title in _title(process)]

    def of_other_node(self) -> list[psutil.Process]:
        """All processes of the second machine, its raylet first."""
        raylets = [one for one in self.processes("raylet/raylet") if "--node-name=other" in _title(one)]
        monitors = [one for one in self.processes("log_monitor") if f"--node-ip={OTHER}" in _title(one)]
        return [*raylets, *(child for one in raylets for child in _descendants(one)), *monitors]

    def rss_mib(self) -> dict[str, int]:
        """Resident memory of front and driver."""
        roles = {"front": [self.process], "driver": self.processes("DriverActor")}
        return {role: sum(one.memory_info().rss for one in found) >> 20 for role, found in roles.items()}

    def end(self) -> list[str]:
        """Ends the service, then its Ray. Returns what the service has left behind."""
        ranks = self.processes("ray::")
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(END_SECONDS)
        _, alive = psutil.wait_procs([one for one in ranks if "Actor" in _title(one)], timeout=15)
        leaks = [f"process {process.pid} lives: {_title(process)}" for process in alive]
        _, alive = psutil.wait_procs(self._end_ray(), timeout=15)
        return leaks + [f"process {process.pid} lives: {_title(process)}" for process in alive]

    def copy_logs(self, to: Path) -> None:
        """Its own and, of its Ray, those of actors."""
        to.mkdir(parents=True, exist_ok=True)
        for path in [self._log_path, *Path(self._folder).rglob("worker-*")]:
            if path.is_file() and path.stat().st_size:
                shutil.copy(path, to / path.name)

    def kill(self) -> None:
        """Ends all of it at once, however far it has come."""
        for process in self.processes():
            send(process, signal.SIGKILL)

    # ---- pieces

    def _start_node(self, name: str, ip: str, num_cpus: int, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-name={name}", *options]
        command += [f"--node-ip-address={ip}", f"--num-cpus={num_cpus}", "--disable-usage-stats"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=START_SECONDS)
        if done.returncode:
            raise SystemExit(f"a Ray node did not start:\n{done.stdout}{done.stderr}")

    def _wait_ready(self) -> str:
        for _ in until(START_SECONDS):
            for line in self.log().splitlines():
                if " is ready at " in line:
                    return line.rsplit(" ", 1)[1]
            if self.process.poll() is not None:
                break
        raise SystemExit(f"the service did not start:\n{self.log()}")

    def _end_ray(self) -> list[psutil.Process]:
        """Tells a Ray that this program has started to end. Returns its processes, or what is left of serve's own."""
        left = self.processes()
        if self._args.nodes > 1:
            for title in ("raylet/raylet", "client.server", "log_monitor", "gcs_server"):
                for process in self.processes(title):
                    send(process, signal.SIGTERM)
                time.sleep(1)
            psutil.wait_procs(left, timeout=10)
            self.kill()
        return left


def _faults(size: int) -> str:
    """Every rank but the first takes its part in the harm that requests do."""
    kinds = {"nan": "nan", "raise": "raise", "memory": "memory", "death": "kill"}
    return ",".join(f"{at % size}:token={TRIGGERS[name]}:{kind}" for at, (name, kind) in enumerate(kinds.items()))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has just ended, or is not ours to look at


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, which is no worse
        process.send_signal(number)


def until(seconds: float) -> Iterator[None]:
    """Ticks of a fifth of a second."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.2)
