#!/usr/bin/env python3
"""Breaks a service on purpose, again and again, and compares every output with that of an undisturbed run.

    python scripts/chaos.py --minutes 2 --tp 3 --seed 1 [--model smollm2] [--plot docs/chaos.png]

Steady load of chunked prompts and streams through handle and HTTP; faults of all kinds at random moments:

    kill      SIGKILL of one rank, of two at once, or of one while another is being replaced
    stop      SIGSTOP of a rank for good: the watchdog must notice
    pause     SIGSTOP of a rank for a moment that the watchdog must bear
    driver    SIGKILL of the driver
    client    SIGKILL of a client amid its streams

A request that fails, or a token more, less or other, is a difference. What is still there when all has ended (KV
blocks, processes, shared memory, files) is a leak. The last line is a JSON object; the exit code is 1 if there is any
of either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from chaos_tally import Tally, draw, report

from quadriga import Client, SamplingParams

KINDS = ("kill", "kill", "kill two", "kill again", "stop", "pause", "driver", "client")
START_SECONDS, CALM_SECONDS = 180.0, 120.0
STREAMS, PROMPTS = 6, 24
DOOMED_CLIENT = """
import sys, time
from quadriga import Client, SamplingParams
client = Client.connect(sys.argv[1], sys.argv[2])
streams = [client.stream([5] * n, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)) for n in (9, 400)]
for piece in streams[0]:
    print("token", flush=True)
"""


@dataclass(frozen=True)
class Ask:
    """A request; seed None takes the likeliest tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def params(self) -> SamplingParams:
        temperature = 0.0 if self.seed is None else 1.0
        return SamplingParams(temperature=temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True)

    @property
    def body(self) -> dict[str, Any]:
        params = self.params
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": params.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
        }


class Service:
    """`quadriga serve` on a Ray of its own, in a folder of its own."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.name = f"chaos-{os.getpid()}"
        self._log = Path(folder, "serve.log").open("w+")  # noqa: SIM115 open until the service ends
        command = [sys.executable, "-m", "quadriga", "serve", "--model", args.model, "--tp", str(args.tp)]
        command += ["--executor", "ray", "--ray-address", "local", "--name", self.name, "--port", "0"]
        command += ["--max-num-batched-tokens", "256", "--num-kv-blocks", "400"]
        environment = {**os.environ, "TMPDIR": folder}
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        self.url = self._wait_ready()

    def _wait_ready(self) -> str:
        for _ in _until(START_SECONDS):
            for line in self.log().splitlines():
                if " is ready at " in line:
                    return line.rsplit(" ", 1)[1]
            if self.process.poll() is not None:
                break
        raise SystemExit(f"the service did not start:\n{self.log()}")

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def ray_address(self) -> str:
        """Of its own Ray; there may be others on this machine."""
        arguments = next(process.cmdline() for process in self.processes("raylet/raylet"))
        return next(one.partition("=")[2] for one in arguments if one.startswith("--gcs-address="))

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Its own and all that descend from it, by title."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if title in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended
        return found

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(90)
        self._log.close()


class Load:
    """Threads that ask the same questions over and over, in random order, and compare the answers."""

    def __init__(self, asks: list[Ask], service: Service, client: Client, tally: Tally, seed: int) -> None:
        self._asks, self._service, self._client, self._tally = asks, service, client, tally
        self._expected: dict[tuple[int, bool], Any] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"), i % 3 == 0), daemon=True)
            for i in range(STREAMS)
        ]

    def learn(self) -> None:
        """The undisturbed answers."""
        for index, ask in enumerate(self._asks):
            self._expected[index, False] = self._by_handle(ask)
            self._expected[index, True] = self._by_http(ask)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CALM_SECONDS)
            if thread.is_alive():
                self._tally.differences.append("a stream never ended")

    def _run(self, rng: random.Random, http: bool) -> None:
        while not self._stop.is_set():
            index = rng.randrange(len(self._asks))
            try:
                found = (self._by_http if http else self._by_handle)(self._asks[index])
            except Exception as error:  # noqa: BLE001 whatever it is, the request was lost
                found = f"{type(error).__name__}: {error}"
            with self._lock:
                self._tally.requests += 1
                self._tally.compared += self._asks[index].max_tokens
                if found != self._expected[index, http]:
                    way = "HTTP" if http else "handle"
                    expected = self._expected[index, http]
                    self._tally.differences.append(f"request {index} by {way}: {found!r} instead of {expected!r}")

    def _by_handle(self, ask: Ask) -> list[int]:
        tokens: list[int] = []
        for piece in self._client.stream(list(ask.prompt), ask.params):
            tokens += piece.token_ids
            self._tally.arrivals += [time.monotonic()] * len(piece.token_ids)
        return tokens

    def _by_http(self, ask: Ask) -> str:
        headers = {"Content-Type": "application/json"}
        body = json.dumps(ask.body).encode()
        request = urllib.request.Request(f"{self._service.url}/v1/completions", body, headers)
        text, ended = "", False
        with urllib.request.urlopen(request, timeout=CALM_SECONDS) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    ended |= data == "[DONE]"
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    text += choice["text"]
                    self._tally.arrivals.append(time.monotonic())
        return text if ended else f"{text} (cut off)"


class Chaos:
    """Commits faults."""

    def __init__(self, service: Service, client: Client, tally: Tally, rng: random.Random, address: str) -> None:
        self._service, self._client, self._tally = service, client, tally
        self._rng, self._address = rng, address

    def commit(self, kind: str) -> None:
        self._tally.faults.append((time.monotonic(), kind))
        if kind == "driver":
            self._signal("DriverActor", signal.SIGKILL)
        elif kind == "client":
            self._kill_a_client()
        elif kind == "pause":
            stopped = self._signal("WorkerActor", signal.SIGSTOP)
            time.sleep(self._rng.uniform(0.5, 3))
            for process in stopped:
                _send(process, signal.SIGCONT)
        elif kind == "kill again":
            self._signal("WorkerActor", signal.SIGKILL)
            time.sleep(self._rng.uniform(0.2, 2.5))
            self._signal("WorkerActor", signal.SIGKILL)
        else:
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            self._signal("WorkerActor", number, count=2 if kind == "kill two" else 1)

    def wait_for_calm(self) -> None:
        """Until a token that came after everything was back."""
        for _ in _until(CALM_SECONDS):
            try:
                if not self._client.health(2)["recovering"]:
                    break
            except Exception:  # noqa: BLE001 it is not back yet
                continue
        count = len(self._tally.arrivals)
        for _ in _until(CALM_SECONDS):
            if len(self._tally.arrivals) > count + 3 * STREAMS:
                return
        self._tally.differences.append(f"no token came for {CALM_SECONDS:g} s")

    def _signal(self, title: str, number: signal.Signals, count: int = 1) -> list[psutil.Process]:
        found = self._service.processes(title)
        chosen = self._rng.sample(found, min(count, len(found)))
        for process in chosen:
            _send(process, number)
        return chosen

    def _kill_a_client(self) -> None:
        command = [sys.executable, "-c", DOOMED_CLIENT, self._service.name, self._address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as doomed:
            doomed.stdout.readline()
            doomed.kill()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it has ended, which is no worse


def _until(seconds: float) -> Iterator[None]:
    """Ticks of a fifth of a second."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.2)


