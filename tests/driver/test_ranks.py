"""Bringing ranks up and watching them: who is waited for how long, and whose fault it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayError, RayTaskError

from driver import awake, ranks, ray_executor
from driver.config import ConfigError
from driver.executor import WorkerFailed
from driver.ranks import RankDied, Ranks
from driver.ray_executor import RayExecutor
from parallel.errors import GroupError


class Ref:
    """A call's answer: comes after so many seconds, never without any."""

    def __init__(self, seconds: float | None, outcome: Any = "fine") -> None:
        self.at = None if seconds is None else time.monotonic() + seconds
        self.outcome = outcome

    @property
    def ended(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


class FakeRay:
    """Of ray what waits for answers."""

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert timeout is not None, "a wait without an end"
        deadline = time.monotonic() + timeout
        while sum(ref.ended for ref in refs) < num_returns and time.monotonic() < deadline:
            time.sleep(0.005)
        done = [ref for ref in refs if ref.ended][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs: Ref | list[Ref]) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        assert refs.ended, "a wait without an end"
        if isinstance(refs.outcome, Exception):
            raise refs.outcome
        return refs.outcome


def raised(cause: Exception) -> RayTaskError:
    error = RayTaskError("start", f"Traceback\n{cause!r}", cause)
    error.cause = cause
    return error


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranks, ray_executor):
        monkeypatch.setattr(module, "ray", FakeRay())


@pytest.fixture
def group() -> Ranks:
    found = object.__new__(Ranks)
    found.closing, found._timeout = threading.Event(), 0.5
    return found


MISSED = GroupError("connection closed by peer")


@pytest.mark.parametrize(
    ("outcomes", "kind", "message"),
    [
        ([(0.0, raised(MISSED)), (0.2, ActorDiedError())], RankDied, "rank 1 died while loading"),
        ([(0.2, ObjectLostError("ab", None, "")), (None, "")], RankDied, "rank 0 died while loading"),
        ([(0.0, raised(MISSED)), (0.1, "fine")], WorkerFailed, "rank 0 failed while loading: connection closed"),
        ([(0.0, raised(ConfigError("no such file"))), (0.1, ActorDiedError())], ConfigError, "no such file"),
    ],
)
def test_the_rank_that_is_lost_is_told_and_not_who_missed_it(
    group: Ranks, outcomes: list[tuple[float | None, Any]], kind: type[Exception], message: str
) -> None:
    refs = [Ref(*outcome) for outcome in outcomes]
    with pytest.raises(kind, match=message) as failure:
        group._all(refs, None, "loading")
    assert type(failure.value) is kind


def test_a_wait_with_a_deadline_names_the_rank(group: Ranks) -> None:
    with pytest.raises(WorkerFailed, match=r"starting took longer than 0\.5 s on rank 1"):
        group._all([Ref(0.0), Ref(None)], time.monotonic() + 0.5, "starting")


def test_a_wait_without_a_deadline_ends_when_the_engine_closes(group: Ranks) -> None:
    threading.Timer(0.3, group.closing.set).start()
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="the engine closes"):
        group._all([Ref(None)], None, "loading")
    assert time.monotonic() - began < 2


def actor(answers: Callable[[], Ref]) -> Any:
    return SimpleNamespace(loaded=SimpleNamespace(remote=answers))


def test_a_rank_that_loads_for_long_must_only_answer(group: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ANSWER_SECONDS", 0.05)
    slow = [actor(lambda: Ref(0.0, 0.3)), actor(lambda: Ref(0.02, 0.2))]
    loading, shares = ranks._Loading(slow, 0.2), []
    found = group._all([Ref(1.5, 1), Ref(1.0, 2)], None, "loading", lambda: shares.append(loading.share()))
    assert found == [1, 2]
    assert set(shares) == {0.2}
    stopped = ranks._Loading([slow[0], actor(lambda: Ref(None))], 0.2)
    began = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1 has not answered for 0\.2 s"):
        group._all([Ref(None), Ref(None)], None, "loading", lambda: stopped.share())
    assert time.monotonic() - began < 3


def test_a_driver_that_stood_still_gives_ranks_that_load_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(awake, "LONGEST_GAP", 0.05)
    loading = ranks._Loading([actor(lambda: Ref(None))], 0.2)
    time.sleep(0.5)
    assert loading.share() == 0.0


@pytest.fixture
def executor(group: Ranks, monkeypatch: pytest.MonkeyPatch) -> RayExecutor:
    found = object.__new__(RayExecutor)
    found.ranks, found._failed = group, threading.Event()
    found._channel = SimpleNamespace(wake=lambda: None)
    monkeypatch.setattr(found, "_end_epoch", lambda: None)
    monkeypatch.setattr(found, "_connect", lambda: None)
    monkeypatch.setattr(group, "replace_lost", lambda: [])
    return found


READY = [object()]


@pytest.mark.parametrize("failure", [WorkerFailed("rank 1 failed"), RankDied("rank 1 died")])
def test_a_recovery_tries_again_whatever_failed(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch, failure: WorkerFailed
) -> None:
    outcomes: list[Any] = [failure, failure, READY]

    def bring_up(_: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(executor.ranks, "bring_up", bring_up)
    assert executor.recover() is READY
    outcomes[:] = [failure, failure, READY]
    if isinstance(failure, RankDied):
        assert executor._bring_up(print, (RankDied,)) is READY
    else:
        with pytest.raises(WorkerFailed):  # at the start it would come again
            executor._bring_up(print, (RankDied,))
    outcomes[:] = [failure, READY]
    executor.give_up()
    with pytest.raises(type(failure)):
        executor.recover()
    assert outcomes == [READY]


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([(0.0, "rank 0 waited for rank 1"), (0.3, ActorDiedError())], "rank 1 failed: its process died"),
        ([(0.0, "rank 0 waited for rank 1"), (0.3, raised(ValueError("shape")))], "rank 1 failed: shape"),
        ([(0.0, "rank 0 waited for rank 1"), (None, "")], "rank 0 failed: rank 0 waited for rank 1"),
        ([(None, ""), (0.1, RayError("lost"))], "rank 1 failed: lost"),
    ],
)
def test_an_epoch_ends_with_its_cause(
    executor: RayExecutor, outcomes: list[tuple[float | None, Any]], message: str
) -> None:
    executor._watch([Ref(*outcome) for outcome in outcomes], threading.Event())
    assert executor._failed.is_set()
    with pytest.raises(WorkerFailed, match=message):
        executor._raise_failure()


def test_a_watch_that_fails_is_told(executor: RayExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not connected")

    monkeypatch.setattr(ray_executor.ray, "wait", fail, raising=False)
    executor._watch([Ref(None)], threading.Event())
    with pytest.raises(WorkerFailed, match=r"cannot be watched any more.*not connected"):
        executor._raise_failure()
