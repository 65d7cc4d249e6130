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
from numbers import Integral
from typing import Any
from weakref import WeakValueDictionary

from tqdm import tqdm

from driver.config import ConfigError
from driver.engine import Update
from driver.intake import BYTES, paired
from driver.link import MAX_OUTSTANDING, Call, Link
from driver.mailbox import Doorbell, Mailbox
from driver.results import Completion, Increment, Prompt, Stream
from driver.wire import Ask, ServiceUnavailable
from parallel.channel import ChannelAddress
from scheduler.params import InvalidRequest, SamplingParams

ANSWER_SECONDS = 10.0
Messages = Sequence[dict[str, Any]]


class ClientStream(Stream):
    """A stream of a service. Its `request_id` is for Client.abort."""

    def __init__(self, link: Link, ask: Ask, wait: bool) -> None:
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._call = link.submit(ask, updates.put, wait)
        super().__init__(self._call.number, updates, functools.partial(_abort_quietly, link, self._call))


class Client:
    """A handle on a service. Use `connect`; a context manager; its methods may be called from several threads.

    Requests that the service has no room for wait here and there within bounds; with `wait=False` they fail with
    Overloaded instead. When the driver restarts, unfinished requests are asked again with the tokens they have, and
    their streams go on with the next token.
    """

    def __init__(
        self,
        locate: Callable[[], ChannelAddress],
        reconnect_seconds: float = 120.0,
        owner: bool = False,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        """The parameters are those of driver.link.Link."""
        self._link = Link(locate, reconnect_seconds, owner, max_outstanding)
        self._bells: WeakValueDictionary[asyncio.AbstractEventLoop, Doorbell] = WeakValueDictionary()

    @classmethod
    def connect(cls, name: str = "llm", address: str = "auto", reconnect_seconds: float = 120.0) -> Client:
        """A handle on the service `name` of a Ray cluster.

        address: the cluster's, or `auto` for the one this process or machine belongs to. reconnect_seconds: how long
        calls wait for a driver that is restarting. Raises ServiceUnavailable when there is no such service.
        """
        for what, value in (("name", name), ("address", address)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{what} must be a non-empty string, got {value!r}")
        if address == "local":
            raise ConfigError("address 'local' would start a Ray of its own, where no service is; use 'auto'")
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
        bell = self._bell()

        def put(update: Update) -> None:
            bell.ring(functools.partial(updates.put_nowait, update))

        call = self._link.submit(_ask(prompt, params), put, wait)
        ended = False
        try:
            while not ended:
                update = await updates.get()
                ended = update.finish_reason is not None
                yield Increment.of(update)
        finally:
            if not ended:
                _abort_quietly(self._link, call)

    async def amerge(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], wait: bool = True
    ) -> AsyncIterator[tuple[int, Increment]]:
        """Several streams as one: (which, increment) as they come, to the end of all.

        What comes for a stream while the reader is busy is joined to one increment, so that a slow reader costs no
        more memory than the texts. The first error ends all of it; so does leaving the loop early.
        """
        mailbox = Mailbox(self._bell())
        calls: list[Call] = []
        left = set(range(len(prompts)))
        try:
            for at, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                calls.append(self._link.submit(_ask(prompt, one), functools.partial(mailbox.put, at), wait))
            while left:
                for at, update in await mailbox.take():
                    if update.finish_reason is not None:
                        left.discard(at)
                    yield at, Increment.of(update)
        finally:
            self._give_up([call for at, call in enumerate(calls) if at in left])

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

    def health(self, timeout_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The service's state and load. Raises ServiceUnavailable when it does not answer in time."""
        return _answer(self._link.query("health"), timeout_seconds)

    async def astats(self) -> dict[str, Any]:
        return await _aanswer(self._link.query("stats"))

    async def ahealth(self, timeout_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        return await _aanswer(self._link.query("health"), timeout_seconds)

    async def amodel(self) -> dict[str, Any]:
        """What the service says of its model: see Service.about_model. Raises ServiceUnavailable."""
        return await _aanswer(self._link.query("model"))

    @property
    def restarts(self) -> int:
        """How many other drivers have taken the first one's place so far."""
        return self._link.restarts

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
        calls: list[Call] = []
        completions: list[Completion] = []
        left = len(asks)
        try:
            self._submit(asks, lambda at, update: updates.put((at, update)), wait, calls, completions)
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
        bell = self._bell()

        def put(at: int, update: Update) -> None:
            bell.ring(functools.partial(updates.put_nowait, (at, update)))

        calls: list[Call] = []
        completions: list[Completion] = []
        left = len(asks)
        try:
            self._submit(asks, put, wait, calls, completions)
            while left:
                at, update = await updates.get()
                completions[at].take(update)
                left -= update.finish_reason is not None
        finally:
            if left:
                self._give_up(calls)
        return _results(calls, completions, single)

    def _submit(
        self,
        asks: list[Ask],
        put: Callable[[int, Update], None],
        wait: bool,
        calls: list[Call],
        completions: list[Completion],
    ) -> None:
        """Fills `calls` and `completions`, as far as it comes."""
        for at, ask in enumerate(asks):
            prompt = ask.prompt if isinstance(ask.prompt, str) else None
            completions.append(Completion(prompt, submitted=time.perf_counter()))
            calls.append(self._link.submit(ask, functools.partial(put, at), wait))

    def _bell(self) -> Doorbell:
        """Of the running loop: one for all its requests, whose news come together."""
        loop = asyncio.get_running_loop()
        return self._bells.setdefault(loop, Doorbell(loop))

    def _give_up(self, calls: Sequence[Call]) -> None:
        for call in calls:
            _abort_quietly(self._link, call)


def _ask(prompt: Any, params: SamplingParams | None) -> Ask:
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
    return Ask(_sendable(prompt), params)


def _sendable(prompt: Any) -> Any:
    """Token ids as a list of plain numbers, whatever kind they are of; the service judges everything else."""
    if isinstance(prompt, (str, *BYTES)) or not isinstance(prompt, Sequence):
        return prompt
    return [int(item) if isinstance(item, Integral) and not isinstance(item, bool) else item for item in prompt]


def _conversation(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or not messages or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequest(f"messages must be a list of mappings with role and content, got {messages!r}")
    return list(messages)


def _results(calls: Sequence[Call], completions: list[Completion], single: bool) -> Completion | list[Completion]:
    for call, completion in zip(calls, completions, strict=True):
        completion.prompt_token_ids = call.prompt_token_ids
        error = completion.error
        if error is not None and (single or not isinstance(error, InvalidRequest)):
            raise error
    return completions[0] if single else completions


def _abort_quietly(link: Link, call: Call) -> None:
    try:
        link.abort(call.number)
    except ServiceUnavailable:
        return  # the client is closed, and its requests are aborted with it


def _answer(future: Future[dict[str, Any]], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    try:
        return future.result(seconds)
    except FutureTimeout:
        raise ServiceUnavailable(f"the service has not answered within {seconds:g} s") from None


async def _aanswer(future: Future[dict[str, Any]], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except asyncio.TimeoutError:
        raise ServiceUnavailable(f"the service has not answered within {seconds:g} s") from None
