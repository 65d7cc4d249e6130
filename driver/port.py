"""Where client handles reach a service: one ZeroMQ socket, served by a thread of its own.

A handle that says nothing for SILENCE_SECONDS is taken for dead: its requests are aborted. One that reads too slowly
costs no more memory than its requests' texts: updates that cannot be sent are joined per request until they can.
"""

from __future__ import annotations

import functools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import zmq

from driver import wire
from driver.engine import Update
from driver.pile import Pile
from driver.service import Service
from driver.startup import FAILED
from parallel.channel import ChannelAddress, bind
from parallel.wake import WakePipe
from scheduler.params import InvalidRequest
from scheduler.request import Request

logger = logging.getLogger("quadriga.port")

_FRAMES_AHEAD = 256  # frames that a handle may leave unread before its updates are joined
_FINAL = (InvalidRequest, wire.RequestFailed, wire.ShutDown)  # errors that asking again would not help
_LONG_ASK = 16_384  # bytes; a longer one is prepared aside
_MOST_ENCODING = 64  # asks that wait for that
_LONGEST_REASON = 4000  # characters: an error may quote what was asked


@dataclass(slots=True)
class _Session:
    """One handle. requests: the service's id of each of its requests, by its own number. unsent: frames that wait."""

    owner: bool
    seen_at: float
    requests: dict[int, str] = field(default_factory=dict)
    preparing: set[int] = field(default_factory=set)
    unwanted: dict[int, str] = field(default_factory=dict)  # aborted before they were prepared
    pending: dict[int, Pile] = field(default_factory=dict)
    unsent: list[bytes] = field(default_factory=list)


_News = Update | Request | Exception | None  # of one ask: what came of it; None when it has been prepared aside


