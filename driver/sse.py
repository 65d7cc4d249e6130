"""Answers that end early when nobody reads them any more, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from driver.api_errors import api_error, to_json

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# A stream begins with its first event, so that what is wrong with a request has a status of its own; one that waits
# longer in the queue begins without, so that nobody on the way takes it for dead.
FIRST_EVENT_SECONDS = 5.0
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_GONE = Response(status_code=499)  # for the record: nobody reads it


class Disconnected(Exception):
    """The client has left."""


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def answer_whole(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's result; it is cancelled when the client leaves."""
    try:
        return await _unless_left(request.receive, asyncio.ensure_future(work))
    except Disconnected:
        return _GONE


async def answer_stream(request: Request, events: AsyncIterator[bytes]) -> Response:
    """A response with these events. Raises what keeps the first from coming, and ends them when the client leaves."""
    first = asyncio.ensure_future(anext(events))
    try:
        await _unless_left(request.receive, first, FIRST_EVENT_SECONDS)
    except Disconnected:
        await events.aclose()
        return _GONE
    return EventStream(first, events)


class EventStream(Response):
    """Sends events as they come; an error among them is the last one."""

    def __init__(self, first: asyncio.Future[bytes], events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._first, self._events = first, events

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        with suppress(Disconnected):
            await _unless_left(receive, asyncio.ensure_future(self._send_all(send)))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            await send({"type": "http.response.body", "body": await self._first, "more_body": True})
            async for one in self._events:  # does not go on before the client takes what is sent
                await send({"type": "http.response.body", "body": one, "more_body": True})
        except Exception as error:  # noqa: BLE001 told to the client, and to the log if it is a fault of ours
            await send({"type": "http.response.body", "body": event(api_error(error).body), "more_body": True})
        finally:
            self._first.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_left(receive: Receive, work: asyncio.Future[Result], seconds: float | None = None) -> Result | None:
    """The work's result, or None when it takes longer.

    Raises Disconnected when the client leaves, and ends the work then.
    """
    leaving = asyncio.ensure_future(_left(receive))
    try:
        done, _ = await asyncio.wait({work, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:  # the server itself ends
        work.cancel()
        raise
    finally:
        leaving.cancel()
    if work in done:
        return work.result()
    if leaving in done:
        work.cancel()
        await asyncio.wait({work})
        raise Disconnected
    return None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
