"""The policy, one situation a test. Each test asserts that its situation really came about."""

from __future__ import annotations

import pytest

from scheduler.frame import StepResult, encode_plan
from scheduler.params import InvalidRequest
from scheduler.request import Phase
from tests.scheduler.simulated import SimulatedEngine, expected_output


def chunks_of(engine: SimulatedEngine) -> list[list[tuple[int, int]]]:
    """Per step its chunks as (start, length)."""
    return [[(chunk.start, chunk.length) for chunk in plan.chunks] for plan in engine.plans]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17])
def test_prompts_are_chunked_to_the_budget(length: int) -> None:
    engine = SimulatedEngine(budget=8)
    engine.add(list(range(length)), max_tokens=1)
    engine.run()
    computed = [chunk for step in chunks_of(engine) for chunk in step]
    assert [size for _, size in computed] == [8] * (length // 8) + [length % 8] * (length % 8 > 0)
    assert [plan.chunks[0].sample for plan in engine.plans] == [False] * (len(engine.plans) - 1) + [True]
    engine.check_outputs()


def test_the_last_prompt_that_fits_is_cut_so_that_the_step_is_full() -> None:
    engine = SimulatedEngine(budget=10)
    for _ in range(3):
        engine.add(list(range(6)), max_tokens=1)
    engine.run()
    assert chunks_of(engine)[0] == [(0, 6), (0, 4)]
    assert engine.plans[0].num_tokens == 10
    engine.check_outputs()


def test_decodes_come_first_and_prefill_fills_the_rest() -> None:
    engine = SimulatedEngine(budget=6)
    engine.add([1], max_tokens=5)
    engine.add([2], max_tokens=5)
    engine.plan()
    engine.result()
    engine.add(list(range(12)), max_tokens=2)
    plan = engine.plan()
    assert plan.num_decodes == 2
    assert plan.num_prefill_tokens == 4
    engine.run()
    engine.check_outputs()


def test_a_last_chunk_of_one_token_is_prefill_although_others_decode() -> None:
    engine = SimulatedEngine(budget=5)
    engine.add([3], max_tokens=6)
    engine.plan()
    engine.result()
    engine.add(list(range(9)), max_tokens=2)  # 4 + 4 + 1 beside one decode
    engine.run()
    last = next(plan for plan in engine.plans if plan.chunks and plan.chunks[0].start == 8)
    assert last.chunks[0].length == 1
    assert last.chunks[0].sample
    assert last.num_decodes == 1
    engine.check_outputs()


def test_no_more_requests_run_than_the_budget_has_tokens() -> None:
    engine = SimulatedEngine(budget=3, max_num_seqs=8)
    for start in range(6):
        engine.add([start], max_tokens=4)
    engine.run()
    assert max(plan.num_decodes for plan in engine.plans) == 3
    engine.check_outputs()


def test_steady_decode_says_only_the_same_rows_again() -> None:
    engine = SimulatedEngine(budget=64, num_blocks=256, block_size=64)
    for start in range(8):
        engine.add([start + 100], max_tokens=30)
    engine.run()
    steady = [plan for plan in engine.plans if not (plan.chunks or plan.join or plan.leave or plan.new_blocks)]
    assert len(steady) > 10
    assert max(len(encode_plan(plan)) for plan in steady) < 64
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 2])
def test_preemption_changes_no_token(depth: int) -> None:
    engine = SimulatedEngine(budget=16, num_blocks=12, block_size=4, depth=depth)
    for start in range(4):
        engine.add(list(range(start, start + 10)), max_tokens=16)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    engine.check_outputs()


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    engine = SimulatedEngine(budget=16, num_blocks=11, policy="priority", prefix_caching=False)
    prompt = next(p for s in range(99) if len(expected_output(p := list(range(s, s + 8)), 12)) == 12)  # meets no end
    requests = [engine.add(prompt, max_tokens=12, priority=p) for p in (1, 0, 1)]
    engine.run()
    assert [request.preemptions > 0 for request in requests] == [False, False, True]
    engine.check_outputs()


