"""When an owner is taken for gone."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from driver import awake, owner
from driver.owner import DISTANT_SECONDS, OWNER_SECONDS, OwnerProcess, OwnerWatch, this_machine


class Clock:
    """Goes on in steps of a fifth of a second, or jumps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def identity(process: subprocess.Popen, machine: str | None = None) -> OwnerProcess:
    return OwnerProcess(machine or this_machine(), process.pid, owner.psutil.Process(process.pid).create_time())


def gone_after(watch: OwnerWatch, clock: Clock, seconds: float, seen_at: float | None) -> bool:
    """Whether it is taken for gone within so many seconds of looks. seen_at: None for one that goes on to speak."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.2
        if watch.is_gone(clock.now if seen_at is None else seen_at):
            return True
    return False


def test_an_owner_that_speaks_is_there(clock: Clock) -> None:
    assert not gone_after(OwnerWatch(None), clock, 100, None)


def test_a_silent_owner_that_cannot_be_seen_is_gone(clock: Clock, process: subprocess.Popen) -> None:
    for known in (None, identity(process, "there")):
        began = clock.now
        watch = OwnerWatch(known)
        assert not gone_after(watch, clock, DISTANT_SECONDS - 0.5, began)
        assert gone_after(watch, clock, 1, began)


def test_an_owner_that_never_spoke_gets_time_to_connect(clock: Clock) -> None:
    watch = OwnerWatch(None)
    assert not gone_after(watch, clock, DISTANT_SECONDS + 5, 0.0)
    assert gone_after(watch, clock, 10, 0.0)


def test_a_stopped_process_is_there_and_a_dead_one_is_gone(clock: Clock, process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGSTOP)
    watch = OwnerWatch(identity(process))
    assert not gone_after(watch, clock, 60, 1000.0)
    process.kill()
    process.wait()
    assert gone_after(watch, clock, 1, 1000.0)


def test_an_owner_of_this_machine_that_died_is_not_waited_for_long(clock: Clock, process: subprocess.Popen) -> None:
    known, last = identity(process), clock.now
    process.kill()
    process.wait()
    watch = OwnerWatch(known)
    assert not gone_after(watch, clock, OWNER_SECONDS - 0.5, last)
    assert gone_after(watch, clock, 1, last)


def test_a_zombie_and_another_process_of_that_number_are_no_owners(process: subprocess.Popen) -> None:
    known = identity(process)
    assert known.lives()
    assert not dataclasses.replace(known, created=known.created - 1).lives()
    process.kill()
    while owner.psutil.Process(process.pid).status() != owner.psutil.STATUS_ZOMBIE:
        pass
    assert not known.lives()


def test_who_was_stopped_itself_first_reads_what_came_meanwhile(clock: Clock) -> None:
    watch = OwnerWatch(None)
    assert not gone_after(watch, clock, 5, None)
    last = clock.now
    clock.now += 30
    assert not gone_after(watch, clock, DISTANT_SECONDS - awake.LONGEST_GAP - 0.5, last)
    assert gone_after(watch, clock, 1, last)
