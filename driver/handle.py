"""The client handle: a running service in any process of the cluster, used like a local model.

client = Client.connect(name="llm")
print(client.generate("The sea is", SamplingParams(max_tokens=20)).text)
async for piece in client.astream("Once upon a time"): ...
"""

from __future__ import annotations

import asyncio
import functools
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from tqdm import tqdm

from driver.engine import Update
from driver.intake import paired
from driver.link import Call, Link
from driver.results import Completion, Increment, Prompt
from driver.wire import Ask, ServiceUnavailable
from parallel.channel import ChannelAddress
from scheduler.params import InvalidRequest, SamplingParams

ANSWER_SECONDS = 10.0
Messages = Sequence[dict[str, Any]]


class ClientStream:
    """An iterator over the increments of one request. Closing it early, or dropping it, aborts the request."""

    def __init__(self, link: Link, ask: Ask, wait: bool) -> None:
        self._link, self._ended = link, False
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._call = link.submit(ask, self._updates.put, wait)

    @property
    def request_id(self) -> int:
        """For Client.abort."""
        return self._call.number

    def __iter__(self) -> ClientStream:
        return self

    def __next__(self) -> Increment:
        if self._ended:
            raise StopIteration
        update = self._updates.get()
        self._ended = update.finish_reason is not None
        return _increment(update)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            _abort_quietly(self._link, self._call)

    def __del__(self) -> None:
        self.close()


