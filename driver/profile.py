"""A few dozen made-up steps on the real workers, to fit the step-time model before the first request comes.

    streams   8 short prompts, then decodes            -> fixed, sequences
    long      one long prompt in chunks of many sizes,
              the streams decoding beside it           -> tokens, prefill pairs
    after     the long one decodes with the streams    -> decode context

The steps go through a scheduler of their own in an epoch of their own; the engine's begins with fresh rows.
"""

from __future__ import annotations

import itertools
import logging
import time

from driver.awake import LONGEST_GAP, AwakeClock
from driver.executor import Executor, WorkerFailed
from driver.watchdog import Watchdog
from scheduler.blocks import BlockPool
from scheduler.budget import TokenBudget
from scheduler.frame import StepResult, encode_plan, tokens_crc
from scheduler.limits import Limits
from scheduler.params import SamplingParams
from scheduler.request import Phase, Request
from scheduler.scheduler import Scheduler
from scheduler.step import StepInFlight
from scheduler.step_time import StepTimeModel, StepWork

logger = logging.getLogger("quadriga.profile")

PROFILE_SECONDS = 3.0
STREAMS, STREAM_TOKENS = 8, 16
CHUNKS = (64, 16, 128, 32, 256)
LONGEST_PROMPT = 1024
WARM_UP_STEPS = 3
DECODE_STEPS = 4


class StepProfile:
    """Runs steps one at a time and remembers what they took."""

    def __init__(self, executor: Executor, limits: Limits, pool: BlockPool, watchdog: Watchdog, epoch: int = 0) -> None:
        self._executor = executor
        self._watchdog = watchdog
        self._clock = AwakeClock()
        self._pool = pool
        self._budget = TokenBudget(limits.max_num_batched_tokens)
        self._scheduler = Scheduler(limits, pool, epoch, prefix_caching=False, budget=self._budget)
        self._deadline = time.perf_counter() + PROFILE_SECONDS
        self.steps: list[tuple[StepWork, float]] = []

    def run(self, max_model_len: int) -> None:
        limits, pool = self._scheduler.limits, self._pool
        room = pool.num_blocks * pool.block_size
        each = min(STREAM_TOKENS, max_model_len // 2)
        # A quarter of the cache for the streams and what they will grow by, half of it for the long prompt.
        streams = max(1, min(STREAMS, limits.num_rows - 1, room // (4 * (each + 64))))
        requests = [self._add(each, min(max_model_len - each, room // 4)) for _ in range(streams)]
        self._steps(WARM_UP_STEPS)
        self.steps.clear()
        self._steps(DECODE_STEPS)
        length = min(LONGEST_PROMPT, max_model_len - DECODE_STEPS - 1, room // 2)
        if limits.num_rows > 1 and length > each:
            long = self._add(length, DECODE_STEPS + 1)
            for chunk in itertools.cycle(CHUNKS):
                if long.scheduled >= length or not self._step(chunk):
                    break
            self._steps(DECODE_STEPS)
            self._scheduler.finish(long, "abort")
        for request in requests[2:]:
            self._scheduler.finish(request, "abort")
        self._steps(DECODE_STEPS)

    def _add(self, length: int, max_tokens: int) -> Request:
        tokens = [token % 97 for token in range(length)]
        request = Request(f"profile-{length}", tokens, SamplingParams(temperature=0), max_tokens, frozenset(), 0)
        self._scheduler.add(request)
        return request

    def _steps(self, count: int) -> None:
        for _ in range(count):
            if not self._step(self._scheduler.limits.max_num_batched_tokens):
                return

    def _step(self, prefill_tokens: int) -> bool:
        """Runs one step with at most so much prefill. False when time is up or there is nothing to do."""
        scheduler = self._scheduler
        decodes = sum(request.phase is Phase.DECODE for request in scheduler.running)
        self._budget.max_tokens = min(scheduler.limits.max_num_batched_tokens, decodes + prefill_tokens)
        began = time.perf_counter()
        plan = scheduler.schedule() if began < self._deadline else None
        if plan is None:
            return False
        self._executor.publish(encode_plan(plan))
        result = self._receive(scheduler.in_flight[0])
        self.steps.append((scheduler.in_flight[0].work, time.perf_counter() - began))
        scheduler.update(result, tokens_crc(result.tokens))
        return True

    def _receive(self, step: StepInFlight) -> StepResult:
        began, waited, model = self._clock.now(), 0.0, self._budget.model
        while True:
            next_look = self._watchdog.next_look(step, model, waited)
            result = self._executor.receive(min(max(0.0, next_look - waited), LONGEST_GAP / 2))
            if result is not None:
                return result
            waited = self._clock.now() - began
            if waited >= next_look and self._watchdog.hangs(step, model, waited, self._executor):
                raise WorkerFailed(f"step {step.step} of the profile took longer than {waited:.1f} s")


def profile_steps(
    executor: Executor,
    limits: Limits,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    watchdog: Watchdog,
    epoch: int = 0,
) -> StepTimeModel:
    """A step-time model fitted to at most PROFILE_SECONDS of steps. The executor's epoch is used up by it.

    Raises WorkerFailed when a rank is lost meanwhile.
    """
    profile = StepProfile(executor, limits, BlockPool(num_blocks, block_size), watchdog, epoch)
    profile.run(max_model_len)
    model = StepTimeModel()
    model.learn(profile.steps)
    if model.costs is None:
        logger.warning("only %d steps could be profiled; the token budget is fitted while it runs", len(profile.steps))
    else:
        costs = model.costs
        logger.info(
            "step time: %.1f ms + %.3f ms/token + %.3f ms/sequence + %.3f ms/1000 prefill pairs + "
            "%.3f ms/1000 tokens of decode context, from %d steps",
            *(value * 1e3 for value in (costs.fixed, costs.tokens, costs.sequences)),
            *(value * 1e6 for value in (costs.prefill_pairs, costs.decode_context)),
            len(profile.steps),
        )
    return model
