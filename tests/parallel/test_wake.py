"""A thread that waits is woken whatever order things happen in."""

from __future__ import annotations

import queue
import select
import threading

from parallel.wake import WakePipe


def is_readable(pipe: WakePipe) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


def test_wake_ups_that_fall_together_are_one() -> None:
    pipe = WakePipe()
    assert not is_readable(pipe)
    for _ in range(100_000):  # more than a pipe holds
        pipe.wake()
    assert is_readable(pipe)
    pipe.take()
    assert not is_readable(pipe)
    pipe.wake()
    assert is_readable(pipe)
    pipe.close()


def test_nothing_that_is_handed_over_is_missed() -> None:
    pipe, items = WakePipe(), queue.SimpleQueue()
    count, threads = 20_000, 4

    def give() -> None:
        for item in range(count):
            items.put(item)
            pipe.wake()

    givers = [threading.Thread(target=give) for _ in range(threads)]
    for giver in givers:
        giver.start()
    taken = 0
    while taken < count * threads:
        assert select.select([pipe], [], [], 10)[0], f"asleep with {items.qsize()} items waiting"
        pipe.take()
        while not items.empty():
            items.get()
            taken += 1
    for giver in givers:
        giver.join()
    pipe.close()


def test_it_may_be_woken_and_closed_after_close() -> None:
    pipe = WakePipe()
    pipe.close()
    pipe.wake()
    pipe.close()
