"""A rank and an engine without a model, for testing the scheduler.

Like real keys and values, what the simulated KV cache holds for a token depends on all tokens before it, and the next
token is a hash of the whole context as read through the block table. Whatever goes wrong with blocks, rows, deltas,
order or sharing therefore changes the tokens.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import numpy as np

from scheduler.blocks import BlockPool
from scheduler.budget import TokenBudget
from scheduler.frame import StepResult, decode_plan, encode_plan
from scheduler.limits import Limits
from scheduler.params import SamplingParams
from scheduler.plan import StepPlan
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from workers.state import Rows

END = 7  # the simulated model's end token
POISON = -1


def entry(before: int, token: int) -> int:
    """What the cache holds for a token after the one whose entry is `before`."""
    return zlib.crc32(f"{before} {token}".encode())


def next_token(context: list[int]) -> int:
    return zlib.crc32(np.array(context, np.int64).tobytes()) % 40


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request alone would get."""
    context: list[int] = []
    output: list[int] = []
    for token in prompt:
        context.append(entry(context[-1] if context else 0, token))
    while len(output) < max_tokens:
        output.append(next_token(context))
        context.append(entry(context[-1], output[-1]))
        if output[-1] == END:
            break
    return output


class SimulatedRank:
    """Carries out plans as a worker does."""

    def __init__(self, limits: Limits, num_blocks: int, block_size: int, max_blocks: int) -> None:
        self.rows = Rows(limits.num_rows, max_blocks, block_size)
        self.block_size = block_size
        self.cache = np.full((num_blocks, block_size), POISON, np.int64)
        self.last = np.zeros(limits.num_rows, np.int64)

    def run(self, plan: StepPlan) -> list[int]:
        rows = self.rows
        rows.apply(plan)
        sampled = []
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                self._write(chunk.row, position, rows.tokens[chunk.row][position])
            if chunk.sample:
                sampled.append((chunk.row, chunk.start + chunk.length))
        for row in rows.decoding:
            self._write(row, rows.computed[row], self.last[row])
            sampled.append((row, rows.computed[row] + 1))
        tokens = [next_token(self._context(row, length)) for row, length in sampled]
        for (row, _), token in zip(sampled, tokens, strict=True):
            self.last[row] = token
        rows.advance(plan)
        return tokens

    def _write(self, row: int, position: int, token: int) -> None:
        assert position // self.block_size < self.rows.num_blocks[row], "a token without a block"
        self.cache[self._slot(row, position)] = entry(
            self.cache[self._slot(row, position - 1)] if position else 0, token
        )

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        return self.rows.block_table[row, position // self.block_size], position % self.block_size

    def _context(self, row: int, length: int) -> list[int]:
        blocks = self.rows.block_table[row, : -(-length // self.block_size)]
        context = self.cache[blocks].ravel()[:length].tolist()
        assert POISON not in context, "a token was read that was never written"
        return context


class SimulatedEngine:
    """The engine loop in slow motion: the test decides when a step is planned and when a result comes in."""

    def __init__(
        self,
        *,
        budget: int,
        max_num_seqs: int = 8,
        num_blocks: int = 64,
        block_size: int = 4,
        depth: int = 0,
        prefix_caching: bool = True,
        token_budget: TokenBudget | None = None,
        **limits: Any,
    ) -> None:
        limits = Limits(budget, max_num_seqs, **limits)
        self.depth = depth
        pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(limits, pool, prefix_caching=prefix_caching, budget=token_budget)
        self.rank = SimulatedRank(limits, num_blocks, block_size, num_blocks)
        self.frames: deque[bytes] = deque()
        self.touched: deque[set[int]] = deque()  # blocks that each step in flight reads or writes
        self.plans: list[StepPlan] = []
        self.requests: list[Request] = []

    def add(self, prompt: list[int], max_tokens: int = 4, priority: int = 0, salt: str | None = None) -> Request:
        request = Request(
            id=f"r{len(self.requests)}",
            tokens=list(prompt),
            params=SamplingParams(cache_salt=salt, priority=priority),
            max_tokens=max_tokens,
            stop_ids=frozenset({END}),
            seed=0,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def plan(self) -> StepPlan | None:
        """Plans a step if another may be in flight."""
        if len(self.frames) >= max(1, self.depth):
            return None
        plan = self.scheduler.schedule()
        if plan is not None:
            shared = {admission.row: admission.computed // self.rank.block_size for admission in plan.admissions}
            for row, blocks in plan.new_blocks:
                # Blocks shared by the prefix cache come first and are only read; all others will be written.
                written = set(blocks[shared.pop(row, 0) :])
                assert not any(written & touched for touched in self.touched), "a block of a step in flight"
            frame = encode_plan(plan)
            assert decode_plan(frame) == plan
            self.frames.append(frame)
            rows = {chunk.row for chunk in plan.chunks} | set(self.scheduler._decoding.requests)
            taking_part = [request for request in self.scheduler.running if request.row in rows]
            self.touched.append({block for request in taking_part for block in request.blocks})
            self.plans.append(plan)
            self.check(plan)
        return plan

    def result(self, slower: float = 1.0) -> None:
        """Carries out the oldest step in flight and takes its result in. slower: times what the model predicted."""
        if self.frames:
            plan = decode_plan(self.frames.popleft())
            tokens = self.rank.run(plan)
            self.touched.popleft()
            entry = self.scheduler.in_flight[0]
            if entry.predicted:
                self.scheduler.budget.observe(entry.work, entry.predicted * slower)
            self.scheduler.update(StepResult(plan.epoch, plan.step, tokens, 0.0), 0)
            self.scheduler.check()

    def lose(self) -> None:
        """The workers are lost: steps in flight never end, and others begin with empty caches."""
        self.frames.clear()
        self.touched.clear()
        scheduler, pool = self.scheduler, self.scheduler.pool
        self.rank = SimulatedRank(scheduler.limits, pool.num_blocks, pool.block_size, pool.num_blocks)
        self.scheduler.next_epoch()

    def run(self, max_steps: int = 10_000) -> None:
        """Runs until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            while self.plan() is not None:
                pass
            assert self.frames, "work is left, nothing is in flight, and nothing can be planned"
            self.result()
        raise AssertionError(f"not done after {max_steps} steps")

    def check(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.limits.num_rows
        self.scheduler.check()

    def check_outputs(self) -> None:
        """Every request that was not aborted got what it would have got alone, and all blocks are free."""
        for request in self.requests:
            if request.finish_reason != "abort":
                expected = expected_output(request.tokens[: request.num_prompt], request.max_tokens)
                assert request.output_token_ids == expected
                assert request.finish_reason == ("stop" if expected[-1] == END else "length")
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
