"""A handle's connection to a service: one thread that sends, receives, and finds the service again when it is lost.

Whatever broke (the driver restarted, the network failed, this process was stopped for a while), one thing is done:
say hello again and ask again for what is not finished, with the tokens that are here already. Sampling depends on
seed and position alone, so the stream goes on with the very next token.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from driver import wire
from driver.engine import Update
from driver.wire import Ask, RequestFailed, ServiceUnavailable
from parallel.channel import ChannelAddress, connect
from parallel.wake import WakePipe
from scheduler.params import InvalidRequest

logger = logging.getLogger("quadriga.link")

MAX_OUTSTANDING = 256
MOST_LOSSES = 5  # of drivers that had a request and gave no token for it
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 2.0


@dataclass(slots=True, eq=False)
class Call:
    """A request of this handle. sink: gets its updates from the link's thread.

    wait: ask again when the service is overloaded, rather than fail with Overloaded. aborted: not to be asked again.
    losses: drivers that ended while they had it, since its last token.
    """

    number: int
    ask: Ask
    sink: Callable[[Update], None]
    wait: bool = True
    prompt_token_ids: list[int] = field(default_factory=list)
    aborted: bool = False
    losses: int = 0

    def take(self, update: Update) -> None:
        self.losses = 0 if update.token_ids else self.losses
        self.ask.produced.extend(update.token_ids)
        params = self.ask.params
        if update.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # asked again, it need not tell them again
        self.ask = replace(self.ask, params=params, seen=self.ask.seen + len(update.text))
        self.sink(update)

    def end_aborted(self) -> None:
        self.take(Update(str(self.number), "", [], "abort", time.perf_counter()))

    def fail(self, error: Exception) -> None:
        self.sink(Update(str(self.number), "", [], "error", time.perf_counter(), error=error))


class Link:
    """Carries calls to the service that `locate` finds.

    locate: gives the service's address, or raises ServiceUnavailable; asked again after every loss.
    reconnect_seconds: how long a lost service is looked for before all calls fail. owner: whether the service is to
    end when this handle does. max_outstanding: requests that it has with the service at once; more wait here.
    """

    def __init__(
        self,
        locate: Callable[[], ChannelAddress],
        reconnect_seconds: float,
        owner: bool = False,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        self._max_outstanding = max_outstanding
        self._locate = locate
        self._reconnect_seconds = reconnect_seconds
        self._owner = owner
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None  # tells of a lost connection before silence does
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[tuple[int, Call]] = []  # a heap: who asked first is sent first
        self._active: dict[int, Call] = {}
        self._queries: dict[int, tuple[str, Future[dict[str, Any]]]] = {}
        self._welcomed = False
        self._heard_at = self._pinged_at = self._lost_at = time.monotonic()
        self._trouble: Exception = ServiceUnavailable("the service has not answered yet")
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self.reconnections = -1  # the first connection is none
        self.restarts = 0
        self._started_at: float | None = None  # of the driver, as it says itself
        self._waker = WakePipe()
        self._closing = False
        # Commands come in before the thread's last look or not at all. Reentrant, as a dropped stream that the
        # garbage collector closes while this thread is inside puts in one more.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="quadriga-link", daemon=True)
        self._thread.start()

    # ---- for any thread

    def submit(self, ask: Ask, sink: Callable[[Update], None], wait: bool = True) -> Call:
        """Starts a call. A request without a seed gets one, so that it can go on after a break."""
        if ask.params.seed is None:
            ask = replace(ask, params=replace(ask.params, seed=secrets.randbits(63)))
        call = Call(next(self._numbers), ask, sink, wait)
        self._do(lambda: self._queue(call))
        return call

    def abort(self, number: int) -> None:
        self._do(lambda: self._abort(number))

    def query(self, what: str) -> Future[dict[str, Any]]:
        """Asks for `stats`, `health` or `model`."""
        future: Future[dict[str, Any]] = Future()
        self._do(lambda: self._ask_for(what, future))
        return future

    @property
    def connected(self) -> bool:
        return self._welcomed

    def close(self) -> None:
        """Says goodbye; calls that are not finished fail. May be called twice."""
        with self._lock:
            self._closing = True
            self._waker.wake()
        self._thread.join(timeout=10)

    def _do(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise ServiceUnavailable("this client is closed")
            self._inbox.put(command)
            self._waker.wake()

    # ---- the link's thread

    def _run(self) -> None:
        reason = ServiceUnavailable("this client was closed")
        try:
            while not self._closing:
                if self._socket is None:
                    self._connect()
                self._wait()
                self._take_commands()
                self._receive()
                self._keep_alive()
                self._send_waiting()
        except BaseException as error:  # a fault of ours; callers must not wait for ever because of it
            logger.exception("the connection to the service has failed")
            reason = ServiceUnavailable(f"this client has failed: {error!r}")
        self._end(reason)

    def _take_commands(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
        if self._waker.fileno() in dict(poller.poll(200)):
            self._waker.take()

    def _connect(self) -> None:
        try:
            address = self._locate()
        except ServiceUnavailable as error:
            self._trouble = error
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
        self._trouble = ServiceUnavailable(f"the service is lost: {why}")
        self._disconnect(linger=0)
        if self._welcomed:
            self._welcomed, self._lost_at = False, time.monotonic()

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
                getattr(self, f"_on_{kind}")(*items)
            except wire.WireError as error:
                self._lose(str(error))
                return

    def _on_welcome(self, about: dict[str, Any]) -> None:
        self.reconnections += 1
        self._welcomed = True
        started_at = about.get("started_at")
        restarted = self._started_at not in (None, started_at)
        self.restarts += restarted
        self._started_at = started_at
        active, self._active = self._active, {}
        for call in active.values():
            call.losses += restarted
            if call.losses < MOST_LOSSES:
                self._queue(call)
            else:  # it may be what ends them, so that others fare better without it
                message = f"{call.losses} drivers in a row have ended while they had this request; it is given up"
                call.fail(RequestFailed(message))
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
        for item in updates:
            number, text, token_ids, finish_reason, stop_reason, cached_tokens, *scores = wire.read_update(item)
            call = self._active.get(number)
            if call is not None:
                if finish_reason is not None:
                    del self._active[number]
                about = (str(number), text, token_ids, finish_reason, now, stop_reason, cached_tokens, None)
                call.take(Update(*about, *scores))

    def _on_refused(self, number: int, kind: str, message: str) -> None:
        error = wire.REFUSALS.get(kind, wire.RequestFailed)(message)
        if number in self._queries:
            _settle(self._queries.pop(number)[1], error)
        elif number == 0:
            self._fail_all(error)
        elif number in self._active:
            call = self._active.pop(number)
            # One that was taken before has been promised its end.
            if kind == "overloaded" and (call.wait or call.prompt_token_ids):
                self._queue(call)
                self._retry_at = time.monotonic() + self._retry_seconds * random.uniform(0.5, 1.5)
                self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            else:
                call.fail(error)

    def _on_answer(self, number: int, answer: dict[str, Any]) -> None:
        if number in self._queries:
            _settle(self._queries.pop(number)[1], answer)

    def _on_pong(self) -> None:
        return  # that something came is all it says

    def _on_stranger(self) -> None:
        if self._welcomed:
            logger.warning("the service no longer knows this handle; asking again")
            self._lost_at = time.monotonic()
            self._greet(self._token)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if not self._welcomed and now - self._lost_at > self._reconnect_seconds:
            self._fail_all(self._trouble)
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
            and len(self._active) < self._max_outstanding
            and time.monotonic() >= self._retry_at
        ):
            _, call = heapq.heappop(self._waiting)
            try:
                frame = wire.encode("ask", call.number, wire.ask_body(call.ask))
            except (TypeError, ValueError, OverflowError) as error:
                call.fail(InvalidRequest(f"the request cannot be sent: {error}"))
                continue
            if len(frame) > wire.MAX_MESSAGE_BYTES:
                call.fail(InvalidRequest(f"the request has {len(frame)} bytes, more than {wire.MAX_MESSAGE_BYTES}"))
                continue
            self._active[call.number] = call
            self._socket.send(frame)

    def _ask_for(self, what: str, future: Future[dict[str, Any]]) -> None:
        number = next(self._numbers)
        self._queries[number] = (what, future)
        if self._welcomed:
            self._send("query", number, what)

    def _queue(self, call: Call) -> None:
        """To be sent, or sent again, in its turn."""
        if call.aborted:
            call.end_aborted()
        else:
            heapq.heappush(self._waiting, (call.number, call))

    def _abort(self, number: int) -> None:
        call = self._active.get(number)
        if call is not None and self._welcomed:
            call.aborted = True
            self._send("abort", number)
        elif call is not None:  # the service is lost, and will not be asked again
            del self._active[number]
            call.end_aborted()
        else:
            found = [entry for entry in self._waiting if entry[0] == number]
            for entry in found:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                entry[1].end_aborted()

    def _send(self, kind: str, *items: object) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(kind, *items))

    def _fail_all(self, error: Exception) -> None:
        calls = [*self._active.values(), *(call for _, call in sorted(self._waiting))]
        self._active.clear()
        self._waiting.clear()
        queries, self._queries = self._queries, {}
        for call in calls:
            call.fail(error)
        for _, future in queries.values():
            _settle(future, error)

    def _end(self, reason: Exception) -> None:
        with self._lock:
            self._closing = True  # no command comes behind this
        try:
            self._take_commands()
            self._send("bye")
        except BaseException:  # what has ended this thread may come again
            logger.exception("this client could not say goodbye")
        self._fail_all(reason)
        self._disconnect()
        self._context.term()
        self._waker.close()


def _settle(future: Future[dict[str, Any]], result: dict[str, Any] | Exception) -> None:
    """Ends a query, unless whoever asked has given it up."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
