"""A running LLM as others use it: bounded in what may wait, able to go on with broken-off requests, and to drain."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from driver.engine import EngineDead, Sink, Update
from driver.llm import LLM
from driver.startup import FAILED, READY
from driver.wire import Ask, Overloaded, ServiceUnavailable, ShutDown
from scheduler.request import Request

logger = logging.getLogger("quadriga.service")

DRAINING = "draining"  # beside what StartStatus knows


class Service:
    """Takes requests for a started LLM from several threads.

    max_queued_requests: requests that may wait beside those that run; more are refused with Overloaded.
    """

    def __init__(self, llm: LLM, max_queued_requests: int, model_name: str | None = None) -> None:
        """model_name: what clients call the model, where that is not its name or path."""
        self.llm = llm
        self.model_name = model_name or llm.config.model
        self._most = llm.max_running + max_queued_requests
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._live: set[str] = set()
        self._cut: set[str] = set()  # aborted because the service ends
        self._draining = self._hurried = False
        self._began, self._started_at = time.monotonic(), time.time()

    @property
    def state(self) -> str:
        if self.llm.failure is not None:
            return FAILED
        return DRAINING if self._draining else READY

    def submit(self, ask: Ask, sink: Sink, on_prepared: Callable[[Request], None] = lambda request: None) -> Request:
        """Starts a request; the sink gets its updates, from several threads but one after another.

        on_prepared: told of the request before its first update.

        Raises InvalidRequest, Overloaded or ServiceUnavailable.
        """
        self._check_open()  # before the work of encoding
        prompt = self.llm.encode_chat(ask.prompt) if ask.is_chat else ask.prompt
        request = self.llm.prepare(prompt, ask.params, ask.produced)
        with self._lock:
            self._check_open()
            self._live.add(request.id)
        on_prepared(request)
        try:
            self._start(request, ask, sink)
        except BaseException as error:
            self._forget(request.id)
            if isinstance(error, EngineDead):
                raise ServiceUnavailable(str(error)) from error
            raise
        return request

    def abort(self, request_id: str) -> None:
        self.llm.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Totals since the start, as LLM.stats, and what is going on."""
        return {**self.llm.stats(), **self.health()}

    def health(self) -> dict[str, Any]:
        running, waiting = self.llm.load()
        health = {
            "state": self.state,
            "model": self.model_name,
            "tensor_parallel_size": self.llm.config.tensor_parallel_size,
            "max_model_len": self.llm.model.max_model_len,
            "running": running,
            "waiting": waiting,
            "recovering": self.llm.recovering,
            "started_at": self._started_at,
            "uptime_s": round(time.monotonic() - self._began, 1),
        }
        if self.llm.failure is not None:
            health["error"] = str(self.llm.failure)
        return health

    def about_model(self) -> dict[str, Any]:
        """What a front needs to judge requests and to make token ids of text: limits in tokens, and the tokenizer.

        capacity: requests that may run and wait at once. tokenizer: Tokenizer.parts, or None.
        """
        model = self.llm.model
        return {
            "model": self.model_name,
            "max_model_len": model.max_model_len,
            "kv_tokens": self.llm.kv_tokens,
            "vocab_size": model.arch.vocab_size,
            "capacity": self._most,
            "tokenizer": None if model.tokenizer is None else model.tokenizer.parts(),
        }

    def drain(self, seconds: float) -> int:
        """Refuses new requests and waits for the others; after `seconds` these are aborted. Returns how many were."""
        with self._idle:
            self._draining = True  # no request slips in behind the last look
            self._idle.wait_for(lambda: self._hurried or not self._live, timeout=seconds)
            left = list(self._live)
            self._cut.update(left)
            for request_id in left:
                self.llm.abort(request_id)
            # Their last updates are on the way to the sinks.
            self._idle.wait_for(lambda: not self._live, timeout=5)
        return len(left)

    def hurry(self) -> None:
        """Ends the patience of a `drain`."""
        with self._idle:
            self._hurried = True
            self._idle.notify_all()

    # ---- pieces

    def _check_open(self) -> None:
        if self._draining:
            raise ServiceUnavailable("the service is shutting down")
        if len(self._live) >= self._most:
            raise Overloaded(f"{len(self._live)} requests run or wait, which is the most that may")

    def _start(self, request: Request, ask: Ask, sink: Sink) -> None:
        def watched(update: Update) -> None:
            if update.finish_reason is not None:
                self._forget(request.id)
            if update.finish_reason == "abort" and request.id in self._cut:
                error = ShutDown("the service has shut down before this request was finished")
                update = dataclasses.replace(update, finish_reason="error", error=error)
            sink(update)

        text = self.llm.text_stream(request)
        said, ended = "", None
        for token in ask.produced:
            ended = "stop" if token in request.stop_ids else None
            said += "" if ended else text.push(token)
            if text.stop is not None:
                ended = "stop"
            if ended:
                break
        if ended is None and len(ask.produced) >= request.max_tokens:
            ended = "length"
        if ended is not None:
            # The break came between the last token and the news of the end.
            said += text.finish()
            reason = text.stop if text.stop is not None else (ask.produced[-1] if ended == "stop" else None)
            ended = "stop" if text.stop is not None else ended
            watched(Update(request.id, said[ask.seen :], [], ended, time.perf_counter(), reason))
            return
        if len(said) > ask.seen:
            watched(Update(request.id, said[ask.seen :], [], None, time.perf_counter()))
        self.llm.submit(request, watched, text)

    def _forget(self, request_id: str) -> None:
        with self._idle:
            self._live.discard(request_id)
            self._idle.notify_all()
