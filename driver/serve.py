"""`quadriga serve`: starts a service, shows how it comes up, answers over HTTP, and drains when told to stop."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from tqdm import tqdm

from driver.config import ConfigError, EngineConfig, check_drain_seconds
from driver.executor import WorkerFailed
from driver.handle import Client
from driver.options import engine_options
from driver.startup import FAILED, READY

logger = logging.getLogger("quadriga.serve")

POLL_SECONDS = 0.3
LOOK_SECONDS = 1.0


class StartFailed(ValueError):
    """The service was asked for something that cannot be had; the message says what."""


class Host(Protocol):
    """Where the driver lives while `serve` runs: in an actor, or in this process."""

    def status(self) -> dict[str, Any]:
        """As StartStatus.now."""

    def connect(self) -> Client:
        """A handle that owns the service."""

    def end(self, drain_seconds: float) -> int:
        """Drains and ends the service. Returns how many requests had to be aborted."""

    def close(self) -> None:
        """Leaves nothing behind, whatever state the start was in."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options to its parser."""
    group = parser.add_argument_group("service")
    group.add_argument("--name", default="llm", help="under which Client.connect finds it on the Ray cluster")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    group.add_argument("--port", type=int, default=8000, metavar="P", help="TCP port; 0 takes any free one")
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="K",
        help="keys of which callers must show one; none: no check",
    )
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model; not given: --model")
    group.add_argument(
        "--max-queued-requests", type=int, default=1024, metavar="N", help="requests that may wait; more are refused"
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests get to finish on SIGTERM or SIGINT, or when replaced",
    )
    add_limits(parser)
    group.add_argument("--replace", action="store_true", help="drain and end a running service of this name first")
    group.add_argument(
        "--detach",
        action="store_true",
        help="leave the service running on the Ray cluster, for handles and without HTTP; return when it is ready",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds what bounds a single HTTP request."""
    group = parser.add_argument_group("limits of one HTTP request")
    group.add_argument("--max-body-mib", type=float, default=16.0, metavar="M", help="size of its body in MiB")
    group.add_argument("--max-prompts", type=int, default=256, metavar="N", help="prompts in it")
    group.add_argument("--max-choices", type=int, default=64, metavar="N", help="its `n` and `best_of`")
    group.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="tokens of each prompt; not given: what the context length leaves",
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    with contextlib.redirect_stdout(sys.stderr):  # of Ray's, which tells of dead workers there
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from driver.front import HttpLimits
    from driver.http_server import HttpServer, make_app  # FastAPI takes a third of a second

    if args.max_queued_requests < 0:
        raise ConfigError(f"--max-queued-requests must not be negative, got {args.max_queued_requests}")
    check_drain_seconds(args.drain_seconds)
    if not args.name:
        raise ConfigError("--name must not be empty")
    if args.detach and args.api_key:
        raise ConfigError("--api-key guards HTTP, which a service left by --detach does not answer")
    if not 0 < args.max_body_mib < float("inf"):
        raise ConfigError(f"--max-body-mib must be more than 0, got {args.max_body_mib:g}")
    limits = HttpLimits(int(args.max_body_mib * 2**20), args.max_prompts, args.max_choices, args.max_prompt_tokens)
    options = engine_options(args)
    EngineConfig(**options)  # its errors come before anything is started
    stop = _stop_on_signals()
    server = None if args.detach else HttpServer(args.host, args.port)
    host: Host | None = None
    client: Client | None = None
    try:
        host = _make_host(args, options)
        if server is not None:  # from now on /ready says 503, and 200 as soon as it is
            client = host.connect()
            server.start(make_app(client, args.api_key or (), limits))
        _show_start(host.status, stop)
        if stop.is_set():
            return 0
        if args.detach:
            _say(f"service {args.name!r} is ready; `quadriga stop --name {args.name}` ends it")
            return 0
        _wait_for_answer(client, stop, host.status)
        _say(f"{args.name!r} is ready at {server.url}")
        _wait(stop, lambda: server.failed() or host.status())
        _say(f"draining, for {args.drain_seconds:g} s at most; a second signal ends at once")
        aborted = host.end(args.drain_seconds)
        _say(f"stopped; {aborted} requests were aborted")
        return 0
    finally:
        if server is not None:
            server.close()
        if client is not None:
            client.close()  # before its way to the service, which is Ray's, is gone
        if host is not None:
            host.close()


def _make_host(args: argparse.Namespace, options: dict[str, Any]) -> Host:
    if options["executor"] == "inline":
        if args.detach:
            raise ConfigError("an inline service lives in this process and cannot be detached")
        from driver.hosts import InlineHost

        return InlineHost(options, args.max_queued_requests, args.served_model_name)
    from driver.hosts import ActorHost
    from driver.service_actor import ServiceSettings

    settings = ServiceSettings(args.name, args.max_queued_requests, not args.detach, args.served_model_name)
    return ActorHost({**options, "executor": "ray"}, settings, args.replace, args.drain_seconds)


def _stop_on_signals() -> threading.Event:
    """Set by the first signal; a second one ends the command wherever it is."""
    stop = threading.Event()

    def take(number: int, frame: object) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)
    return stop


def _say(message: str) -> None:
    print(f"quadriga: {message}", file=sys.stderr, flush=True)


def _show_start(status: Callable[[], dict[str, Any]], stop: threading.Event) -> None:
    """Shows phases, and a bar while weights load, until the service is ready. Raises what it failed with."""
    began, phase, weights = time.monotonic(), None, _Weights()
    try:
        while not stop.is_set():
            now = status()
            if now["state"] == FAILED:
                raise StartFailed(now["error"]) if now["input_fault"] else WorkerFailed(now["error"])
            if now["state"] == READY:
                break
            if now["phase"] != phase:
                phase = now["phase"]
                _say(f"starting: {phase} …")
            if now["share"] is not None:
                weights.show(round(100 * now["share"]))
            stop.wait(POLL_SECONDS)
    finally:
        weights.close()
    if not stop.is_set():
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in now["seconds"].items())
        _say(f"ready in {time.monotonic() - began:.1f} s ({times})")


class _Weights:
    """How much of the weights is loaded: a bar on a terminal, and in a job's log a line for every quarter."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._said = 0

    def show(self, percent: int) -> None:
        if sys.stderr.isatty():
            self._bar = self._bar or tqdm(total=100, desc="weights", unit="%", leave=False, mininterval=0.5)
            self._bar.update(percent - self._bar.n)
        elif percent // 25 > self._said // 25:
            self._said = percent
            print(f"quadriga: weights {percent} %", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _wait_for_answer(client: Client, stop: threading.Event, status: Callable[[], dict[str, Any]]) -> None:
    """Until the service answers: whoever is told that it is ready must not get a 503. Ends as `_wait` does."""
    next_look = time.monotonic() + LOOK_SECONDS
    while not client.connected and not stop.wait(0.02):
        if time.monotonic() >= next_look:
            _check(status())
            next_look = time.monotonic() + LOOK_SECONDS


def _wait(stop: threading.Event, status: Callable[[], dict[str, Any]]) -> None:
    """Until told to stop, or until the service has failed for good."""
    while not stop.wait(LOOK_SECONDS):
        _check(status())


def _check(now: dict[str, Any]) -> None:
    if now["state"] == FAILED:
        raise WorkerFailed(f"the service has failed: {now['error']}")