def test_abort_of_a_chunked_prompt_returns_its_blocks_once_no_step_uses_them() -> None:
    engine = SimulatedEngine(budget=4, num_blocks=16, depth=2)
    request = engine.add(list(range(12)), max_tokens=4)
    engine.plan()
    engine.plan()
    engine.scheduler.finish(request, "abort")
    assert engine.scheduler.pool.num_free < 16
    engine.result()
    assert engine.scheduler.pool.num_free < 16
    engine.result()
    assert engine.scheduler.pool.num_free == 16


def test_the_token_of_a_step_in_flight_is_discarded_when_its_request_has_ended() -> None:
    engine = SimulatedEngine(budget=4, depth=2)
    request = engine.add([1], max_tokens=10)
    engine.plan()
    engine.plan()
    engine.scheduler.finish(request, "stop", "text")
    engine.result()
    engine.result()
    assert request.output_token_ids == []
    assert engine.scheduler.counters.discarded_tokens == 2
    assert request.stop_reason == "text"


def test_a_length_limit_is_foreseen_so_that_nothing_is_computed_in_vain() -> None:
    engine = SimulatedEngine(budget=4, depth=2)
    engine.add([100], max_tokens=3)
    engine.run()
    assert engine.scheduler.counters.discarded_tokens == 0
    assert sum(plan.num_tokens for plan in engine.plans) == 3


def test_a_request_that_can_never_fit_is_refused_and_others_go_on() -> None:
    engine = SimulatedEngine(budget=8, num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match=r"prompt of 10 tokens and max_tokens 8 need 5 KV blocks .* has 4"):
        engine.add(list(range(10)), max_tokens=8)
    engine.add(list(range(10)), max_tokens=7)  # the last token's keys are never computed: exactly 16 fit
    engine.run()
    engine.check_outputs()


def test_a_waiting_request_may_be_aborted() -> None:
    engine = SimulatedEngine(budget=1, max_num_seqs=1)
    engine.add([1], max_tokens=2)
    waiting = engine.add([2], max_tokens=2)
    engine.plan()
    engine.scheduler.finish(waiting, "abort")
    assert waiting.phase is Phase.FINISHED
    engine.run()
    engine.check_outputs()


def test_short_prompts_are_not_kept_waiting_by_a_long_one_before_them() -> None:
    engine = SimulatedEngine(budget=16, num_blocks=128)
    engine.add(list(range(60)), max_tokens=1)
    short = [engine.add([start], max_tokens=1) for start in range(5)]
    engine.run()
    first = [index for index, plan in enumerate(engine.plans) for chunk in plan.chunks if chunk.sample]
    assert len(first) == 1 + len(short)
    assert max(first) <= 4  # 65 tokens in steps of 16


@pytest.mark.parametrize(("epoch", "step", "tokens"), [(1, 0, 1), (0, 1, 1), (0, 0, 2)])
def test_a_result_that_does_not_fit_is_refused(epoch: int, step: int, tokens: int) -> None:
    engine = SimulatedEngine(budget=4)
    engine.add([1])
    engine.plan()
    with pytest.raises(RuntimeError, match="step"):
        engine.scheduler.update(StepResult(epoch, step, [5] * tokens, 0.0), 0)


def test_a_decode_that_is_in_the_step_already_is_not_preempted_for_a_prompt_before_it() -> None:
    limits = {"long_prefill_token_threshold": 4, "prefix_caching": False}
    engine = SimulatedEngine(budget=5, num_blocks=8, block_size=4, **limits)
    long = engine.add(list(range(30)), max_tokens=1)
    short = engine.add(next(p for s in range(99) if len(expected_output(p := [s], 20)) == 20), max_tokens=20)
    waited = 0
    while engine.scheduler.has_work:
        before = long.scheduled
        plan = engine.plan()
        waited += plan is not None and plan.num_decodes == 1 and long.scheduled == before and long.row >= 0
        engine.result()
    assert waited > 0, "the long prompt never had to wait for a block while the short one decoded"
    assert long.preemptions == 0
    engine.check_outputs()
    assert short.finish_reason
