"""The step-time model: it finds what things cost, keeps up with the machine, and is not misled by hiccups."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given, settings

from scheduler.step_time import KINDS, SAMPLES_PER_KIND, StepCosts, StepTimeModel, StepWork, chunk_pairs

GPU = StepCosts(fixed=6e-3, tokens=2e-5, sequences=1.5e-5, prefill_pairs=2e-9, decode_context=8e-9)
CPU = StepCosts(fixed=2e-2, tokens=8e-4, sequences=3e-4, prefill_pairs=4e-7, decode_context=2e-7)
MACHINES = pytest.mark.parametrize("machine", [GPU, CPU])
DECODE = StepWork(24, 24, 0, 24 * 900)
MIXED = StepWork(24 + 300, 25, chunk_pairs(1500, 300), 24 * 900)

seconds = st.floats(1e-9, 1e3)
cost = st.just(0.0) | st.floats(1e-12, 1.0)


def work(decodes: int, context: int, chunks: list[tuple[int, int]]) -> StepWork:
    """Decodes with this context each, and chunks as (start, length)."""
    tokens = decodes + sum(length for _, length in chunks)
    pairs = sum(chunk_pairs(start, length) for start, length in chunks)
    return StepWork(tokens, decodes + len(chunks), pairs, decodes * context)


def random_work(rng: random.Random) -> StepWork:
    """What an engine under changing load computes."""
    decodes = rng.choice([0, rng.randint(1, 8), rng.randint(1, 64)])
    chunks = [(rng.choice([0, rng.randint(0, 8000)]), rng.randint(16, 512)) for _ in range(rng.randint(0, 2))]
    if not decodes and not chunks:
        decodes = 1
    return work(decodes, rng.randint(1, 4000), chunks)


def noisy(rng: random.Random, machine: StepCosts, step: StepWork) -> float:
    """5 % of noise, and three steps of a hundred take five times as long."""
    return machine.seconds(step) * max(0.5, rng.gauss(1, 0.05)) * (5 if rng.random() < 0.03 else 1)


def profiled(machine: StepCosts, seed: int = 0) -> StepTimeModel:
    """A model that knows the machine exactly."""
    rng = random.Random(seed)
    model = StepTimeModel()
    model.learn((step, machine.seconds(step)) for step in (random_work(rng) for _ in range(200)))
    return model


# ---- work


@given(start=st.integers(0, 300), length=st.integers(0, 100))
def test_every_token_of_a_chunk_attends_to_all_before_it_and_itself(start: int, length: int) -> None:
    assert chunk_pairs(start, length) == sum(position + 1 for position in range(start, start + length))


@given(start=st.integers(0, 10**5), lengths=st.tuples(st.integers(0, 10**4), st.integers(0, 10**4)))
def test_a_prolonged_chunk_has_the_pairs_of_both_parts(start: int, lengths: tuple[int, int]) -> None:
    first, more = lengths
    assert chunk_pairs(start, first) + chunk_pairs(start + first, more) == chunk_pairs(start, first + more)


def test_a_step_is_mixed_when_decodes_wait_for_prefill() -> None:
    assert [work(*parts).is_mixed for parts in ((1, 5, []), (0, 0, [(0, 5)]), (1, 5, [(0, 5)]))] == [False, False, True]


# ---- fitting


@MACHINES
def test_exact_times_give_the_exact_costs(machine: StepCosts) -> None:
    costs = profiled(machine).costs
    for name in StepCosts.__slots__:
        assert getattr(costs, name) == pytest.approx(getattr(machine, name), rel=0.01), name


@given(
    machine=st.builds(
        StepCosts,
        st.floats(1e-5, 0.1),
        st.just(0.0) | st.floats(1e-7, 1e-2),
        st.just(0.0) | st.floats(1e-7, 1e-3),
        st.just(0.0) | st.floats(1e-11, 1e-6),
        st.just(0.0) | st.floats(1e-11, 1e-6),
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_whatever_things_cost_the_times_of_new_steps_are_known(machine: StepCosts, seed: int) -> None:
    model = profiled(machine, seed)
    rng = random.Random(seed + 1000)
    for step in (random_work(rng) for _ in range(20)):
        assert model.predict(step) == pytest.approx(machine.seconds(step), rel=0.01)


@MACHINES
@pytest.mark.parametrize("seed", range(4))
def test_noise_and_hiccups_hardly_matter(machine: StepCosts, seed: int) -> None:
    rng = random.Random(seed)
    model = StepTimeModel()
    model.learn((step, noisy(rng, machine, step)) for step in (random_work(rng) for _ in range(400)))
    for step in (DECODE, MIXED, work(1, 100, []), work(0, 0, [(0, 512)]), work(40, 2000, [(6000, 512)])):
        assert model.costs.seconds(step) == pytest.approx(machine.seconds(step), rel=0.06)


@MACHINES
@pytest.mark.parametrize("seed", range(4))
def test_the_costs_are_learned_from_serving_alone(machine: StepCosts, seed: int) -> None:
    rng = random.Random(seed)
    model = StepTimeModel()
    assert model.predict(MIXED) is None
    for _ in range(600):
        step = random_work(rng)
        model.observe(step, noisy(rng, machine, step))
    for step in (DECODE, MIXED, work(1, 100, []), work(40, 2000, [(6000, 512)])):
        assert model.predict(step) == pytest.approx(machine.seconds(step), rel=0.1)


@given(
    samples=st.lists(
        st.tuples(
            st.builds(StepWork, *[st.integers(1, 10**4)] * 2, *[st.integers(0, 10**9)] * 2), st.floats(1e-6, 1e3)
        ),
        min_size=12,
        max_size=60,
    ),
    profile=st.integers(0, 60),
)
@settings(max_examples=100, deadline=None)
@example(samples=[(StepWork(tokens, 1, 0, 5), 1 / tokens) for tokens in range(1, 40)], profile=20)
def test_no_cost_is_ever_negative(samples: list[tuple[StepWork, float]], profile: int) -> None:
    model = StepTimeModel()
    model.learn(samples[:profile])
    for step, took in samples[profile:]:
        model.observe(step, took)
        assert model.drift > 0
    model.fit()
    if model.costs is not None:
        costs = [getattr(model.costs, name) for name in StepCosts.__slots__]
        assert all(0 <= cost < float("inf") for cost in costs)


def test_a_few_steps_are_not_enough_to_predict_anything() -> None:
    model = StepTimeModel()
    for _ in range(3):
        model.observe(DECODE, 1.0)
    model.fit()
    assert model.costs is None
    assert model.predict(DECODE) is None


def test_what_was_not_seen_keeps_the_costs_of_before() -> None:
    """A model that is told about prefill and then sees only decodes knows what prefill costs."""
    model = StepTimeModel(GPU)
    for _ in range(200):
        model.observe(DECODE, GPU.seconds(DECODE))
    assert model.predict(MIXED) == pytest.approx(GPU.seconds(MIXED), rel=0.02)


# ---- the longest chunk


def chunk_seconds(costs: StepCosts, start: int, length: float) -> float:
    return costs.tokens * length + costs.prefill_pairs * (length * start + length * (length + 1) / 2)


@given(tokens=cost, pairs=cost, start=st.integers(0, 10**6), given_seconds=seconds)
@settings(max_examples=500, deadline=None)
@example(tokens=1e-3, pairs=1e-12, start=0, given_seconds=1e-3)
def test_the_longest_chunk_just_fits(tokens: float, pairs: float, start: int, given_seconds: float) -> None:
    costs = StepCosts(1.0, tokens, 1.0, pairs, 1.0)  # the other terms are not a chunk's
    longest = costs.longest_chunk(start, given_seconds)
    assume(longest < 1e12)
    assert chunk_seconds(costs, start, longest) == pytest.approx(given_seconds, rel=1e-9)
    whole = int(longest)
    assert chunk_seconds(costs, start, whole) <= given_seconds * (1 + 1e-9)
    assert chunk_seconds(costs, start, whole + 1) > given_seconds * (1 - 1e-9)


@given(tokens=cost, pairs=cost, starts=st.tuples(*[st.integers(0, 10**6)] * 2), given_seconds=seconds)
def test_a_chunk_behind_more_context_is_shorter(
    tokens: float, pairs: float, starts: tuple[int, int], given_seconds: float
) -> None:
    costs = StepCosts(0.0, tokens, 0.0, pairs, 0.0)
    early, late = (costs.longest_chunk(start, given_seconds) for start in sorted(starts))
    assert late <= early * (1 + 1e-12)
    if pairs > 1e-3 * tokens and abs(starts[0] - starts[1]) > 100:
        assert late < early


def test_no_time_holds_no_chunk_and_free_tokens_are_endless() -> None:
    assert [GPU.longest_chunk(0, given) for given in (0.0, -1.0)] == [0.0, 0.0]
    assert StepCosts(1.0, 0.0, 1.0, 0.0, 1.0).longest_chunk(5, 1e-9) == float("inf")


# ---- a machine that changes


@MACHINES
@pytest.mark.parametrize("change", [1.5, 3.0, 0.5])
def test_predictions_follow_a_machine_that_changes_its_speed_and_back(machine: StepCosts, change: float) -> None:
    model, rng = profiled(machine), random.Random(1)
    for speed in (1.0, change, 1.0):
        for _ in range(20):
            step = random_work(rng)
            model.observe(step, speed * machine.seconds(step))
        for step in (DECODE, MIXED):
            assert model.predict(step) == pytest.approx(speed * machine.seconds(step), rel=0.08)


@MACHINES
def test_a_change_that_stays_becomes_part_of_the_costs(machine: StepCosts) -> None:
    model, rng = profiled(machine, seed=1), random.Random(1)
    steps = [random_work(rng) for _ in range(200)]  # of all the kinds in the profile
    for step in steps * 6:
        model.observe(step, 2 * machine.seconds(step))
    assert model.costs.seconds(MIXED) == pytest.approx(2 * machine.seconds(MIXED), rel=0.05)
    assert model.drift == pytest.approx(1, rel=0.05)


@MACHINES
@pytest.mark.parametrize("times", [2.0, 100.0])
def test_a_single_hiccup_changes_nothing(machine: StepCosts, times: float) -> None:
    model, rng = profiled(machine), random.Random(1)
    for _ in range(20):
        step = random_work(rng)
        model.observe(step, machine.seconds(step))
    model.observe(MIXED, times * machine.seconds(MIXED))
    for _ in range(40):
        for step in (DECODE, MIXED):
            assert model.predict(step) == pytest.approx(machine.seconds(step), rel=1e-3)
        step = random_work(rng)
        model.observe(step, machine.seconds(step))
    assert model.outliers == 1


def test_hiccups_in_the_profile_are_left_out() -> None:
    rng = random.Random(5)
    steps = [random_work(rng) for _ in range(200)]
    model = StepTimeModel()
    model.learn((step, CPU.seconds(step) * (3 if index % 5 == 0 else 1)) for index, step in enumerate(steps))
    assert model.predict(MIXED) == pytest.approx(CPU.seconds(MIXED), rel=0.01)


def test_hiccups_of_a_rare_kind_of_step_do_not_replace_what_is_known_of_it() -> None:
    model = StepTimeModel()
    model.learn((step, CPU.seconds(step)) for step in [DECODE, MIXED] * 10)
    for number in range(200):
        step = MIXED if number % 20 == 19 else DECODE
        model.observe(step, CPU.seconds(step) * (3 if step is MIXED else 1))
    assert model.predict(MIXED) == pytest.approx(CPU.seconds(MIXED), rel=0.02)


@MACHINES
@pytest.mark.parametrize("change", [1.5, 0.5])
def test_no_prediction_is_off_while_a_change_becomes_part_of_the_costs(machine: StepCosts, change: float) -> None:
    """What the costs learn, the drift must give back in the same moment."""
    model = StepTimeModel()
    model.learn((step, machine.seconds(step)) for step in [DECODE, MIXED] * 10)
    for number in range(100):
        step = MIXED if number % 4 else DECODE
        model.observe(step, change * machine.seconds(step))
        if number >= 10:
            assert model.predict(MIXED) == pytest.approx(change * machine.seconds(MIXED), rel=0.05)


# ---- memory


@MACHINES
def test_an_hour_of_decoding_does_not_wipe_out_what_prefill_costs(machine: StepCosts) -> None:
    model, rng = profiled(machine), random.Random(2)
    for _ in range(5000):
        step = work(rng.randint(20, 28), rng.randint(700, 1000), [])
        model.observe(step, machine.seconds(step) * rng.gauss(1, 0.03))
    assert model.predict(DECODE) == pytest.approx(machine.seconds(DECODE), rel=0.03)
    for step in (MIXED, work(4, 500, [(0, 512)]), work(30, 900, [(6000, 256)])):
        assert model.predict(step) == pytest.approx(machine.seconds(step), rel=0.06)


def remembered(model: StepTimeModel) -> list[StepWork]:
    return [step for kind in model._kinds.values() for step, _ in kind]


def test_memory_is_bounded_and_what_was_seen_last_stays() -> None:
    kinds = [StepWork(1 << a, 1 << b, 1 << c, 0) for a in range(20) for b in range(10) for c in range(10)]
    random.Random(3).shuffle(kinds)
    model = StepTimeModel()
    some, more, most = 3 * KINDS // 4, 5 * KINDS // 4, 4 * KINDS
    model.learn((step, 1.0) for step in [DECODE, *kinds[:some], DECODE, *kinds[some:more]])
    assert DECODE in remembered(model)
    model.learn((step, 1.0) for step in kinds[more:most] for _ in range(2 * SAMPLES_PER_KIND))
    assert len(remembered(model)) <= KINDS * SAMPLES_PER_KIND
    assert set(remembered(model)) <= set(kinds[more:])
    assert kinds[most - 1] in remembered(model)
    model.learn([(kinds[most - 1], 2.0)])
    assert (kinds[most - 1], 2.0) in [sample for kind in model._kinds.values() for sample in kind]
