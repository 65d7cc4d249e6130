"""The HTTP front: health, readiness and figures of a service, through the same handle that everyone else uses."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Sequence

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from driver.config import ConfigError
from driver.handle import Client
from driver.wire import ServiceUnavailable

STOP_SECONDS = 5


class HttpServer:
    """Listens from the moment it is made, so that a port that is taken is known before anything is started.

    Raises ConfigError when it cannot listen.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            # An address of either family; 0 takes any free port.
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error}") from error
        self.host, self.port = host, self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self, app: FastAPI) -> None:
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_SECONDS)
        self._server = uvicorn.Server(config)
        # In a thread of its own, uvicorn leaves the program's signal handlers alone.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="quadriga-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Finishes the answers that are under way, for STOP_SECONDS at most. May be called twice."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=2 * STOP_SECONDS)
            self._thread = None
        self._socket.close()


def make_app(client: Client, api_keys: Sequence[str] = ()) -> FastAPI:
    """The routes. api_keys: of which a caller must show one as a bearer token, except for health and readiness."""

    def check_key(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.encode(), one.encode()) for one in api_keys]
        if api_keys and not (scheme.lower() == "bearer" and any(known)):
            raise HTTPException(401, "a valid API key is needed", {"WWW-Authenticate": "Bearer"})

    app = FastAPI(title="Quadriga", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the driver answers and its engine has not failed; 503 otherwise, with the reason."""
        return await _state(client, ("ready", "draining"))

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 while requests are taken, 503 otherwise."""
        return await _state(client, ("ready",))

    @app.get("/stats", dependencies=[Depends(check_key)])
    async def stats() -> JSONResponse:
        try:
            return JSONResponse(await client.astats())
        except ServiceUnavailable as error:
            return JSONResponse({"state": "unavailable", "error": str(error)}, 503)

    return app


async def _state(client: Client, good: tuple[str, ...]) -> JSONResponse:
    if not client.connected:
        return JSONResponse({"state": "unavailable", "error": "the driver does not answer"}, 503)
    try:
        health = await client.ahealth()
    except ServiceUnavailable as error:
        return JSONResponse({"state": "unavailable", "error": str(error)}, 503)
    return JSONResponse(health, 200 if health["state"] in good else 503)
