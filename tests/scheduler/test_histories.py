"""Random histories: arrivals, aborts, priorities, tiny caches, steps in flight, in any order and in every mode."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.budget import TokenBudget
from scheduler.limits import POLICIES
from scheduler.params import InvalidRequest
from scheduler.plan import StepPlan
from scheduler.request import Phase, Request
from scheduler.step_time import StepCosts, StepTimeModel
from tests.scheduler.simulated import SimulatedEngine

models = st.builds(
    StepTimeModel,
    st.builds(
        StepCosts,
        fixed=st.sampled_from([0.0, 300.0]),
        tokens=st.sampled_from([0.0, 10.0, 40.0]),
        sequences=st.sampled_from([0.0, 50.0]),
        prefill_pairs=st.sampled_from([0.0, 1.0, 4.0]),
        decode_context=st.sampled_from([0.0, 1.0, 3.0]),
    ),
)


class Patience:
    """Nobody starves: whoever is first in order takes part in steps, at the latest when those that run have ended.

    While the first one waits for a row, for blocks or for its share of the budget, nobody else may start. So every
    step without it brings those that run nearer to their end, and it waits for no more steps than they have tokens
    left. Aging sees to it that everybody comes to be first. Not promised are decodes without chunked prefill, which
    prompts may pass for ever, and long prompts while as many as may are in mid-prefill: then others may pass.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.scheduler = engine.scheduler
        self.waits: Request | None = None
        self.left = 0

    def before(self) -> None:
        """A step is about to be planned."""
        scheduler = self.scheduler
        first = min([*scheduler.running, *scheduler.waiting], key=lambda request: request.order, default=None)
        if first is None or not self._is_promised(first):
            self.waits = None
        elif first is not self.waits:
            self.waits = first
            others = [request for request in scheduler.running if request is not first]
            self.left = sum(r.num_prompt + r.max_tokens - r.scheduled for r in others)

    def after(self, plan: StepPlan) -> None:
        if self.waits is not None and self.waits.last_step == plan.step:
            self.waits = None
        elif self.waits is not None:
            self.left -= 1
            assert self.left >= 0, f"{self.waits.id} is first in order and starves"

    def _is_promised(self, first: Request) -> bool:
        limits = self.scheduler.limits
        if first.phase is not Phase.WAITING:
            return limits.chunked_prefill and first.num_outputs < first.max_tokens
        threshold = limits.long_prefill_token_threshold
        long = [r for r in self.scheduler.running if r.phase is Phase.PREFILL and r.num_known > threshold]
        return first.num_known <= threshold or not 0 < limits.max_partial_prefills <= len(long)


class Histories(RuleBasedStateMachine):
    @initialize(
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 8),
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 2, 4]),
        depth=st.integers(0, 3),
        prefix_caching=st.booleans(),
        policy=st.sampled_from(POLICIES),
        chunked_prefill=st.sampled_from([True, True, False]),
        max_partial_prefills=st.integers(0, 2),
        threshold=st.sampled_from([0, 0, 3, 8]),
        seconds=st.sampled_from([None, 200.0, 700.0, 1500.0]),
        model=models,
    )
    def start(
        self,
        budget: int,
        depth: int,
        chunked_prefill: bool,
        threshold: int,
        seconds: float | None,
        model: StepTimeModel,
        **options: int,
    ) -> None:
        if not chunked_prefill:
            budget, seconds = budget + 24, None  # holds most prompts; the others are refused
        elif seconds is not None:
            budget += 24  # time is to be what is short
        self.engine = SimulatedEngine(
            budget=budget,
            depth=depth,
            chunked_prefill=chunked_prefill,
            long_prefill_token_threshold=threshold,
            token_budget=TokenBudget(budget, seconds, None if seconds is None else model),
            **options,
        )
        self.patience = Patience(self.engine)

    # Few different beginnings, so that prompts share prefixes.
    @rule(
        first=st.sampled_from([10, 11, 20]),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
    )
    def arrive(self, first: int, length: int, max_tokens: int, priority: int, salt: str | None) -> None:
        pool = self.engine.scheduler.pool
        limits = self.engine.scheduler.limits
        most = length + max_tokens - 1
        fits = pool.blocks_for(most) <= pool.num_blocks
        fits = fits and (limits.chunked_prefill or most <= limits.max_num_batched_tokens)
        try:
            self.engine.add([first + i % 7 for i in range(length)], max_tokens, priority, salt)
            assert fits
        except InvalidRequest:
            assert not fits

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.scheduler.finish(data.draw(st.sampled_from(self.engine.requests)), "abort")

    @rule()
    def plan(self) -> None:
        scheduler = self.engine.scheduler
        decoding = {r.id for r in scheduler.running if r.phase is Phase.DECODE and r.num_outputs < r.max_tokens}
        preempted = scheduler.counters.preemptions
        self.patience.before()
        plan = self.engine.plan()
        if plan is None:
            assert self.engine.frames or not scheduler.has_work, "nothing is in flight, and nothing was planned"
            return
        self.patience.after(plan)
        if not scheduler.limits.chunked_prefill:
            assert not (plan.chunks and plan.num_decodes), "a step is either prompts or decodes"
            assert all(chunk.sample for chunk in plan.chunks), "a prompt was cut"
        decodes_go_first = scheduler.limits.chunked_prefill or not plan.chunks
        if decodes_go_first and scheduler.pool.num_free and scheduler.counters.preemptions == preempted:
            assert plan.num_decodes >= len(decoding), "a decode was left out although there was room"

    @rule(slower=st.sampled_from([1.0, 1.0, 1.3, 3.0]))
    def result(self, slower: float) -> None:
        self.engine.result(slower)

    @rule()
    def lose(self) -> None:
        self.engine.lose()
        self.patience.waits = None
        assert not self.engine.scheduler.running
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_blocks

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check_outputs()


Histories.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_small_requests_without_end_do_not_starve_a_large_one(policy: str, chunked_prefill: bool) -> None:
    """The small ones would always find room, the large one only if they are held back for it."""
    engine = SimulatedEngine(
        budget=80, num_blocks=20, depth=2, policy=policy, chunked_prefill=chunked_prefill, prefix_caching=False
    )
    patience, rng, large, done = Patience(engine), random.Random(1), [], 0
    for _ in range(600):
        if not large or large[-1].finish_reason:
            large.append(engine.add([rng.randint(50, 90)] * 60, max_tokens=2))
        while len(engine.scheduler.waiting) < 4:
            engine.add([rng.randint(0, 40)] * rng.randint(1, 8), max_tokens=rng.randint(4, 9))
        patience.before()
        plan = engine.plan()
        if plan is None:
            engine.result()
        else:
            patience.after(plan)
        done = sum(request.finish_reason is not None for request in large)
    assert 5 <= done <= 100
    engine.run()
    engine.check_outputs()
