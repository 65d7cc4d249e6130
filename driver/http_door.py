"""What every HTTP request passes before a route sees it: the key, the size of its body, and a count of the answer."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import Counter

from driver.api_errors import ApiError

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

BODY_SECONDS = 60.0  # how long a client may take to send its body
REST_SECONDS = 2.0  # how long the rest of one that is too large is read, so that the client hears why
NEED_KEY = ("/v1", "/tokenize", "/detokenize", "/stats")


class Door:
    """An ASGI application around another. Bodies are read here, whole, so that no route ever sees part of one."""

    def __init__(
        self, app: App, api_keys: Sequence[str], max_body_bytes: int, answers: Counter, paths: set[str]
    ) -> None:
        """answers: counts them by path and code. paths: which of them are counted by name."""
        self._app, self._keys, self._max_body_bytes = app, [key.encode() for key in api_keys], max_body_bytes
        self._answers, self._paths = answers, paths

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._answers.labels(path, str(message["status"])).inc()
            await send(message)

        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, counted)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), counted)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or not any(path == start or path.startswith(f"{start}/") for start in NEED_KEY):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(key, one) for one in self._keys]
        if scheme.lower() != b"bearer" or not any(known):
            why = "a valid API key is needed, as Authorization: Bearer KEY"
            raise ApiError(401, why, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The request's body; None when the client has left. Raises ApiError 413 or 408."""
        length = headers.get(b"content-length", b"")
        too_large = more = length.isdigit() and int(length) > self._max_body_bytes
        if not too_large:
            try:
                body, more = await asyncio.wait_for(self._read(receive), BODY_SECONDS)
            except asyncio.TimeoutError:
                why = f"the body was not here within {BODY_SECONDS:g} s"
                raise ApiError(408, why, code="body_timeout", headers={"Connection": "close"}) from None
            too_large = body is not None and len(body) > self._max_body_bytes
            if not too_large:
                return body
        if more:
            await _read_rest(receive)
        why = f"the body has more than {self._max_body_bytes} bytes, which is the most that is taken"
        raise ApiError(413, why, code="body_too_large", headers={"Connection": "close"})

    async def _read(self, receive: Receive) -> tuple[bytes | None, bool]:
        """The body, or its beginning as soon as it is too large, and whether more of it is to come."""
        parts, size, more = [], 0, True
        while more and size <= self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None, False
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
        return b"".join(parts), more


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body in one piece before what comes after it."""
    given = False

    async def replay() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _read_rest(receive: Receive) -> None:
    async def read() -> None:
        more = True
        while more:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)

    try:
        await asyncio.wait_for(read(), REST_SECONDS)
    except asyncio.TimeoutError:
        return  # the connection is closed on it
