"""Updates on their way into an event loop."""

from __future__ import annotations

import asyncio
import threading

from driver.engine import Update
from driver.mailbox import Doorbell, Mailbox
from scheduler.logprobs import TokenLogprobs


def update(token: int, reason: str | None = None, scored: bool = False) -> Update:
    score = [TokenLogprobs(token, -1.0)] if scored else None
    return Update("r", f"{token} ", [token], reason, float(token), cached_tokens=token, logprobs=score)


def test_what_is_not_taken_is_joined_for_each_request() -> None:
    async def run() -> list[tuple[int, Update]]:
        mailbox = Mailbox(Doorbell(asyncio.get_running_loop()))
        for token in range(100):
            mailbox.put(token % 2, update(token, "length" if token > 97 else None, scored=token % 2 == 0))
        return await mailbox.take()

    (_, even), (_, odd) = asyncio.run(run())
    assert even.token_ids == list(range(0, 100, 2))
    assert even.text == "".join(f"{token} " for token in range(0, 100, 2))
    assert (even.finish_reason, even.at, even.cached_tokens) == ("length", 98.0, 98)
    assert [one.token_id for one in even.logprobs] == even.token_ids
    assert odd.logprobs is None


def test_the_prompts_log_probabilities_are_kept() -> None:
    async def run() -> Update:
        mailbox = Mailbox(Doorbell(asyncio.get_running_loop()))
        first = Update("r", "", [], None, 0.0, prompt_logprobs=[None, TokenLogprobs(3, -2.0)])
        mailbox.put(0, first)
        mailbox.put(0, update(1))
        return (await mailbox.take())[0][1]

    assert asyncio.run(run()).prompt_logprobs == [None, TokenLogprobs(3, -2.0)]


def test_nothing_is_lost_between_threads() -> None:
    """While one thread puts and the loop takes as fast as they can."""
    count = 20_000

    async def run() -> list[int]:
        mailbox, taken = Mailbox(Doorbell(asyncio.get_running_loop())), []
        putting = threading.Thread(target=lambda: [mailbox.put(0, update(token)) for token in range(count)])
        putting.start()
        while len(taken) < count:
            for _, one in await asyncio.wait_for(mailbox.take(), 20):
                assert one.token_ids, "an empty update"
                taken += one.token_ids
        putting.join()
        return taken

    assert asyncio.run(run()) == list(range(count))


def test_news_for_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(Doorbell(loop))
    loop.close()
    mailbox.put(0, update(1))


class CountingLoop:
    """Counts how often it is woken, and calls what it was woken for when told to."""

    def __init__(self) -> None:
        self.woken = []

    def call_soon_threadsafe(self, function) -> None:
        self.woken.append(function)

    def is_closed(self) -> bool:
        return False


def test_a_loop_is_woken_once_for_all_that_come_before_it_is_there() -> None:
    loop, called = CountingLoop(), []
    bell = Doorbell(loop)
    for number in range(5):
        bell.ring(lambda number=number: called.append(number))
    assert (len(loop.woken), called) == (1, [])
    loop.woken[0]()
    assert called == list(range(5))
    bell.ring(lambda: called.append(5))
    assert len(loop.woken) == 2
    loop.woken[1]()
    assert called == list(range(6))
