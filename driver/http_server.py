"""The HTTP front: the OpenAI interface, health and figures of a service, through the handle that everyone else uses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter
from starlette.types import ASGIApp

from driver import openai_routes
from driver.api_errors import add_handlers, json_response
from driver.config import ConfigError
from driver.front import Front, HttpLimits
from driver.handle import Client
from driver.http_door import Door
from driver.metrics import exposition
from driver.service import DRAINING
from driver.startup import FAILED, READY
from driver.wire import ServiceUnavailable

STOP_SECONDS = 5
HEALTH_SECONDS = 2.0  # probes do not wait longer for an answer than that
KEEP_ALIVE_SECONDS = 65  # longer than clients keep idle connections, so that it is they who close them


class HttpServer:
    """Listens from the moment it is made, so that a port that is taken is known before anything is started.

    Raises ConfigError when it cannot listen.
    """

    def __init__(self, host: str, port: int) -> None:
        if not 0 <= port <= 65535:
            raise ConfigError(f"cannot listen on {host} port {port}: ports go from 0 to 65535")
        try:
            # An address of either family; 0 takes any free port.
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(2048)  # bound alone, another process could take the port as well
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error}") from error
        self.host, self.port = host, self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        self._server = uvicorn.Server(config)
        # In a thread of its own, uvicorn leaves the program's signal handlers alone.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="quadriga-http", daemon=True
        )
        self._thread.start()

    def failed(self) -> dict[str, Any] | None:
        """As StartStatus.now when the server has ended by itself, so that nobody is answered; None while it serves."""
        if self._thread is None or self._thread.is_alive():
            return None
        return {"state": FAILED, "error": f"the HTTP server at {self.url} has ended", "input_fault": False}

    def close(self) -> None:
        """Finishes the answers that are under way, for STOP_SECONDS at most. May be called twice."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=2 * STOP_SECONDS)
            self._thread = None
        self._socket.close()


def make_app(client: Client, api_keys: Sequence[str] = (), limits: HttpLimits | None = None) -> ASGIApp:
    """The application. api_keys: of which callers of what lies behind driver.http_door.NEED_KEY must show one."""
    front = Front(client, limits)
    figures = CollectorRegistry()
    answers = Counter("quadriga_http_responses", "HTTP answers begun.", ("path", "code"), registry=figures)
    app = FastAPI(title="Quadriga", version=version(), docs_url=None, redoc_url=None)
    add_handlers(app)
    _add_state(app, client)
    _add_metrics(app, client, figures)
    openai_routes.add_routes(app, front)
    paths = {route.path for route in app.routes if "{" not in route.path}
    return Door(app, api_keys, front.limits.max_body_bytes, answers, paths)


def version() -> str:
    """Of the installed distribution."""
    try:
        return metadata.version("quadriga")
    except metadata.PackageNotFoundError:  # run from a folder that is not installed
        return "unknown"


def _add_state(app: FastAPI, client: Client) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the driver answers and its engine has not failed; 503 otherwise, with the reason."""
        return await _state(client, (READY, DRAINING))

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken, 503 otherwise."""
        return await _state(client, (READY,))

    @app.get("/version")
    async def tell_version() -> Response:
        """The version of this server."""
        return json_response({"version": version()})

    @app.get("/stats")
    async def stats() -> Response:
        """Totals since the driver's start and its present load."""
        return json_response(await client.astats())


def _add_metrics(app: FastAPI, client: Client, own: CollectorRegistry) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures in Prometheus' text format; also while the driver does not answer, to say so."""
        try:
            stats = await client.astats() if client.connected else None
        except ServiceUnavailable:
            stats = None
        return Response(exposition(stats, client.restarts, own), media_type=CONTENT_TYPE_LATEST)


async def _state(client: Client, good: tuple[str, ...]) -> Response:
    if not client.connected:
        return json_response({"state": "unavailable", "error": "the driver does not answer"}, 503)
    try:
        health = await client.ahealth(HEALTH_SECONDS)
    except ServiceUnavailable as error:
        return json_response({"state": "unavailable", "error": str(error)}, 503)
    return json_response(health, 200 if health["state"] in good else 503)
