"""Where client handles reach a service: one ZeroMQ socket, served by a thread of its own.

A handle that says nothing for SILENCE_SECONDS is taken for dead: its requests are aborted. One that reads too slowly
costs no more memory than its requests' texts: updates that cannot be sent are joined per request until they can.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from driver import wire
from driver.engine import Update
from driver.service import Service
from parallel.channel import ChannelAddress, bind
from scheduler.params import InvalidRequest

logger = logging.getLogger("quadriga.port")

_FRAMES_AHEAD = 256  # frames that a handle may leave unread before its updates are joined


@dataclass(slots=True)
class _Pending:
    """Updates of one request that are not sent yet, joined to one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    last: Update | None = None


@dataclass(slots=True)
class _Session:
    """One handle. requests: the service's id of each of its requests, by its own number. unsent: frames that wait."""

    owner: bool
    seen_at: float
    requests: dict[int, str] = field(default_factory=dict)
    pending: dict[int, _Pending] = field(default_factory=dict)
    unsent: list[bytes] = field(default_factory=list)


class Port:
    """Serves handles. `start`, then `close`.

    owner_seen_at: `time.monotonic()` when a handle that owns the service was last heard, 0 while there was none;
    owner_left: whether it has said goodbye.
    """

    def __init__(self, service: Service, host: str | None, restarts: bool = False) -> None:
        """host: as in parallel.channel.bind. restarts: whether a service that has failed comes back, so that handles
        need not hear of it: they ask again."""
        self.service = service
        self._restarts = restarts
        self.owner_seen_at = 0.0
        self.owner_left = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, _FRAMES_AHEAD),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, int(wire.PING_SECONDS * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(wire.SILENCE_SECONDS * 1000)),
        ):
            self._socket.setsockopt(option, value)
        self.address: ChannelAddress = bind(self._socket, host)
        self._sessions: dict[bytes, _Session] = {}
        self._news: queue.SimpleQueue[tuple[bytes, int, Update]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="quadriga-port", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends what is left and ends. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        self._socket.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- the port's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_look = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(200))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._woken.clear()
            if self._socket in ready:
                self._take_messages()
            self._take_news()
            self._send_pending()
            if time.monotonic() >= next_look:
                self._drop_silent()
                next_look = time.monotonic() + wire.PING_SECONDS
        self._take_news()
        self._send_pending()

    def _take_messages(self) -> None:
        for _ in range(1000):  # in turns with what goes out
            try:
                parts = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._take(*parts)

    def _take(self, peer: bytes, frame: bytes) -> None:
        try:
            kind, items = wire.decode(frame, wire.FROM_HANDLE)
        except wire.WireError as error:
            logger.warning("a handle sent %s; it is ignored", error)
            return
        if kind == "hello":
            self._greet(peer, *items)
            return
        session = self._sessions.get(peer)
        if session is None:
            if kind != "bye":
                self._send(peer, "stranger")
            return
        session.seen_at = time.monotonic()
        if session.owner:
            self.owner_seen_at = session.seen_at
        if kind == "ping":
            self._send(peer, "pong")
        elif kind == "ask":
            self._ask(peer, session, *items)
        elif kind == "abort":
            if items[0] in session.requests:
                self.service.abort(session.requests[items[0]])
        elif kind == "query":
            self._answer(peer, *items)
        else:
            self.owner_left |= session.owner
            self._drop(peer)

    def _greet(self, peer: bytes, token: bytes, version: int, owner: bool) -> None:
        if not secrets.compare_digest(token, self.address.token):
            logger.warning("a handle that does not know the service's token is ignored")
            return
        if version != wire.VERSION:
            reason = f"the handle speaks version {version} of the protocol, the service {wire.VERSION}"
            self._send(peer, "refused", 0, "unavailable", reason)
            return
        self._drop(peer)  # a handle that greets anew asks anew
        self._sessions[peer] = _Session(owner, time.monotonic())
        if owner:
            self.owner_seen_at = time.monotonic()
        self._send(peer, "welcome", self.service.health())

    def _ask(self, peer: bytes, session: _Session, number: int, body: object) -> None:
        if number in session.requests:
            self._send(peer, "refused", number, "invalid", f"number {number} is in use")
            return
        try:
            request = self.service.submit(wire.read_ask(body), self._sink(peer, number))
        except Exception as error:
            kind = wire.refusal_kind(error)
            if kind == "failed":
                logger.exception("a request could not be taken")
            self._send(peer, "refused", number, kind, str(error))
            return
        session.requests[number] = request.id
        self._send(peer, "accepted", number, request.tokens[: request.num_prompt])

    def _answer(self, peer: bytes, number: int, what: str) -> None:
        answers: dict[str, Callable[[], dict[str, Any]]] = {"stats": self.service.stats, "health": self.service.health}
        if what in answers:
            self._send(peer, "answer", number, answers[what]())
        else:
            self._send(peer, "refused", number, "invalid", f"there is no {what!r} to ask for")

    def _sink(self, peer: bytes, number: int) -> Callable[[Update], None]:
        def sink(update: Update) -> None:
            self._news.put((peer, number, update))
            self._wake()

        return sink

    def _wake(self) -> None:
        if not self._woken.is_set():
            self._woken.set()
            try:
                os.write(self._wake_write, b"w")
            except BlockingIOError:
                return  # full of wake-ups

    def _take_news(self) -> None:
        while not self._news.empty():
            peer, number, update = self._news.get()
            session = self._sessions.get(peer)
            if session is not None:
                pending = session.pending.setdefault(number, _Pending())
                pending.text += update.text
                pending.token_ids += update.token_ids
                pending.last = update

    def _send_pending(self) -> None:
        for peer, session in list(self._sessions.items()):
            while session.unsent and self._send_frame(peer, session.unsent[0]):
                session.unsent.pop(0)
            if session.pending and not session.unsent:
                self._send_updates(peer, session)

    def _send_updates(self, peer: bytes, session: _Session) -> None:
        updates = [(number, pending) for number, pending in session.pending.items() if pending.last.error is None]
        if updates and not self._send_frame(peer, wire.encode("updates", [_packed(*item) for item in updates])):
            return
        for number, pending in session.pending.items():
            error = pending.last.error
            if error is not None and (isinstance(error, InvalidRequest) or not self._restarts):
                self._send(peer, "refused", number, wire.refusal_kind(error), str(error))
            if pending.last.finish_reason is not None:
                session.requests.pop(number, None)
        session.pending.clear()

    def _send(self, peer: bytes, kind: str, *items: object) -> None:
        """Sends a frame, or keeps it until the handle has read what it has."""
        frame = wire.encode(kind, *items)
        session = self._sessions.get(peer)
        if not self._send_frame(peer, frame) and session is not None and kind != "pong":
            session.unsent.append(frame)

    def _send_frame(self, peer: bytes, frame: bytes) -> bool:
        """Whether it is on its way; a handle whose connection is gone is dropped."""
        try:
            self._socket.send_multipart([peer, frame], flags=zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._drop(peer)
            return False

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for peer, session in list(self._sessions.items()):
            if now - session.seen_at > wire.SILENCE_SECONDS:
                logger.warning("a handle has been silent for %.0f s; it is dropped", wire.SILENCE_SECONDS)
                self._drop(peer)

    def _drop(self, peer: bytes) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            for request_id in session.requests.values():
                self.service.abort(request_id)


def _packed(number: int, pending: _Pending) -> list[Any]:
    last = pending.last
    return [number, pending.text, pending.token_ids, last.finish_reason, last.stop_reason, last.cached_tokens]
