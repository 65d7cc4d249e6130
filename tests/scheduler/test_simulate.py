"""The discrete-event simulation: its clock, its order of events, and what it may not lose."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler.blocks import BlockPool
from scheduler.budget import TokenBudget
from scheduler.limits import Limits
from scheduler.scheduler import Scheduler
from scheduler.simulate import Arrival, Simulation, StepSeconds, profiled
from scheduler.step_time import StepWork, chunk_pairs


def linear(work: StepWork, sampled: int) -> float:
    """20 ms, 0.1 ms a token, 0.5 us a pair of prefill, 1 us a token of decode context."""
    return 0.02 + 1e-4 * work.tokens + 5e-7 * work.prefill_pairs + 1e-6 * work.decode_context


def make_scheduler(*, num_blocks: int = 4096, budget: TokenBudget | None = None, **limits: Any) -> Scheduler:
    limits = Limits(**{"max_num_batched_tokens": 256, "max_num_seqs": 64, **limits})
    return Scheduler(limits, BlockPool(num_blocks, 16), prefix_caching=False, budget=budget)


def simulated(arrivals: list[Arrival], step_seconds: StepSeconds, scheduler: Scheduler, **options: Any) -> Simulation:
    simulation = Simulation(scheduler, step_seconds, **options)
    simulation.run(arrivals)
    return simulation


def random_arrivals(count: int, rate: float = 2.0, seed: int = 0) -> list[Arrival]:
    draw = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        arrivals.append(Arrival(at, draw.randint(1, 900), draw.randint(1, 60)))
    return arrivals


def gaps(simulation: Simulation) -> list[float]:
    return sorted(gap for outcome in simulation.outcomes for gap in outcome.gaps)


# ---- the clock


@pytest.mark.parametrize(
    ("depth", "driver_seconds", "first", "gap"),
    [(0, 0.0, 0.1, 0.1), (1, 0.0, 0.1, 0.1), (2, 0.0, 0.1, 0.1), (1, 0.05, 0.15, 0.15), (2, 0.05, 0.15, 0.1)],
)
def test_times_are_exact_where_steps_take_the_same(depth: int, driver_seconds: float, first: float, gap: float) -> None:
    """A second step in flight hides the driver; with one, every step waits for it."""
    arrivals = [Arrival(0.0, 10, 5)]
    options = {"async_depth": depth, "driver_seconds": driver_seconds}
    (outcome,) = simulated(arrivals, lambda work, sampled: 0.1, make_scheduler(), **options).outcomes
    assert outcome.ttft == pytest.approx(first)
    assert outcome.gaps == pytest.approx([gap] * 4)


def test_a_request_waits_for_the_steps_that_were_planned_before_it_came() -> None:
    arrivals = [Arrival(0.0, 10, 20), Arrival(0.45, 10, 1)]
    for depth, first in ((1, 0.6), (2, 0.7)):
        late = simulated(arrivals, lambda work, sampled: 0.1, make_scheduler(), async_depth=depth).outcomes[1]
        assert late.token_times == pytest.approx([first])


def test_idle_time_is_skipped() -> None:
    simulation = simulated([Arrival(5.0, 1, 1), Arrival(1e6, 1, 2)], lambda work, sampled: 0.5, make_scheduler())
    assert [outcome.token_times for outcome in simulation.outcomes] == [[5.5], [1e6 + 0.5, 1e6 + 1.0]]
    assert len(simulation.steps) == 3


def test_arrivals_need_not_be_sorted() -> None:
    arrivals = random_arrivals(40)
    ahead, shuffled = (simulated(order, linear, make_scheduler()) for order in (arrivals, arrivals[::-1]))
    assert [o.token_times for o in ahead.outcomes] == [o.token_times for o in shuffled.outcomes]


# ---- what holds of every run


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
def test_no_token_is_lost_and_steps_never_overlap(depth: int, chunked: bool) -> None:
    scheduler = make_scheduler(chunked_prefill=chunked, max_num_batched_tokens=256 if chunked else 1024)
    most = 0

    def step_seconds(work: StepWork, sampled: int) -> float:
        nonlocal most
        most = max(most, len(scheduler.in_flight))
        return linear(work, sampled)

    arrivals = random_arrivals(80)
    simulation = simulated(arrivals, step_seconds, scheduler, async_depth=depth)
    assert most == depth
    assert [len(outcome.token_times) for outcome in simulation.outcomes] == [a.output_tokens for a in arrivals]
    assert sum(step.sampled for step in simulation.steps) == sum(a.output_tokens for a in arrivals)
    assert sum(step.prefill_tokens for step in simulation.steps) == sum(a.prompt_tokens for a in arrivals)
    for before, after in zip(simulation.steps, simulation.steps[1:], strict=False):
        assert before.start < before.end <= after.start
    assert all(outcome.ttft > 0 and min(outcome.gaps, default=1) > 0 for outcome in simulation.outcomes)
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_preempted_requests_get_all_their_tokens() -> None:
    scheduler = make_scheduler(num_blocks=80)
    arrivals = random_arrivals(40, rate=20.0)
    simulation = simulated(arrivals, linear, scheduler)
    assert scheduler.counters.preemptions > 0
    assert [len(outcome.token_times) for outcome in simulation.outcomes] == [a.output_tokens for a in arrivals]
    assert sum(step.prefill_tokens for step in simulation.steps) > sum(a.prompt_tokens for a in arrivals)


def test_what_can_never_fit_is_refused_and_leaves_the_others_alone() -> None:
    arrivals = [Arrival(0.0, 10, 3), Arrival(0.0, 2000, 3), Arrival(0.1, 10, 3)]
    simulation = Simulation(make_scheduler(num_blocks=16), linear)
    ended = []
    simulation.run(arrivals, lambda: ended.append(len(simulation.steps)))
    assert [outcome.refusal is None for outcome in simulation.outcomes] == [True, False, True]
    assert "the KV cache has 16" in simulation.outcomes[1].refusal
    assert [len(outcome.token_times) for outcome in simulation.outcomes] == [3, 0, 3]
    assert len(ended) == 3


def test_nothing_but_refusals_ends_at_once() -> None:
    simulation = simulated([Arrival(0.0, 2000, 3)], linear, make_scheduler(num_blocks=16))
    assert simulation.steps == []


# ---- what it is for


def test_chunks_hold_the_tail_that_whole_prompts_stretch() -> None:
    arrivals = random_arrivals(120, rate=4.0)
    chunked = gaps(simulated(arrivals, linear, make_scheduler()))
    whole = gaps(simulated(arrivals, linear, make_scheduler(chunked_prefill=False, max_num_batched_tokens=1024)))
    p99 = int(0.99 * len(chunked))
    assert len(chunked) == len(whole)
    assert chunked[p99] < 0.5 * whole[p99]


def test_the_budget_learns_what_the_engine_could_measure() -> None:
    """From when the workers could begin a step to its result, the driver's time included where it is not hidden."""
    seen = []

    class Watched(TokenBudget):
        def observe(self, work: StepWork, seconds: float) -> None:
            seen.append((work.tokens, seconds))
            super().observe(work, seconds)

    for depth in (1, 2):
        scheduler = make_scheduler(budget=Watched(256))
        simulated([Arrival(3.0, 10, 3)], lambda work, n: 0.1, scheduler, async_depth=depth, driver_seconds=0.05)
    assert [tokens for tokens, _ in seen] == [10, 1, 1] * 2
    assert [seconds for _, seconds in seen] == pytest.approx([0.15, 0.15, 0.15, 0.15, 0.1, 0.1])


def test_a_profile_knows_a_linear_device() -> None:
    costs = profiled(linear).costs
    for decodes, chunk, start in ((1, 0, 0), (20, 300, 5000), (100, 16, 0)):
        work = StepWork(decodes + chunk, decodes + (chunk > 0), chunk_pairs(start, chunk), decodes * 700)
        assert costs.seconds(work) == pytest.approx(linear(work, 0), rel=0.02)


def test_a_target_is_held_that_the_largest_step_would_miss() -> None:
    target, arrivals = 0.06, random_arrivals(120, rate=3.0)
    free = gaps(simulated(arrivals, linear, make_scheduler(max_num_batched_tokens=2048)))
    budget = TokenBudget(2048, target, profiled(linear))
    held = gaps(simulated(arrivals, linear, make_scheduler(max_num_batched_tokens=2048, budget=budget)))
    assert free[-1] > 2 * target
    assert held[int(0.99 * len(held))] < 1.02 * target
    assert held[-1] < 1.1 * target
