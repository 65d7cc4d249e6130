"""Updates of several requests on their way from the link's thread into an event loop."""

from __future__ import annotations

import asyncio
import threading

from driver.engine import Update
from driver.pile import Pile


class Mailbox:
    """Takes updates in any thread and gives them out in a loop, those of one request joined to one.

    However many come while the loop is busy, it is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._news: dict[int, Pile] = {}
        self._arrived = asyncio.Event()

    def put(self, at: int, update: Update) -> None:
        """For any thread. at: which request."""
        with self._lock:
            wake = not self._news
            self._news.setdefault(at, Pile(update)).add(update)
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:
                return  # the loop is closed: nobody reads any more

    async def take(self) -> list[tuple[int, Update]]:
        """What has come since the last time, at least one."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                news, self._news = self._news, {}
            if news:  # a late call of `set` may be for what was taken before
                return [(at, pile.joined()) for at, pile in news.items()]
