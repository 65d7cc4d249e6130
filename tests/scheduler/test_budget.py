"""The token budget: it holds the target, wastes nothing of it, never lets prefill stand still, and learns."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import assume, event, given, settings

from scheduler.budget import MIN_PREFILL_TOKENS, ROOM, StepBudget, TokenBudget
from scheduler.step_time import StepCosts, StepTimeModel, StepWork, chunk_pairs

COSTS = StepCosts(fixed=5e-3, tokens=2e-5, sequences=1e-5, prefill_pairs=1e-8, decode_context=5e-9)
MIXED = StepWork(8 + 256, 9, chunk_pairs(0, 256), 8000)

costs = st.builds(
    StepCosts,
    fixed=st.floats(0, 0.02),
    tokens=st.just(0.0) | st.floats(1e-6, 1e-3),
    sequences=st.just(0.0) | st.floats(1e-7, 1e-3),
    prefill_pairs=st.just(0.0) | st.floats(1e-10, 1e-6),
    decode_context=st.just(0.0) | st.floats(1e-10, 1e-6),
)
prompts = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 3000)), min_size=1, max_size=5)


def budget_for(target: float | None = 0.05, max_tokens: int = 4096, costs: StepCosts | None = COSTS) -> TokenBudget:
    return TokenBudget(max_tokens, target, StepTimeModel(costs))


def fill(budget: StepBudget, prompts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Chunks as (start, length) that the prompts, (start, tokens left), get in this order."""
    chunks = []
    for start, left in prompts:
        length = min(left, budget.chunk_limit(start))
        if length > 0:
            budget.spend(start, length)
            chunks.append((start, length))
    return chunks


def work(decodes: int, context: int, chunks: list[tuple[int, int]]) -> StepWork:
    pairs = sum(chunk_pairs(start, length) for start, length in chunks)
    return StepWork(decodes + sum(length for _, length in chunks), decodes + len(chunks), pairs, context)


# ---- one step


@given(
    costs=costs,
    target=st.floats(1e-3, 0.2),
    max_tokens=st.integers(65, 4096),
    decodes=st.integers(1, 64),
    context=st.integers(1, 4000),
    slower=st.sampled_from([1.0, 1.5, 3.0]),
    prompts=prompts,
)
@settings(max_examples=500, deadline=None)
def test_a_step_takes_what_it_may_unless_prefill_would_stand_still(
    costs: StepCosts,
    target: float,
    max_tokens: int,
    decodes: int,
    context: int,
    slower: float,
    prompts: list[tuple[int, int]],
) -> None:
    tokens = TokenBudget(max_tokens, target, StepTimeModel(costs))
    tokens.model.drift = slower
    budget = tokens.for_step(decodes, decodes * context)
    chunks = fill(budget, prompts)
    step = work(decodes, decodes * context, chunks)
    assert step.tokens <= max_tokens
    assert chunks, "prefill stands still"
    if not budget.forced:
        event("in time")
        assert tokens.predict(step) <= target * (1 + 1e-6) + 1e-5
    else:
        event("late")
        assert tokens.predict(step) > target
        assert len(chunks) == 1
        assert chunks[0][1] <= MIN_PREFILL_TOKENS


