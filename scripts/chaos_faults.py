"""The ways in which scripts/chaos.py breaks a service."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
from chaos_load import STREAMS, TRIGGERS, Load
from chaos_service import Service, send, until
from chaos_tally import Tally

from quadriga import Client

CALM_SECONDS = 120.0
LONG_SECONDS = 30.0
HELPERS = ("log_monitor", "dashboard/agent.py", "runtime_env/agent/main.py")
DOOMED_CLIENT = """
import sys, time
from quadriga import Client, SamplingParams
client = Client.connect(sys.argv[1], sys.argv[2])
streams = [client.stream([5] * n, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)) for n in (9, 400)]
for piece in streams[0]:
    print("token", flush=True)
"""


class Chaos:
    """Commits faults. kinds: which, by name; see KINDS."""

    def __init__(
        self, service: Service, client: Client, load: Load, tally: Tally, rng: random.Random, kinds: list[str]
    ) -> None:
        self._service, self._client, self._load, self._tally, self._rng = service, client, load, tally, rng
        self._kinds = self._draw(kinds)

    def commit_one(self) -> str:
        """Breaks something. Returns what kind of fault it was."""
        kind = next(self._kinds)
        self._tally.faults.append((time.monotonic(), kind))
        KINDS[kind](self)
        return kind

    def wait_for_calm(self) -> None:
        """Until a token that came after everything was back."""
        for _ in until(CALM_SECONDS):
            try:
                if not self._client.health(2)["recovering"]:
                    break
            except Exception:  # noqa: BLE001 it is not back yet
                continue
        count = len(self._tally.arrivals)
        for _ in until(CALM_SECONDS):
            if len(self._tally.arrivals) > count + 3 * STREAMS:
                return
        self._tally.differences.append(f"no token came for {CALM_SECONDS:g} s")

    def _draw(self, kinds: list[str]) -> Iterator[str]:
        """Each once in random order, and again."""
        while True:
            yield from self._rng.sample(kinds, len(kinds))

    # ---- ranks

    def kill(self, count: int = 1) -> None:
        self._signal("WorkerActor", signal.SIGKILL, count)

    def kill_again(self) -> None:
        self.kill()
        time.sleep(self._rng.uniform(0.2, 2.5))
        self.kill()

    def stop(self) -> None:
        self._signal("WorkerActor", signal.SIGSTOP)

    def pause_rank(self, seconds: float) -> None:
        self._pause(self._chosen("WorkerActor"), seconds)

    # ---- driver, front, clients

    def kill_driver(self) -> None:
        self._signal("DriverActor", signal.SIGKILL)

    def pause_driver(self) -> None:
        self._pause(self._chosen("DriverActor"), self._rng.choice((3.0, 8.0, LONG_SECONDS)))

    def pause_front(self) -> None:
        self._pause([self._service.process], self._rng.choice((3.0, 8.0, LONG_SECONDS)))

    def kill_a_client(self) -> None:
        command = [sys.executable, "-c", DOOMED_CLIENT, self._service.name, self._service.ray_address()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as doomed:
            doomed.stdout.readline()
            doomed.kill()

    # ---- requests

    def poison(self) -> None:
        self._load.do_harm(self._rng.choice([kind for kind in TRIGGERS if kind != "nan"]))

    def spoil(self) -> None:
        self._load.do_harm("nan")

    def crowd(self) -> None:
        self._load.burst(self._rng)

    def read_slowly(self) -> None:
        self._load.read_slowly(self._rng)

    # ---- machines and Ray

    def lose_machine(self) -> None:
        """All of it at once, or its raylet, whose processes follow. Another takes its place."""
        doomed = self._service.of_other_node()
        for process in doomed if self._rng.random() < 0.5 else doomed[:1]:
            send(process, signal.SIGKILL)
        self._replace_machine(doomed)

    def kill_helper(self) -> None:
        """Of Ray's, beside a raylet. Some take their raylet with them."""
        others = self._service.of_other_node()
        helpers = [one for name in HELPERS for one in others if name in " ".join(one.cmdline())]
        helpers += [one for one in self._service.processes("log_monitor") if one not in helpers]
        send(self._rng.choice(helpers), signal.SIGKILL)
        _, alive = psutil.wait_procs(others[:1], timeout=3)
        if not alive:
            self._replace_machine(others)

    def pause_ray(self) -> None:
        found = [*self._service.processes("gcs_server"), *self._service.processes("raylet/raylet")]
        self._pause([self._rng.choice(found)], self._rng.choice((3.0, 10.0)))

    def _replace_machine(self, doomed: list[psutil.Process]) -> None:
        time.sleep(self._rng.uniform(0, 3))
        for process in doomed:
            send(process, signal.SIGKILL)
        psutil.wait_procs(doomed, timeout=5)
        self._service.start_other_node()

    # ---- pieces

    def _chosen(self, title: str, count: int = 1) -> list[psutil.Process]:
        found = self._service.processes(title)
        return self._rng.sample(found, min(count, len(found)))

    def _signal(self, title: str, number: signal.Signals, count: int = 1) -> None:
        for process in self._chosen(title, count):
            send(process, number)

    def _pause(self, processes: list[psutil.Process], seconds: float) -> None:
        for process in processes:
            send(process, signal.SIGSTOP)
        time.sleep(seconds)
        for process in processes:
            send(process, signal.SIGCONT)


KINDS: dict[str, Callable[[Chaos], None]] = {
    "kill": Chaos.kill,
    "kill two": lambda chaos: chaos.kill(2),
    "kill again": Chaos.kill_again,
    "stop": Chaos.stop,
    "pause": lambda chaos: chaos.pause_rank(chaos._rng.uniform(0.5, 3)),
    "long pause": lambda chaos: chaos.pause_rank(LONG_SECONDS),
    "driver": Chaos.kill_driver,
    "pause driver": Chaos.pause_driver,
    "pause front": Chaos.pause_front,
    "client": Chaos.kill_a_client,
    "poison": Chaos.poison,
    "nan": Chaos.spoil,
    "crowd": Chaos.crowd,
    "slow reader": Chaos.read_slowly,
    "machine": Chaos.lose_machine,
    "helper": Chaos.kill_helper,
    "pause ray": Chaos.pause_ray,
}
OF_TWO_NODES = ("machine", "helper", "pause ray")