class Client:
    """A handle on a service. Use `connect`; a context manager; its methods may be called from several threads.

    Requests that the service has no room for wait here and there within bounds; with `wait=False` they fail with
    Overloaded instead. When the driver restarts, unfinished requests are asked again with the tokens they have, and
    their streams go on with the next token.
    """

    def __init__(
        self, locate: Callable[[], ChannelAddress], reconnect_seconds: float = 120.0, owner: bool = False
    ) -> None:
        """locate, reconnect_seconds, owner: as in driver.link.Link."""
        self._link = Link(locate, reconnect_seconds, owner)

    @classmethod
    def connect(cls, name: str = "llm", address: str = "auto", reconnect_seconds: float = 120.0) -> Client:
        """A handle on the service `name` of a Ray cluster.

        address: the cluster's, or `auto` for the one this process or machine belongs to. reconnect_seconds: how long
        calls wait for a driver that is restarting. Raises ServiceUnavailable when there is no such service.
        """
        from driver.service_actor import Locator  # importing ray takes most of a second

        return cls(Locator(name, address), reconnect_seconds)

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        wait: bool = True,
    ) -> Completion | list[Completion]:
        """As LLM.generate: one prompt gives one Completion and raises its error, a list gives a list."""
        prompts, params, single = paired(prompts, params)
        return self._collect(list(map(_ask, prompts, params)), single, wait, use_tqdm)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        wait: bool = True,
    ) -> Completion | list[Completion]:
        """`generate` for asyncio; cancelling it aborts the requests."""
        prompts, params, single = paired(prompts, params)
        return await self._acollect(list(map(_ask, prompts, params)), single, wait)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, wait: bool = True) -> ClientStream:
        """Iterates over a completion piece by piece. The first piece raises what is wrong with the request."""
        return ClientStream(self._link, _ask(prompt, params), wait)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, wait: bool = True
    ) -> AsyncIterator[Increment]:
        """`stream` for asyncio; leaving the loop early aborts the request."""
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        call = self._link.submit(_ask(prompt, params), lambda update: _post(loop, updates, update), wait)
        ended = False
        try:
            while not ended:
                update = await updates.get()
                ended = update.finish_reason is not None
                yield _increment(update)
        finally:
            if not ended:
                _abort_quietly(self._link, call)

    def chat(self, messages: Messages, params: SamplingParams | None = None, wait: bool = True) -> Completion:
        """Completes a conversation of {"role", "content"} messages, laid out by the model's chat template."""
        return self._collect([_ask(_conversation(messages), params)], True, wait)

    async def achat(self, messages: Messages, params: SamplingParams | None = None, wait: bool = True) -> Completion:
        """`chat` for asyncio."""
        return await self._acollect([_ask(_conversation(messages), params)], True, wait)

    def abort(self, request_id: int) -> None:
        """Ends a stream's request with finish reason "abort"; one that has ended already is left alone."""
        self._link.abort(request_id)

    # ---- the service

    def stats(self) -> dict[str, Any]:
        """Totals since the service's start and its present load. Raises ServiceUnavailable."""
        return _answer(self._link.query("stats"))

    def health(self) -> dict[str, Any]:
        """The service's state and load. Raises ServiceUnavailable when it does not answer."""
        return _answer(self._link.query("health"))

    async def astats(self) -> dict[str, Any]:
        return await _aanswer(self._link.query("stats"))

    async def ahealth(self) -> dict[str, Any]:
        return await _aanswer(self._link.query("health"))

    @property
    def connected(self) -> bool:
        """Whether the service answers at present."""
        return self._link.connected

    @property
    def reconnections(self) -> int:
        """How often the service was lost and found again."""
        return max(0, self._link.reconnections)

    def close(self) -> None:
        """Aborts what is not finished. May be called twice."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- pieces

    def _collect(
        self, asks: list[Ask], single: bool, wait: bool, use_tqdm: bool = False
    ) -> Completion | list[Completion]:
        updates: queue.SimpleQueue[tuple[int, Update]] = queue.SimpleQueue()
        calls, completions = self._submit(asks, lambda at, update: updates.put((at, update)), wait)
        left = len(calls)
        try:
            with tqdm(total=left, unit="request", disable=not use_tqdm or left < 2) as bar:
                while left:
                    at, update = updates.get()
                    completions[at].take(update)
                    if update.finish_reason is not None:
                        left -= 1
                        bar.update()
        finally:
            if left:  # an interrupt, say: nobody will read these any more
                self._give_up(calls)
        return _results(calls, completions, single)

    async def _acollect(self, asks: list[Ask], single: bool, wait: bool) -> Completion | list[Completion]:
        updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        calls, completions = self._submit(asks, lambda at, update: _post(loop, updates, (at, update)), wait)
        left = len(calls)
        try:
            while left:
                at, update = await updates.get()
                completions[at].take(update)
                left -= update.finish_reason is not None
        finally:
            if left:
                self._give_up(calls)
        return _results(calls, completions, single)

    def _submit(
        self, asks: list[Ask], put: Callable[[int, Update], None], wait: bool
    ) -> tuple[list[Call], list[Completion]]:
        calls, completions = [], []
        for at, ask in enumerate(asks):
            prompt = ask.prompt if isinstance(ask.prompt, str) else None
            completions.append(Completion(prompt, submitted=time.perf_counter()))
            calls.append(self._link.submit(ask, functools.partial(put, at), wait))
        return calls, completions

    def _give_up(self, calls: Sequence[Call]) -> None:
        for call in calls:
            _abort_quietly(self._link, call)


def _ask(prompt: Any, params: SamplingParams | None) -> Ask:
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
    return Ask(prompt if isinstance(prompt, str) else list(prompt), params)


def _conversation(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or not messages or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequest(f"messages must be a list of mappings with role and content, got {messages!r}")
    return list(messages)


def _increment(update: Update) -> Increment:
    if update.error is not None:
        raise update.error
    return Increment(update.text, update.token_ids, update.finish_reason, update.stop_reason)


def _results(calls: Sequence[Call], completions: list[Completion], single: bool) -> Completion | list[Completion]:
    for call, completion in zip(calls, completions, strict=True):
        completion.prompt_token_ids = call.prompt_token_ids
        error = completion.error
        if error is not None and (single or not isinstance(error, InvalidRequest)):
            raise error
    return completions[0] if single else completions


def _post(loop: asyncio.AbstractEventLoop, updates: asyncio.Queue, item: Any) -> None:
    try:
        loop.call_soon_threadsafe(updates.put_nowait, item)
    except RuntimeError:
        return  # the loop is closed: nobody reads any more


def _abort_quietly(link: Link, call: Call) -> None:
    try:
        link.abort(call.number)
    except ServiceUnavailable:
        return  # the client is closed, and its requests are aborted with it


def _answer(future: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return future.result(ANSWER_SECONDS)
    except FutureTimeout:
        raise ServiceUnavailable(f"the service has not answered within {ANSWER_SECONDS:g} s") from None


async def _aanswer(future: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
    except asyncio.TimeoutError:
        raise ServiceUnavailable(f"the service has not answered within {ANSWER_SECONDS:g} s") from None