@given(
    costs=costs,
    target=st.floats(1e-3, 0.2),
    start=st.integers(0, 20_000),
    before=st.lists(st.integers(16, 400), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_one_token_more_would_take_too_long(costs: StepCosts, target: float, start: int, before: list[int]) -> None:
    """Whatever was booked before, the limit is as long as the target allows, to the token."""
    budget = budget_for(target, 4096, costs).for_step(8, 8000)
    chunks = fill(budget, [(0, length) for length in before])
    limit = budget.chunk_limit(start)
    if not budget.forced and MIN_PREFILL_TOKENS < limit < budget.tokens:
        event("limited by time")
        longer = costs.seconds(work(8, 8000, [*chunks, (start, limit + 1)]))
        assert longer > target * (1 - 1e-6)


@given(
    tokens=st.floats(1e-6, 1e-3),
    pairs=st.just(0.0) | st.floats(1e-10, 1e-6),
    start=st.integers(0, 20_000),
    length=st.integers(MIN_PREFILL_TOKENS, 3000),
)
@settings(max_examples=300, deadline=None)
def test_a_target_made_for_a_chunk_holds_exactly_that_chunk(
    tokens: float, pairs: float, start: int, length: int
) -> None:
    costs = StepCosts(5e-3, tokens, 1e-5, pairs, 1e-8)
    target = costs.seconds(work(8, 8000, [(start, length)]))
    assert budget_for(target, 4096, costs).for_step(8, 8000).chunk_limit(start) == length


def test_a_chunk_late_in_a_long_prompt_is_smaller() -> None:
    limits = [budget_for().for_step(8, 8000).chunk_limit(start) for start in (0, 4000, 16_000, 64_000)]
    assert limits == sorted(set(limits), reverse=True)
    assert limits[0] > 2 * limits[-1]


def test_more_decodes_and_longer_ones_leave_less() -> None:
    limits = [budget_for().for_step(*decodes).chunk_limit(0) for decodes in ((1, 100), (64, 100), (64, 10**6))]
    assert limits == sorted(set(limits), reverse=True)


@pytest.mark.parametrize("decodes", [1, 40])
def test_without_a_target_or_costs_only_tokens_count(decodes: int) -> None:
    for tokens in (budget_for(target=None), budget_for(costs=None), budget_for(target=1e9)):
        budget = tokens.for_step(decodes, decodes * 10**4)
        assert budget.chunk_limit(10**5) == 4096 - decodes
        budget.spend(10**5, 1000)
        assert budget.chunk_limit(0) == 3096 - decodes
        assert not budget.forced


def test_where_no_decode_waits_there_is_no_hurry() -> None:
    budget = budget_for(target=1e-6).for_step(0, 0)
    assert fill(budget, [(0, 3000), (10**5, 3000)]) == [(0, 3000), (10**5, 1096)]
    assert not budget.forced


def test_a_hopeless_target_leaves_prefill_a_minimum_once_a_step() -> None:
    budget = budget_for(target=1e-6).for_step(4, 400)
    assert fill(budget, [(500, 300), (0, 300)]) == [(500, MIN_PREFILL_TOKENS)]
    assert budget.chunk_limit(500 + MIN_PREFILL_TOKENS, begun=True) == 0
    assert budget.forced


def test_the_minimum_ends_where_the_tokens_do() -> None:
    budget = budget_for(target=1e-6, max_tokens=10).for_step(4, 400)
    assert fill(budget, [(0, 300)]) == [(0, 6)]


def test_a_minimum_that_is_in_time_is_not_counted_as_late() -> None:
    budget = budget_for(target=0.0053).for_step(4, 400)
    assert budget.chunk_limit(0) == MIN_PREFILL_TOKENS  # eight would fit
    assert fill(budget, [(0, 3)]) == [(0, 3)]
    assert not budget.forced


def test_what_is_left_is_not_cut_to_crumbs() -> None:
    """A chunk costs a sequence; one of a few tokens is not worth it where others are in the step."""
    budget = budget_for().for_step(8, 8000)
    whole = budget.chunk_limit(0)
    assert fill(budget, [(0, whole - 5), (0, 300)]) == [(0, whole - 5)]


@given(costs=costs, target=st.floats(5e-3, 0.2), start=st.integers(0, 20_000), part=st.floats(0.01, 0.99))
@settings(max_examples=300, deadline=None)
def test_a_chunk_in_two_parts_is_as_long_as_in_one(costs: StepCosts, target: float, start: int, part: float) -> None:
    budget = budget_for(target, 4096, costs).for_step(8, 8000)
    whole = budget.chunk_limit(start)
    assume(whole > MIN_PREFILL_TOKENS)  # else it may be the minimum, whatever the time
    first = max(1, int(part * whole))
    budget.spend(start, first)
    more = budget.chunk_limit(start + first, begun=True)
    if whole > first and not budget.forced:
        event("prolonged")
        assert abs(more - (whole - first)) <= 1  # rounding
        budget.spend(start + first, more, begun=True)
        step = work(8, 8000, [(start, first + more)])
        assert costs.seconds(step) <= target * (1 + 1e-6) + 1e-5


def test_granted_is_what_prefill_could_have_had_at_first() -> None:
    unasked, asked = budget_for().for_step(8, 8000), budget_for().for_step(8, 8000)
    assert unasked.granted == 4096 - 8
    limit = asked.chunk_limit(100)
    fill(asked, [(100, 50), (0, 30)])
    assert asked.granted == limit < 4096 - 8


# ---- learning


def test_a_slower_machine_gets_smaller_chunks_and_a_recovered_one_its_old_ones() -> None:
    tokens = budget_for()
    limits = []
    for speed in (1.0, 1.5, 1.0):
        for _ in range(16):
            tokens.observe(MIXED, speed * COSTS.seconds(MIXED))
        budget = tokens.for_step(8, 8000)
        (chunk,) = fill(budget, [(0, 4096)])
        assert ROOM * speed * COSTS.seconds(work(8, 8000, [chunk])) == pytest.approx(0.05, rel=0.02)
        limits.append(chunk[1])
    assert limits[1] < 0.8 * limits[0]
    assert limits[2] == pytest.approx(limits[0], rel=0.05)


def chunk_after(*ratios: float, step: StepWork = MIXED) -> int:
    """The chunk that is planned after steps that took these times what the costs say."""
    tokens = budget_for()
    tokens.model.fit = lambda: None  # the costs stay as they are
    for ratio in ratios:
        tokens.observe(step, ratio * COSTS.seconds(step))
    return tokens.for_step(8, 8000).chunk_limit(0)


@pytest.mark.parametrize("seed", range(5))
def test_the_target_is_held_by_nearly_all_steps_and_not_by_half_of_them(seed: int) -> None:
    rng = random.Random(seed)
    noisy = [rng.choice((0.9, 1.0, 1.1, 1.2)) for _ in range(60)]
    chunk = chunk_after(*noisy)
    seconds = COSTS.seconds(work(8, 8000, [(0, chunk)]))
    assert 1.1 * seconds <= 0.05 < 1.3 * seconds


def test_a_single_hiccup_tells_nothing_and_a_second_one_does() -> None:
    usual = chunk_after(*[1.0] * 12)
    assert chunk_after(*[1.0] * 6, 5.0, *[1.0] * 5) == usual
    assert chunk_after(5.0) == usual, "nor does the first step of all"
    assert chunk_after(*[1.0] * 6, 1.5, 1.0, 1.5, *[1.0] * 3) < 0.8 * usual


def test_a_machine_that_has_just_become_slower_is_expected_to_vary_around_its_new_pace() -> None:
    calm, noisy = [1.0] * 12, [0.9, 1.1] * 6
    slower = COSTS.seconds(work(8, 8000, [(0, chunk_after(*calm, 1.5, 1.5))]))
    assert ROOM * 1.5 * slower == pytest.approx(0.05, rel=0.02)
    assert chunk_after(*noisy, 1.5, 1.5) < 0.95 * chunk_after(*calm, 1.5, 1.5)


def test_the_spread_of_the_profile_counts_before_the_first_request() -> None:
    chunks = []
    for spread in (0.0, 0.2):
        model = StepTimeModel()
        model.learn(
            (step, (1 + spread * (-1) ** (index // 4)) * COSTS.seconds(step))
            for index in range(24)
            for step in (work(8, 8000, [(0, 64 << index % 4)]),)
        )
        chunks.append(TokenBudget(4096, 0.05, model).for_step(8, 8000).chunk_limit(0))
    assert chunks[1] < 0.9 * chunks[0]


def test_what_passed_is_forgotten() -> None:
    assert chunk_after(*[1.6] * 5, *[1.0] * 15) == chunk_after(*[1.0] * 16)


def test_steps_faster_than_predicted_stretch_the_target_only_when_nearly_all_are() -> None:
    usual = chunk_after(*[1.0] * 12)
    assert chunk_after(*[1.0, 1.0, 0.5] * 8) == usual
    assert chunk_after(*[0.5] * 16) > 1.5 * usual


def test_only_steps_in_which_decodes_wait_for_prefill_tell_how_it_varies() -> None:
    decode = StepWork(8, 8, 0, 8000)
    assert chunk_after(*[1.0, 1.0, 1.5] * 5, step=decode) > 0.9 * chunk_after(*[1.0] * 12)
    assert chunk_after(*[1.5] * 15, step=decode) < 0.8 * chunk_after(*[1.0] * 12), "but all see a slower machine"


@pytest.mark.parametrize(("tokens", "left"), [(20, 4), (16, 0)])
def test_where_few_tokens_are_left_they_are_used_up(tokens: int, left: int) -> None:
    budget = budget_for(max_tokens=8 + tokens).for_step(8, 8000)
    assert fill(budget, [(0, 16), (0, 300)]) == [(0, 16), (0, left)][: 1 + (left > 0)]


def test_a_chunk_that_is_there_is_prolonged_by_a_single_token() -> None:
    budget = budget_for().for_step(8, 8000)
    whole = budget.chunk_limit(0)
    budget.spend(0, whole - 2)
    assert budget.chunk_limit(whole - 2, begun=True) == 2


def test_the_prediction_is_the_models() -> None:
    tokens = budget_for()
    assert tokens.predict(MIXED) == COSTS.seconds(MIXED)
    assert budget_for(costs=None).predict(MIXED) is None
