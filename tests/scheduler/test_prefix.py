"""The prefix cache: what is shared, what never is, and that it changes no token."""

from __future__ import annotations

import pytest

from scheduler.plan import StepPlan
from scheduler.step import Draft
from tests.scheduler.simulated import SimulatedEngine

PROMPT = list(range(100, 117))  # four full blocks of 4 and one token


def computed(engine: SimulatedEngine) -> int:
    return engine.scheduler.counters.prefill_tokens


def test_a_second_request_starts_from_the_first_ones_blocks() -> None:
    engine = SimulatedEngine(budget=64)
    engine.add(PROMPT, max_tokens=2)
    engine.run()
    second = engine.add(PROMPT, max_tokens=6)
    engine.run()
    engine.check_outputs()
    assert second.cached_tokens == 16
    assert computed(engine) == 17 + 1


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    engine = SimulatedEngine(budget=64)
    for _ in range(2):
        last = engine.add(PROMPT[:16], max_tokens=3)
        engine.run()
    engine.check_outputs()
    assert last.cached_tokens == 12
    assert engine.plans[-3].chunks[0].length == 4


def test_generated_tokens_are_cached_too() -> None:
    engine = SimulatedEngine(budget=64)
    first = engine.add(PROMPT[:3], max_tokens=12)
    engine.run()
    turn = engine.add([*first.tokens, 1, 2], max_tokens=2)
    engine.run()
    engine.check_outputs()
    assert turn.cached_tokens == (len(first.tokens) - 1) // 4 * 4 > 3


def test_requests_that_run_together_share_blocks() -> None:
    engine = SimulatedEngine(budget=64, num_blocks=20)
    engine.add(PROMPT, max_tokens=8)
    engine.plan()
    engine.result()
    others = [engine.add(PROMPT, max_tokens=8) for _ in range(3)]
    engine.run()
    engine.check_outputs()
    assert [request.cached_tokens for request in others] == [16] * 3
    assert engine.scheduler.counters.preemptions == 0  # 4 x 6 blocks would not fit


@pytest.mark.parametrize(("salts", "cached"), [(("a", "a"), 16), (("a", "b"), 0), ((None, "a"), 0), ((None, ""), 0)])
def test_different_salts_share_nothing(salts: tuple[str | None, str | None], cached: int) -> None:
    engine = SimulatedEngine(budget=64)
    for salt in salts:
        last = engine.add(PROMPT, max_tokens=1, salt=salt)
        engine.run()
    assert last.cached_tokens == cached


def test_blocks_that_are_not_computed_yet_are_not_shared() -> None:
    engine = SimulatedEngine(budget=64, depth=2)
    engine.add(PROMPT, max_tokens=4)
    engine.plan()
    second = engine.add(PROMPT, max_tokens=4)
    engine.plan()  # the first one's step is still in flight
    assert second.cached_tokens == 0
    engine.run()
    engine.check_outputs()


def test_an_aborted_prompt_leaves_only_what_was_computed() -> None:
    for steps in range(1, 5):
        engine = SimulatedEngine(budget=5, depth=0)
        request = engine.add(PROMPT, max_tokens=4)
        for _ in range(steps):
            engine.plan()
            engine.result()
        engine.scheduler.finish(request, "abort")
        again = engine.add(PROMPT, max_tokens=4)
        engine.run()
        engine.check_outputs()
        assert again.cached_tokens == min(5 * steps, 17) // 4 * 4


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = SimulatedEngine(budget=32, num_blocks=12)
    for start in range(3):
        engine.add(list(range(50 * start, 50 * start + 10)), max_tokens=16)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.counters.cached_tokens > 0


def test_many_requests_over_few_prefixes_in_a_small_pool() -> None:
    engine = SimulatedEngine(budget=16, num_blocks=24, depth=2)
    for number in range(30):
        engine.add([number % 3] * 12 + [number], max_tokens=7)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.counters.cached_tokens > 100


def test_it_can_be_turned_off() -> None:
    engine = SimulatedEngine(budget=64, prefix_caching=False)
    for _ in range(2):
        engine.add(PROMPT, max_tokens=2)
        engine.run()
    assert computed(engine) == 34


def test_a_step_of_an_earlier_run_publishes_nothing_for_the_next() -> None:
    """A prompt is preempted while a chunk of it is in flight and starts anew before that chunk's result is in."""
    engine = SimulatedEngine(budget=8, depth=3)
    request = engine.add(PROMPT, max_tokens=2)
    engine.plan()
    scheduler = engine.scheduler
    scheduler._preempt(Draft(StepPlan(0, 1), 8), request)
    engine.plan()
    assert [plan.chunks[0].start for plan in engine.plans] == [0, 0]
    engine.result()
    assert request.published == 0
    engine.run()
    engine.check_outputs()
