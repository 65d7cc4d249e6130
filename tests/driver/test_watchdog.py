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


ANSWERING, SILENT = (SimpleNamespace(stacks=lambda texts=texts: texts) for texts in (["a", "b"], ["a", None]))


@pytest.mark.parametrize(
    ("predicted", "tokens", "limit"),
    [
        (None, 8, 600),  # nothing is known of steps yet
        (0.01, 8, 10),  # the floor
        (2.0, 8, 40),  # twenty times
        (100.0, 8, 600),  # never more than this
        (0.5, 2000, 10),  # as large as any before
        (0.5, 5000, 110),  # far larger: as if each token took a step of its own, twice over
    ],
)
def test_a_step_whose_ranks_answer_hangs_at_its_limit(predicted: float | None, tokens: int, limit: float) -> None:
    one = step(predicted, tokens)
    assert not WATCHDOG.hangs(one, model(), limit - 0.1, ANSWERING)
    assert WATCHDOG.hangs(one, model(), limit + 0.1, ANSWERING)


@pytest.mark.parametrize("predicted", [None, 0.01, 30.0])
def test_a_rank_that_does_not_answer_hangs_whatever_the_model_expects(predicted: float | None) -> None:
    assert WATCHDOG.hangs(step(predicted), model(), 10, SILENT)


@pytest.mark.parametrize(
    ("predicted", "waited", "look"),
    [(None, 0, 10), (None, 9.9, 10), (None, 10, 20), (None, 595, 600), (None, 700, 600), (0.01, 0, 10), (2.2, 40, 44)],
)
def test_it_looks_at_every_floor_and_at_the_limit(predicted: float | None, waited: float, look: float) -> None:
    assert WATCHDOG.next_look(step(predicted), model(), waited) == pytest.approx(look)


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