def look_for_leaks(service: Service, client: Client, folder: str, shared: set[str]) -> list[str]:
    """Ends the service, and says what of it is left."""
    leaks = []
    for _ in _until(20):
        stats = client.stats()
        held = stats["kv_blocks"] - stats["kv_blocks_free"]
        if held == 0 and stats["running"] == stats["waiting"] == 0:
            break
    else:
        leaks.append(f"{held} KV blocks are held, {stats['running']} requests run, {stats['waiting']} wait")
    processes = service.processes()
    client.close()
    ray.shutdown()  # whoever is connected to a private Ray ends with it
    service.end()
    _, alive = psutil.wait_procs(processes, timeout=15)
    leaks += [f"process {process.pid} lives" for process in alive]
    left = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} - shared
    leaks += sorted(left - _mapped_by_others() if left else left)
    return leaks + [
        str(path) for path in Path(folder).iterdir() if path.name != "serve.log" and "hang" not in path.name
    ]


def _mapped_by_others() -> set[str]:
    """Files that living processes use; this service has none any more."""
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {area.path for area in process.memory_maps()}
        except psutil.Error:
            continue  # it has ended, or is not ours to look at
    return found


def make_asks(rng: random.Random) -> list[Ask]:
    """Short and long prompts, greedy and seeded; some share a prefix."""
    shared = tuple(rng.randrange(100, 40_000) for _ in range(200))
    asks = []
    for index in range(PROMPTS):
        own = tuple(rng.randrange(100, 40_000) for _ in range(rng.choice((4, 30, 300))))
        prompt = shared + own if index % 4 == 0 else own
        asks.append(Ask(prompt, rng.choice((12, 40, 90)), None if index % 2 else index))
    return asks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=3, help="tensor-parallel size")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="draw the run here")
    args = parser.parse_args()
    rng, tally, shared = random.Random(args.seed), Tally(), {f"/dev/shm/{n}" for n in os.listdir("/dev/shm")}
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        service = Service(args, folder)
        try:
            address = service.ray_address()
            with Client.connect(service.name, address) as client:
                load = Load(make_asks(rng), service, client, tally, args.seed)
                load.learn()
                began = time.monotonic()
                load.start()
                chaos = Chaos(service, client, tally, rng, address)
                while time.monotonic() < began + 60 * args.minutes:
                    time.sleep(rng.uniform(1, 4))
                    chaos.commit(rng.choice(KINDS))
                    chaos.wait_for_calm()
                    when, kind = tally.faults[-1]
                    print(f"{when - began:7.1f} s  {kind}, over after {time.monotonic() - when:.1f} s", flush=True)
                ended = time.monotonic()
                load.stop()
                tally.leaks += look_for_leaks(service, client, folder, shared)
        finally:
            service.process.kill()
    if args.plot:
        draw(tally, began, ended, args.plot)
    for trouble in (*tally.differences, *tally.leaks):
        print(trouble[:2000])
    return report(tally, ended)


if __name__ == "__main__":
    raise SystemExit(main())
