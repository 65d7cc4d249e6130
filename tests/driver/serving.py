"""A service on a tiny model in this process, and ways to hold it, to reach it raw, and to watch it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from driver import wire
from driver.engine import Update
from driver.executor import WorkerFailed
from driver.handle import Client
from driver.llm import LLM
from driver.port import Port
from driver.service import Service
from driver.wire import Ask
from parallel.channel import ChannelAddress, connect
from scheduler.params import SamplingParams

NUM_BLOCKS = 96
PROMPT = list(b"The sea is")


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"executor": "inline", "device": "cpu", "num_kv_blocks": NUM_BLOCKS, "block_size": 4}
    return LLM(str(folder), **{**defaults, **options})


def greedy_params(max_tokens: int | None = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def all_free(llm: LLM) -> bool:
    """Whether no request holds anything."""
    pool, scheduler = llm._engine.scheduler.pool, llm._engine.scheduler
    return pool.num_free == pool.num_blocks and not scheduler.running and not scheduler.waiting


def fail_for_good(llm: LLM) -> None:
    """The worker fails, and nothing brings it back."""
    executor = llm._engine.executor

    def recover() -> None:
        raise WorkerFailed("rank 0 cannot be had: the device melted")

    executor.recover = recover
    executor._news.put(RuntimeError("too hot"))


class Place:
    """A service, its port, and clients of it."""

    def __init__(self, llm: LLM, max_queued: int, restarts: bool = False) -> None:
        self.llm = llm
        self.service = Service(llm, max_queued)
        self.port = Port(self.service, None, restarts)
        self.port.start()
        self._closing: list[Callable[[], None]] = []

    def client(self, **options: Any) -> Client:
        client = Client(lambda: self.port.address, **options)
        self._closing.append(client.close)
        return client

    def raw(self, greet: bool = True, **options: int) -> RawHandle:
        raw = RawHandle(self.port.address, **options)
        self._closing.append(raw.close)
        if greet:
            raw.say("hello", self.port.address.token, wire.VERSION, False)
            assert raw.hear()[0] == "welcome"
        return raw

    def close(self) -> None:
        for close in self._closing:
            close()
        self.port.close()


@contextmanager
def open_place(llm: LLM, max_queued: int = 1000, **options: Any) -> Iterator[Place]:
    """Whatever happens at the place, nothing of its requests may be left in the engine."""
    place = Place(llm, max_queued, **options)
    try:
        yield place
    finally:
        place.close()
    assert llm.failure is not None or wait_until(lambda: all_free(llm)), "requests outlive their service"
    assert not place.service._live


class RawHandle:
    """A handle that does what it is told, sensible or not."""

    def __init__(self, address: ChannelAddress, **options: int) -> None:
        """options: of the socket, by name."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        connect(self.socket, address)

    def say(self, kind: str, *items: Any) -> None:
        self.socket.send(wire.encode(kind, *items))

    def ask(self, number: int, prompt: Any, params: SamplingParams | None = None, **fields: Any) -> None:
        self.say("ask", number, wire.ask_body(Ask(prompt, params or greedy_params(), **fields)))

    def hear(self, seconds: float = 10.0) -> tuple[str, list[Any]]:
        assert self.socket.poll(int(seconds * 1000)), "nothing came"
        return wire.decode(self.socket.recv(), wire.FROM_DRIVER)

    def hears_nothing(self, seconds: float = 0.3) -> bool:
        return not self.socket.poll(int(seconds * 1000))

    def end_of(self, number: int) -> tuple[list[int], str, str]:
        """Token ids, text and finish reason of a request, everything else being passed over."""
        tokens, text = [], ""
        while True:
            kind, items = self.hear()
            assert kind != "refused" or items[0] != number, items
            for update in items[0] if kind == "updates" else ():
                if update[0] == number:
                    text, tokens = text + update[1], tokens + update[2]
                    if update[3] is not None:
                        return tokens, text, update[3]

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Brake:
    """Lets an engine publish so many more steps, so that what happens in the middle of a stream happens there."""

    def __init__(self, llm: LLM, steps: int = 0) -> None:
        self._executor = llm._engine.executor
        self._publish = self._executor.publish
        self._left: float = steps
        self._changed = threading.Condition()
        self._executor.publish = self._hold

    def _hold(self, frame: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0)
            self._left -= 1
        self._publish(frame)

    def allow(self, steps: float) -> None:
        with self._changed:
            self._left += steps
            self._changed.notify_all()

    def __enter__(self) -> Brake:
        return self

    def __exit__(self, *_: object) -> None:
        self.allow(float("inf"))
        self._executor.publish = self._publish


class Sink:
    """Takes a request's updates, for those who ask a service directly."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._ended = threading.Event()

    def __call__(self, update: Update) -> None:
        assert not self._ended.is_set(), "news after the end"
        self.updates.append(update)
        if update.finish_reason is not None:
            self._ended.set()

    def wait(self) -> Sink:
        assert self._ended.wait(30), "the request does not end"
        return self

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    @property
    def end(self) -> tuple[str | None, int | str | None]:
        return self.updates[-1].finish_reason, self.updates[-1].stop_reason


def run_ask(service: Service, ask: Ask) -> Sink:
    """Starts it; `wait` for its end."""
    sink = Sink()
    service.submit(ask, sink)
    return sink
