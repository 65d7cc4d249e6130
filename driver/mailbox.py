"""News on their way from the link's thread into an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from driver.engine import Update
from driver.pile import Pile


class Doorbell:
    """Has functions called in a loop, by other threads, in their order.

    Waking a loop is a call to the system; however many functions come before it is there, it is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def ring(self, function: Callable[[], object]) -> None:
        """For any thread. function: must not raise."""
        with self._lock:
            wake = not self._calls
            self._calls.append(function)
        if self._loop.is_closed():  # nobody reads any more
            self._calls.clear()
        elif wake:
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for function in calls:
            function()


class Mailbox:
    """Takes updates in any thread and gives them out in a loop, those of one request joined to one."""

    def __init__(self, bell: Doorbell) -> None:
        """bell: the loop's."""
        self._bell = bell
        self._lock = threading.Lock()
        self._news: dict[int, Pile] = {}
        self._arrived = asyncio.Event()

    def put(self, at: int, update: Update) -> None:
        """For any thread. at: which request."""
        with self._lock:
            wake = not self._news
            self._news.setdefault(at, Pile(update)).add(update)
        if wake:
            self._bell.ring(self._arrived.set)

    async def take(self) -> list[tuple[int, Update]]:
        """What has come since the last time, at least one."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                news, self._news = self._news, {}
            if news:  # a late call of `set` may be for what was taken before
                return [(at, pile.joined()) for at, pile in news.items()]
