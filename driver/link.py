"""A handle's connection to a service: one thread that sends, receives, and finds the service again when it is lost.

Whatever broke (the driver restarted, the network failed, this process was stopped for a while), one thing is done:
say hello again and ask again for what is not finished, with the tokens that are here already. Sampling depends on
seed and position alone, so the stream goes on with the very next token.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from driver import wire
from driver.engine import Update
from driver.wire import Ask, ServiceUnavailable
from parallel.channel import ChannelAddress, connect

logger = logging.getLogger("quadriga.link")

MAX_OUTSTANDING = 256  # requests that a handle has with the service at once; others wait in the handle
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 2.0


@dataclass(slots=True, eq=False)
class Call:
    """A request of this handle. sink: gets its updates from the link's thread.

    wait: ask again when the service is overloaded, rather than fail with Overloaded.
    """

    number: int
    ask: Ask
    sink: Callable[[Update], None]
    wait: bool = True
    prompt_token_ids: list[int] = field(default_factory=list)

    def take(self, update: Update) -> None:
        self.ask.produced.extend(update.token_ids)
        self.ask = replace(self.ask, seen=self.ask.seen + len(update.text))
        self.sink(update)

    def fail(self, error: Exception) -> None:
        self.sink(Update(str(self.number), "", [], "error", time.perf_counter(), error=error))


class Link:
    """Carries calls to the service that `locate` finds.

    locate: gives the service's address, or raises ServiceUnavailable; asked again after every loss.
    reconnect_seconds: how long a lost service is looked for before all calls fail. owner: whether the service is to
    end when this handle does.
    """

    def __init__(self, locate: Callable[[], ChannelAddress], reconnect_seconds: float, owner: bool = False) -> None:
        self._locate = locate
        self._reconnect_seconds = reconnect_seconds
        self._owner = owner
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None  # tells of a lost connection before silence does
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Call] = deque()
        self._active: dict[int, Call] = {}
        self._queries: dict[int, tuple[str, Future[dict[str, Any]]]] = {}
        self._welcomed = False
        self._heard_at = self._pinged_at = self._lost_at = time.monotonic()
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self.about: dict[str, Any] = {}
        self.reconnections = -1  # the first connection is none
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="quadriga-link", daemon=True)
        self._thread.start()

    # ---- for any thread

    def submit(self, ask: Ask, sink: Callable[[Update], None], wait: bool = True) -> Call:
        """Starts a call. A request without a seed gets one, so that it can go on after a break."""
        if ask.params.seed is None:
            ask = replace(ask, params=replace(ask.params, seed=secrets.randbits(63)))
        call = Call(next(self._numbers), ask, sink, wait)
        self._do(lambda: self._waiting.append(call))
        return call

    def abort(self, number: int) -> None:
        self._do(lambda: self._abort(number))

    def query(self, what: str) -> Future[dict[str, Any]]:
        """Asks for `stats` or `health`."""
        future: Future[dict[str, Any]] = Future()
        self._do(lambda: self._ask_for(what, future))
        return future

    @property
    def connected(self) -> bool:
        return self._welcomed

    def close(self) -> None:
        """Says goodbye; calls that are not finished fail. May be called twice."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join(timeout=10)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _do(self, command: Callable[[], None]) -> None:
        if self._closing:
            raise ServiceUnavailable("this client is closed")
        self._inbox.put(command)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # full of wake-ups

    # ---- the link's thread

    def _run(self) -> None:
        while not self._closing:
            if self._socket is None:
                self._connect()
            self._wait()
            while not self._inbox.empty():
                self._inbox.get()()
            self._receive()
            self._keep_alive()
            self._send_waiting()
        self._end()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
        if self._wake_read in dict(poller.poll(200)):
            os.read(self._wake_read, 4096)

    def _connect(self) -> None:
        try:
            address = self._locate()
        except ServiceUnavailable as error:
            if time.monotonic() - self._lost_at > self._reconnect_seconds:
                self._fail_all(error)
            return
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 1000),
            (zmq.HEARTBEAT_IVL, int(wire.PING_SECONDS * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(wire.SILENCE_SECONDS * 1000)),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(self._socket, address)
        self._heard_at = time.monotonic()
        self._greet(address.token)

    def _greet(self, token: bytes) -> None:
        self._token, self._welcomed = token, False
        self._send("hello", token, wire.VERSION, self._owner)

    def _lose(self, why: str) -> None:
        """Gives the connection up; `_connect` makes another."""
        logger.warning("the service is lost (%s); looking for it", why)
        self._disconnect(linger=0)
        self._welcomed = False
        self._lost_at = time.monotonic()

    def _disconnect(self, linger: int | None = None) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close()  # ending the context would wait for it for ever
            self._socket.close(linger)
            self._socket = None

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            try:
                kind, items = wire.decode(frame, wire.FROM_DRIVER)
            except wire.WireError as error:
                self._lose(str(error))
                return
            getattr(self, f"_on_{kind}")(*items)

    def _on_welcome(self, about: dict[str, Any]) -> None:
        self.about = about
        self.reconnections += 1
        self._welcomed = True
        self._waiting.extendleft(reversed(self._active.values()))
        self._active.clear()
        for number, (what, _) in self._queries.items():
            self._send("query", number, what)

    def _on_accepted(self, number: int, prompt_token_ids: list[int]) -> None:
        self._retry_seconds = FIRST_RETRY_SECONDS
        call = self._active.get(number)
        if call is not None:
            call.prompt_token_ids = prompt_token_ids
            # Asked again, it begins with the same ids, whatever becomes of tokenizer or template.
            call.ask = replace(call.ask, prompt=prompt_token_ids)

    def _on_updates(self, updates: list[Any]) -> None:
        now = time.perf_counter()
        for number, text, token_ids, finish_reason, stop_reason, cached_tokens in updates:
            call = self._active.get(number)
            if call is not None:
                if finish_reason is not None:
                    del self._active[number]
                call.take(Update(str(number), text, token_ids, finish_reason, now, stop_reason, cached_tokens))

    def _on_refused(self, number: int, kind: str, message: str) -> None:
        error = wire.REFUSALS.get(kind, wire.RequestFailed)(message)
        if number in self._queries:
            self._queries.pop(number)[1].set_exception(error)
        elif number == 0:
            self._fail_all(error)
        elif number in self._active:
            call = self._active.pop(number)
            if kind == "overloaded" and call.wait:
                self._waiting.appendleft(call)
                self._retry_at = time.monotonic() + self._retry_seconds * random.uniform(0.5, 1.5)
                self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            else:
                call.fail(error)

    def _on_answer(self, number: int, answer: dict[str, Any]) -> None:
        if number in self._queries:
            self._queries.pop(number)[1].set_result(answer)

    def _on_pong(self) -> None:
        return  # that something came is all it says

    def _on_stranger(self) -> None:
        if self._welcomed:
            logger.warning("the service no longer knows this handle; asking again")
            self._greet(self._token)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._socket is None:
            return
        if self._monitor.poll(0):
            self._lose("the connection broke")
        elif now - self._heard_at > wire.SILENCE_SECONDS:
            self._lose(f"nothing heard for {wire.SILENCE_SECONDS:g} s")
        elif now - self._pinged_at > wire.PING_SECONDS:
            self._pinged_at = now
            self._send("ping")

    def _send_waiting(self) -> None:
        while (
            self._welcomed
            and self._waiting
            and len(self._active) < MAX_OUTSTANDING
            and time.monotonic() >= self._retry_at
        ):
            call = self._waiting.popleft()
            self._active[call.number] = call
            self._send("ask", call.number, wire.ask_body(call.ask))

    def _ask_for(self, what: str, future: Future[dict[str, Any]]) -> None:
        number = next(self._numbers)
        self._queries[number] = (what, future)
        if self._welcomed:
            self._send("query", number, what)

    def _abort(self, number: int) -> None:
        if number in self._active:
            self._send("abort", number)
            return
        for call in self._waiting:
            if call.number == number:
                self._waiting.remove(call)
                call.take(Update(str(number), "", [], "abort", time.perf_counter()))
                return

    def _send(self, kind: str, *items: object) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(kind, *items))

    def _fail_all(self, error: Exception) -> None:
        calls = [*self._active.values(), *self._waiting]
        self._active.clear()
        self._waiting.clear()
        queries, self._queries = self._queries, {}
        for call in calls:
            call.fail(error)
        for _, future in queries.values():
            future.set_exception(error)

    def _end(self) -> None:
        self._send("bye")
        self._fail_all(ServiceUnavailable("this client was closed"))
        self._disconnect()
        self._context.term()
