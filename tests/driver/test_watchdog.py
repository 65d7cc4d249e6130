"""How long a step may take, and what is written down when it takes longer."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from driver.watchdog import Watchdog
from scheduler.frame import encode_plan
from scheduler.plan import StepPlan
from scheduler.step import StepInFlight
from scheduler.step_time import StepCosts, StepTimeModel, StepWork

WATCHDOG = Watchdog(floor_seconds=10, most_seconds=600)
COSTS = StepCosts(0.01, 0.001, 0.0, 0.0, 0.0)


def step(predicted: float | None, tokens: int = 8) -> StepInFlight:
    return StepInFlight(7, [], [], [], StepWork(tokens, 1, 0, tokens), predicted, 0)


def model(most_tokens: int = 1000) -> StepTimeModel:
    model = StepTimeModel(COSTS)
    model.most_tokens = most_tokens
    return model


@pytest.mark.parametrize(
    ("predicted", "tokens", "bound"),
    [
        (0.01, 8, 10),  # the floor
        (2.0, 8, 40),  # twenty times
        (100.0, 8, 600),  # never more than this
        (0.5, 2000, 10),  # as large as any before
        (0.5, 5000, 110),  # far larger: as if each token took a step of its own, twice over
    ],
)
def test_bounds(predicted: float, tokens: int, bound: float) -> None:
    assert WATCHDOG.bound(step(predicted, tokens), model()) == pytest.approx(bound)


@pytest.mark.parametrize(("waited", "bound"), [(0, 10), (9.9, 10), (10, 20), (595, 600), (700, 600)])
def test_while_nothing_is_known_it_looks_again_and_again(waited: float, bound: float) -> None:
    assert WATCHDOG.bound(step(None), StepTimeModel(), waited) == bound


def test_a_rank_that_answers_may_be_slow_until_steps_are_known() -> None:
    answers, silent = (SimpleNamespace(stacks=lambda texts=texts: texts) for texts in (["a", "b"], ["a", None]))
    assert not WATCHDOG.hangs(step(None), 10, answers)
    assert WATCHDOG.hangs(step(None), 10, silent)
    assert WATCHDOG.hangs(step(None), 600, answers)
    assert WATCHDOG.hangs(step(0.5), 10, answers)


def test_the_report_has_plan_and_stacks() -> None:
    executor = SimpleNamespace(stacks=lambda: ["in all_reduce", None])
    path = WATCHDOG.report(step(0.5), encode_plan(StepPlan(3, 7)), executor)
    try:
        with open(path) as file:
            text = file.read()
        assert os.stat(path).st_mode & 0o077 == 0, "others can read prompts in it"
    finally:
        os.unlink(path)
    for part in (
        "step 7 hangs",
        "epoch=3",
        "rank 0\n\nin all_reduce",
        "rank 1\n\nit does not answer",
        "test_watchdog.py",
    ):
        assert part in text
