"""`quadriga serve`: starts a service, shows how it comes up, answers over HTTP, and drains when told to stop."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from tqdm import tqdm

from driver.config import ConfigError, EngineConfig
from driver.executor import WorkerFailed
from driver.handle import Client
from driver.options import engine_options

logger = logging.getLogger("quadriga.serve")

POLL_SECONDS = 0.3


class StartFailed(ValueError):
    """The service was asked for something that cannot be had; the message says what."""


class Host(Protocol):
    """Where the driver lives while `serve` runs: in an actor, or in this process."""

    def status(self) -> dict[str, Any]:
        """As DriverActor.status."""

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
        help="seconds that running requests get to finish on SIGTERM or SIGINT",
    )
    group.add_argument("--replace", action="store_true", help="end a running service of this name first")
    group.add_argument(
        "--detach", action="store_true", help="leave the service running on the Ray cluster and return when it is ready"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    from driver.http_server import HttpServer, make_app  # FastAPI takes a third of a second

    if args.max_queued_requests < 0 or args.drain_seconds < 0:
        raise ConfigError("--max-queued-requests and --drain-seconds must not be negative")
    options = engine_options(args)
    EngineConfig(**options)  # its errors come before anything is started
    stop = _stop_on_signals()
    server = None if args.detach else HttpServer(args.host, args.port)
    host: Host | None = None
    try:
        host = _make_host(args, options)
        _show_start(host.status, stop)
        if stop.is_set():
            return 0
        if args.detach:
            print(f"quadriga: service {args.name!r} is ready", file=sys.stderr)
            return 0
        with host.connect() as client:
            server.start(make_app(client, args.api_key or ()))
            print(f"quadriga: {args.name!r} is ready at {server.url}", file=sys.stderr, flush=True)
            _wait(stop, host.status)
            print(f"quadriga: draining, for {args.drain_seconds:g} s at most", file=sys.stderr, flush=True)
            aborted = host.end(args.drain_seconds)
            print(f"quadriga: stopped; {aborted} requests were aborted", file=sys.stderr, flush=True)
        return 0
    finally:
        if server is not None:
            server.close()
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
    return ActorHost({**options, "executor": "ray"}, settings, args.replace)


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _show_start(status: Callable[[], dict[str, Any]], stop: threading.Event) -> None:
    """Shows phases, and a bar while weights load, until the service is ready. Raises what it failed with."""
    began, phase, bar = time.monotonic(), None, None
    try:
        while not stop.is_set():
            now = status()
            if now["state"] == "failed":
                raise StartFailed(now["error"]) if now["input_fault"] else WorkerFailed(now["error"])
            if now["state"] == "ready":
                break
            if now["phase"] != phase:
                phase = now["phase"]
                print(f"quadriga: starting: {phase} …", file=sys.stderr, flush=True)
            if now["share"] is not None:
                bar = bar or tqdm(total=100, desc="weights", unit="%", leave=False, mininterval=0.5)
                bar.update(round(100 * now["share"]) - bar.n)
            stop.wait(POLL_SECONDS)
    finally:
        if bar is not None:
            bar.close()
    if not stop.is_set():
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in now["seconds"].items())
        print(f"quadriga: ready in {time.monotonic() - began:.1f} s ({times})", file=sys.stderr, flush=True)


def _wait(stop: threading.Event, status: Callable[[], dict[str, Any]]) -> None:
    """Until told to stop, or until the service has failed for good."""
    while not stop.wait(1.0):
        now = status()
        if now["state"] == "failed":
            raise WorkerFailed(f"the service has failed: {now['error']}")
