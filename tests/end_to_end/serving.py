"""`quadriga serve` as a process of its own, and what a Ray cluster holds of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import ray

from driver.service_actor import NAMESPACE


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Serve:
    """A running command, its standard error read as it comes."""

    def __init__(self, *options: str, address: str | None = None, **environment: str) -> None:
        where = ["--ray-address", address] if address else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quadriga", "serve", "--device", "cpu", "--port", "0", *where, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match:
        """The first line of standard error that matches, past or to come."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: (
                    next((m for line in self.lines if (m := re.search(pattern, line))), None)
                    or not self._reader.is_alive()
                ),
                seconds,
            )
        assert isinstance(found, re.Match), f"no {pattern!r} in:\n{self.text}"
        return found

    def wait_ready(self) -> str:
        """Its URL."""
        return self.wait_for(r"is ready at (\S+)")[1]

    def end(self, number: int = signal.SIGTERM, seconds: float = 40.0) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 40.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()


def driver_actor(name: str) -> ray.actor.ActorHandle:
    return ray.get_actor(name, namespace=NAMESPACE)


def status_of(name: str) -> dict:
    return ray.get(driver_actor(name).status.remote(), timeout=20)


def processes_of_ray(*titles: str) -> list[int]:
    """Processes of actors in the Ray that this process has started; others may run on the machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if any(f"ray::{title}" in command for title in titles):
            found.append(process.pid)
    return sorted(found)


def left_in_ray(name: str) -> list[str]:
    """What there is of a service: names, processes and placement groups that are not removed."""
    left = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["name"] == name]
    left += [f"process {pid}" for pid in processes_of_ray("DriverActor", "WorkerActor")]
    groups = ray.util.placement_group_table().values()
    return left + [group["name"] for group in groups if group["state"] != "REMOVED"]
