"""Who is served first, how many long prompts share a step, and what happens without chunked prefill."""

from __future__ import annotations

import pytest

from scheduler.limits import STEPS_PER_PRIORITY, Limits
from scheduler.params import InvalidRequest
from tests.scheduler.simulated import SimulatedEngine


def first_token_steps(engine: SimulatedEngine) -> dict[int, int]:
    """Prompt length -> the step in which its first token is sampled."""
    rows: dict[int, int] = {}
    steps: dict[int, int] = {}
    for plan in engine.plans:
        for admission in plan.admissions:
            rows[admission.row] = len(admission.tokens)
        for chunk in plan.chunks:
            if chunk.sample:
                steps.setdefault(rows[chunk.row], plan.step)
    return steps


def test_first_come_is_first_served_whatever_the_priority() -> None:
    engine = SimulatedEngine(budget=8, max_num_seqs=1)
    for length, priority in ((5, 9), (6, 0), (7, -9)):
        engine.add(list(range(length)), max_tokens=1, priority=priority)
    engine.run()
    assert first_token_steps(engine) == {5: 0, 6: 1, 7: 2}


def test_lower_priority_numbers_are_served_first() -> None:
    engine = SimulatedEngine(budget=8, max_num_seqs=1, policy="priority")
    for length, priority in ((5, 9), (6, 0), (7, -9), (4, 0)):
        engine.add(list(range(length)), max_tokens=1, priority=priority)
    engine.run()
    assert first_token_steps(engine) == {7: 0, 6: 1, 4: 2, 5: 3}


def test_the_shortest_prompt_is_served_first() -> None:
    engine = SimulatedEngine(budget=8, max_num_seqs=1, policy="shortest-prefill", num_blocks=256)
    for length in (40, 6, 20, 3):
        engine.add(list(range(length)), max_tokens=1)
    engine.run()
    assert sorted(first_token_steps(engine), key=first_token_steps(engine).get) == [3, 6, 20, 40]


def test_a_low_priority_is_passed_only_for_a_while() -> None:
    """A stream of urgent requests that would keep the only row for ever lets an old one in after the aging time."""
    engine = SimulatedEngine(budget=4, max_num_seqs=1, policy="priority")
    old = engine.add([1, 2], max_tokens=1, priority=1)
    for _ in range(3 * STEPS_PER_PRIORITY):
        if len(engine.scheduler.waiting) < 3:
            engine.add([3], max_tokens=1, priority=0)
        engine.plan()
        engine.result()
        if old.finish_reason:
            break
    assert STEPS_PER_PRIORITY <= engine.plans[-1].step <= STEPS_PER_PRIORITY + 5


@pytest.mark.parametrize(
    ("limits", "latest"),
    [({}, 21), ({"long_prefill_token_threshold": 8}, 4)],
)
def test_a_threshold_lets_short_prompts_pass_a_long_one(limits: dict, latest: int) -> None:
    engine = SimulatedEngine(budget=16, num_blocks=256, prefix_caching=False, **limits)
    engine.add(list(range(300)), max_tokens=1)
    short = [engine.add(list(range(start, start + 8)), max_tokens=1) for start in range(5)]
    done: dict[str, int] = {}
    while not all(request.finish_reason for request in short):
        engine.plan()
        engine.result()
        for request in short:
            if request.finish_reason:
                done.setdefault(request.id, engine.plans[-1].step)
    assert max(done.values()) == latest
    engine.run()
    engine.check_outputs()
    # Nothing of the budget is wasted for it: every step but the last is full.
    assert [plan.num_tokens for plan in engine.plans[:-1]] == [16] * (len(engine.plans) - 1)


def test_only_so_many_long_prompts_are_begun_and_short_ones_pass_the_others() -> None:
    limits = {"max_partial_prefills": 2, "long_prefill_token_threshold": 10}
    engine = SimulatedEngine(budget=40, num_blocks=512, prefix_caching=False, **limits)
    for start in range(4):
        engine.add(list(range(start, start + 100)), max_tokens=1)
    engine.add([1, 2, 3], max_tokens=1)
    engine.run()
    engine.check_outputs()
    assert first_token_steps(engine)[3] == 0
    assert max(sum(chunk.length > 3 for chunk in plan.chunks) for plan in engine.plans) == 2


def test_without_chunked_prefill_steps_are_whole_prompts_or_decodes() -> None:
    engine = SimulatedEngine(budget=32, chunked_prefill=False)
    engine.add(list(range(5)), max_tokens=8)
    engine.plan()
    engine.result()
    engine.add(list(range(20)), max_tokens=4)
    engine.add(list(range(25)), max_tokens=4)
    engine.run()
    engine.check_outputs()
    assert all(not (plan.chunks and plan.num_decodes) for plan in engine.plans)
    assert all(chunk.start == 0 and chunk.sample for plan in engine.plans for chunk in plan.chunks if chunk.start == 0)
    assert [len(plan.chunks) for plan in engine.plans[:3]] == [1, 1, 1]  # 20 + 25 do not fit one step; prompts go first


def test_without_chunked_prefill_a_threshold_cuts_no_prompt() -> None:
    engine = SimulatedEngine(budget=32, chunked_prefill=False, long_prefill_token_threshold=4)
    for start in range(2):
        engine.add(list(range(start, start + 10)), max_tokens=3)
    engine.run()
    engine.check_outputs()
    assert [chunk.length for plan in engine.plans for chunk in plan.chunks] == [10, 10]


def test_without_chunked_prefill_no_more_requests_run_than_can_decode_together() -> None:
    engine = SimulatedEngine(budget=3, max_num_seqs=8, chunked_prefill=False)
    for start in range(6):
        engine.add([start], max_tokens=3)
    engine.run()
    engine.check_outputs()
    assert max(plan.num_tokens for plan in engine.plans) == 3


def test_without_chunked_prefill_a_prompt_must_fit_a_step() -> None:
    engine = SimulatedEngine(budget=8, chunked_prefill=False)
    with pytest.raises(InvalidRequest, match=r"prompt of 9 tokens and max_tokens 1 do not fit a step of 8 tokens"):
        engine.add(list(range(9)), max_tokens=1)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_partial_prefills": -1},
        {"long_prefill_token_threshold": -1},
        {"policy": "random"},
    ],
)
def test_limits_are_checked(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Limits(**{"max_num_batched_tokens": 8, "max_num_seqs": 8, **bad})
