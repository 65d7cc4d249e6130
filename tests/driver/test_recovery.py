"""Who is suspected of ending epochs, who is tried, and who is found guilty."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from driver.recovery import EPOCHS_TO_SUSPECT, Suspects
from scheduler.request import Request
from tests.scheduler.simulated import SimulatedEngine


class Court:
    """An engine whose workers die whenever a step has a guilty request, or when told to."""

    def __init__(self, count: int, guilty: set[int]) -> None:
        self.engine = SimulatedEngine(budget=16, depth=2)
        self.requests = [self.engine.add([10 + index] * 6, max_tokens=5) for index in range(count)]
        self.guilty = {self.requests[index] for index in guilty}
        self.suspects = Suspects(self.engine.scheduler)
        self.convicted: list[Request] = []
        self.losses = 0

    def lose(self) -> None:
        self.losses += 1
        for request in self.suspects.epoch_ended():
            self.convicted.append(request)
            self.engine.scheduler.finish(request, "error")
        self.engine.lose()

    def turn(self) -> None:
        """Plans what can be planned, then carries out the oldest step, or dies of it."""
        self.suspects.review()
        while self.engine.plan() is not None:
            pass
        plan = self.engine.plans[-1] if self.engine.frames else None
        if plan is not None and any(r.last_step >= 0 and r.row >= 0 for r in self.guilty):
            self.lose()
        else:
            self.engine.result()

    def run(self) -> None:
        for _ in range(1000):
            if not self.engine.scheduler.has_work:
                return
            self.turn()
        raise AssertionError("no end")


@given(count=st.integers(1, 7), data=st.data())
@settings(max_examples=100, deadline=None)
def test_just_the_guilty_fail_and_the_others_come_to_their_end(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    court = Court(count, guilty)
    court.run()
    assert set(court.convicted) == court.guilty
    for request in court.requests:
        assert request.finish_reason == ("error" if request in court.guilty else "length")


def test_three_epochs_convict_a_single_request() -> None:
    court = Court(1, {0})
    court.run()
    assert court.losses == EPOCHS_TO_SUSPECT + 1


@given(losses=st.lists(st.integers(1, 6), max_size=30))
@settings(max_examples=100, deadline=None)
def test_losses_between_which_tokens_come_convict_nobody(losses: list[int]) -> None:
    court = Court(3, set())
    for turns in losses:
        before = [len(request.tokens) for request in court.requests]
        for _ in range(turns + 4):
            court.turn()
        if [len(request.tokens) for request in court.requests] != before:
            court.lose()
    court.run()
    assert not court.convicted
    assert {request.finish_reason for request in court.requests} == {"length"}


@pytest.mark.parametrize("guilty", [set(), {1}])
def test_a_suspect_that_is_aborted_keeps_nobody_waiting(guilty: set[int]) -> None:
    court = Court(3, guilty)
    for _ in range(EPOCHS_TO_SUSPECT):
        while court.engine.plan() is not None:
            pass
        court.lose()
    on_trial = court.engine.scheduler.only
    assert on_trial is court.requests[0]
    court.engine.scheduler.finish(on_trial, "abort")
    court.run()
    assert court.engine.scheduler.only is None
    assert [request.finish_reason for request in court.requests[1:]] == ["error" if guilty else "length", "length"]