class Port:
    """Serves handles. `start`, then `close`.

    owner_seen_at: `time.monotonic()` when a handle that owns the service was last heard, 0 while there was none;
    owner_left: whether it has said goodbye. failure: why its thread has ended, if that was not `close`.
    """

    def __init__(self, service: Service, host: str | None, restarts: bool = False) -> None:
        """host: as in parallel.channel.bind. restarts: whether a service that has failed comes back, so that handles
        need not hear of it: they ask again."""
        self.service = service
        self._restarts = restarts
        self.owner_seen_at = 0.0
        self.owner_left = False
        self.failure: BaseException | None = None
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
        self._news: queue.SimpleQueue[tuple[bytes, _Session, int, _News]] = queue.SimpleQueue()
        # Encodes long texts, one at a time, so that nobody else waits for that.
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quadriga-encode")
        self._encoding = 0  # asks that it has or will have
        self._waker = WakePipe()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="quadriga-port", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends what is left and ends. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        self._encoder.shutdown(cancel_futures=True)
        self._socket.close()
        self._context.term()
        self._waker.close()

    # ---- the port's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whatever it is: who cannot be reached must not pass for sound
            logger.exception("the port has failed")
            self.failure = error

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        next_look = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(200))
            if self._waker.fileno() in ready:
                self._waker.take()
            if self._socket in ready:
                self._take_messages()
            self._take_news()
            self._send_pending()
            if time.monotonic() >= next_look:
                self._drop_silent()
                next_look = time.monotonic() + wire.PING_SECONDS
        self._take_news()
        self._send_pending()
        for peer in list(self._sessions):
            self._drop(peer)

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
            self._ask(peer, session, *items, len(frame))
        elif kind == "abort":
            if items[0] in session.requests:
                self.service.abort(session.requests[items[0]])
            elif items[0] in session.preparing:
                session.preparing.discard(items[0])  # it ends as soon as it is prepared
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

    def _ask(self, peer: bytes, session: _Session, number: int, body: object, size: int) -> None:
        if number in session.requests or number in session.preparing:
            self._send(peer, "refused", number, "invalid", f"number {number} is in use")
            return
        session.preparing.add(number)
        if size <= _LONG_ASK:
            self._prepare(peer, session, number, body)
            self._take_news()
        elif self._encoding >= _MOST_ENCODING:
            self._refuse(peer, session, number, wire.Overloaded(f"{self._encoding} long prompts wait to be encoded"))
        else:
            self._encoding += 1
            self._encoder.submit(self._prepare_aside, peer, session, number, body)

    def _prepare_aside(self, peer: bytes, session: _Session, number: int, body: object) -> None:
        self._prepare(peer, session, number, body)
        self._tell(peer, session, number, None)

    def _prepare(self, peer: bytes, session: _Session, number: int, body: object) -> None:
        tell = functools.partial(self._tell, peer, session, number)
        try:
            self.service.submit(wire.read_ask(body), tell, on_prepared=tell)
        except BaseException as error:  # a panic in a library's Rust is no Exception, and fails this request alone
            if not isinstance(error, Exception):
                error = wire.RequestFailed(f"the request could not be taken: {error!r}")
            if wire.refusal_kind(error) == "failed":
                logger.exception("a request could not be taken")
            tell(error)

    def _accept(self, peer: bytes, session: _Session, number: int, request: Request) -> None:
        session.requests[number] = request.id
        if number not in session.preparing:
            session.unwanted[number] = request.id
        session.preparing.discard(number)
        self._send(peer, "accepted", number, request.tokens[: request.num_prompt])

    def _refuse(self, peer: bytes, session: _Session, number: int, error: Exception) -> None:
        session.preparing.discard(number)
        session.requests.pop(number, None)
        kind = wire.refusal_kind(error)
        if not (kind == "unavailable" and self._restarts and self.service.state == FAILED):
            self._send(peer, "refused", number, kind, str(error)[:_LONGEST_REASON])

    def _answer(self, peer: bytes, number: int, what: str) -> None:
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "stats": self.service.stats,
            "health": self.service.health,
            "model": self.service.about_model,
        }
        if what in answers:
            self._send(peer, "answer", number, answers[what]())
        else:
            self._send(peer, "refused", number, "invalid", f"there is no {what!r} to ask for")

    def _tell(self, peer: bytes, session: _Session, number: int, news: _News) -> None:
        self._news.put((peer, session, number, news))
        self._waker.wake()

    def _take_news(self) -> None:
        while not self._news.empty():
            peer, session, number, news = self._news.get()
            is_current = self._sessions.get(peer) is session  # else the number may be a new request's already
            if news is None:
                self._encoding -= 1
                if number in session.unwanted:  # not before the engine has it
                    self.service.abort(session.unwanted.pop(number))
            elif isinstance(news, Request) and is_current:
                self._accept(peer, session, number, news)
            elif isinstance(news, Request):
                session.unwanted[number] = news.id
            elif is_current and isinstance(news, Update):
                session.pending.setdefault(number, Pile(news)).add(news)
            elif is_current:
                self._refuse(peer, session, number, news)

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
            if error is not None and (isinstance(error, _FINAL) or not self._restarts):
                self._send(peer, "refused", number, wire.refusal_kind(error), str(error))
            if pending.last.finish_reason is not None:
                session.requests.pop(number, None)
        session.pending.clear()

    def _send(self, peer: bytes, kind: str, *items: object) -> None:
        """Sends a frame, or keeps it until the handle has read what it has."""
        frame = wire.encode(kind, *items)
        session = self._sessions.get(peer)
        waits = session is not None and bool(session.unsent)  # nothing overtakes what waits already
        if (waits or not self._send_frame(peer, frame)) and session is not None and kind != "pong":
            session.unsent.append(frame)
            if len(session.unsent) > _FRAMES_AHEAD + len(session.requests):
                logger.warning("a handle asks and asks and reads no answer; it is dropped")
                self._drop(peer)

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


def _packed(number: int, pile: Pile) -> list[Any]:
    update = pile.joined()
    return wire.pack_update(
        *(number, update.text, update.token_ids, update.finish_reason, update.stop_reason, update.cached_tokens),
        *(update.logprobs, update.prompt_logprobs),
    )
