"""Random histories: arrivals, aborts, priorities, tiny caches, steps in flight, in any order."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.params import InvalidRequest
from scheduler.request import Phase
from tests.scheduler.simulated import SimulatedEngine


class Histories(RuleBasedStateMachine):
    @initialize(
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 8),
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 2, 4]),
        depth=st.integers(0, 3),
    )
    def start(self, budget: int, max_num_seqs: int, num_blocks: int, block_size: int, depth: int) -> None:
        self.engine = SimulatedEngine(
            budget=budget, max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=block_size, depth=depth
        )

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
        before = {r.id for r in scheduler.running if r.phase is Phase.DECODE and r.num_outputs < r.max_tokens}
        preempted = scheduler.counters.preemptions
        plan = self.engine.plan()
        mixed = scheduler.limits.chunked_prefill
        if mixed and plan is not None and scheduler.pool.num_free and scheduler.counters.preemptions == preempted:
            assert plan.num_decodes >= len(before), "a decode was left out although there was room"

    @rule()
    def result(self) -> None:
        self.engine.result()

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
