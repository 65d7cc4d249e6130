"""Which of several ranks' failures is told when they are brought up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from driver import ranks
from driver.executor import WorkerFailed
from driver.ranks import BLAME_SECONDS, RankDied, Ranks
from parallel.errors import CollectiveError, GroupError


class BadModel(ValueError):
    __module__ = "workers.source"


class Calls:
    """Ray's `wait` and `get` for calls that end at given times: {rank: (seconds, result or error)}."""

    def __init__(self, ends: dict[int, tuple[float, Any]]) -> None:
        self.ends, self.now = ends, 0.0

    def wait(self, refs: list[int], num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        first = min((ref for ref in refs if ref in self.ends), key=lambda ref: self.ends[ref][0], default=None)
        if first is None or (timeout is not None and self.ends[first][0] > self.now + timeout):
            assert timeout is not None, "nothing would ever end"
            self.now += timeout
            return [], refs
        self.now = max(self.now, self.ends[first][0])
        return [first], [ref for ref in refs if ref != first]

    def get(self, refs: int | list[int]) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        result = self.ends[refs][1]
        if isinstance(result, RayActorError):
            raise result
        if isinstance(result, Exception):
            raise RayTaskError("start", "the rank's stack", result)
        return result


def bring_up(monkeypatch: pytest.MonkeyPatch, ends: dict[int, tuple[float, Any]], size: int = 2) -> Calls:
    """Runs `Ranks._all` on such calls."""
    calls = Calls(ends)
    monkeypatch.setattr(ranks, "ray", calls)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: calls.now))
    group = object.__new__(Ranks)
    group.closing = threading.Event()
    calls.result = group._all(list(range(size)), None, "loading the model")
    return calls


UNREACHED = CollectiveError("rank 0 of 2 failed in all_reduce: Connection closed by peer")


def test_a_death_that_shows_late_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankDied, match="rank 1 died while loading the model"):
        bring_up(monkeypatch, {0: (1.0, UNREACHED), 1: (1.5, RayActorError())})


def test_two_that_miss_a_third_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {0: (1.0, UNREACHED), 1: (1.1, UNREACHED), 2: (3.0, RayActorError())}
    with pytest.raises(RankDied, match="rank 2 died"):
        bring_up(monkeypatch, ends, size=3)


def test_another_ranks_complaint_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    for symptom in (UNREACHED, GroupError("rank 0 could not join")):
        with pytest.raises(BadModel, match="no such file"):
            bring_up(monkeypatch, {0: (1.0, symptom), 1: (1.5, BadModel("no such file"))})


def test_who_was_not_reached_by_others_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankDied, match="rank 0 failed while loading the model: rank 0 of 2 failed in all_reduce"):
        bring_up(monkeypatch, {0: (1.0, UNREACHED)})


def test_a_group_that_cannot_be_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerFailed, match="NCCL needs a GPU of its own") as caught:
        bring_up(monkeypatch, {0: (1.0, GroupError("NCCL needs a GPU of its own"))})
    assert not isinstance(caught.value, RankDied)


def test_a_fault_of_the_ranks_own_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {0: (1.0, RuntimeError("broken")), 1: (1.0 + BLAME_SECONDS / 2, RayActorError())}
    with pytest.raises(WorkerFailed, match="rank 0 failed while loading the model: broken"):
        bring_up(monkeypatch, ends)


def test_all_results_come_in_the_ranks_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bring_up(monkeypatch, {0: (2.0, "a"), 1: (1.0, "b")}).result == ["a", "b"]
