"""The token budget of a step: a constant, or what holds a target for the time between tokens.

With a target, the budget of each step is solved from the step-time model: the decodes are in the step whatever they
cost, and prefill gets the tokens that fit in the time they leave. A chunk behind a long context costs more per token
and so becomes smaller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from scheduler.step_time import OUTLIER, StepCosts, StepTimeModel, StepWork, chunk_pairs

MIN_PREFILL_TOKENS = 16  # a step's prefill advances by this much even where the target cannot be held
RECENT_MIXED = 15  # steps that tell how much slower than the model's costs the next one may turn out
ROOM = 1.06  # for what the recent steps did not show


@dataclass(slots=True)
class StepBudget:
    """What is left for prefill in the step being put together.

    tokens: at most. seconds: at most, None where no decode waits or nothing is to be held.
    reserve: tokens that prefill may have however little time is left, until it has had some.
    solved: prefill tokens granted when first asked, for the trace. forced: the reserve was needed.
    """

    tokens: int
    seconds: float | None = None
    costs: StepCosts | None = None
    reserve: int = 0
    solved: int | None = None
    forced: bool = False

    @property
    def granted(self) -> int:
        """Prefill tokens that the step could have had."""
        return self.tokens if self.solved is None else self.solved

    def chunk_limit(self, start: int, begun: bool = False) -> int:
        """Tokens that a chunk behind `start` others may have. begun: it prolongs one that is in the step already."""
        limit = self.tokens
        if self.seconds is not None:
            seconds = self.seconds if begun else self.seconds - self.costs.sequences
            # A hair more than the root, so that a budget solved for n tokens does not come out as n - 1.
            in_time = self.costs.longest_chunk(start, seconds) * (1 + 1e-9)
            # A crumb is not worth a sequence's costs, unless prefill would stand still.
            if not begun and in_time < min(MIN_PREFILL_TOKENS, self.tokens):
                in_time = self.reserve
            limit = int(min(in_time, self.tokens))
        if self.solved is None:
            self.solved = limit
        return limit

    def spend(self, start: int, length: int, begun: bool = False) -> None:
        """Books a chunk, or what prolongs one."""
        self.tokens -= length
        if self.seconds is not None:
            self.seconds -= self.costs.tokens * length + self.costs.prefill_pairs * chunk_pairs(start, length)
            self.seconds -= 0.0 if begun else self.costs.sequences
            self.forced |= self.seconds < -1e-6
            self.reserve = 0


class TokenBudget:
    """Makes each step's StepBudget, and learns from what the steps took.

    max_tokens: of a step, whatever the target. target_seconds: the longest step while requests decode, None for any.
    """

    def __init__(
        self, max_tokens: int, target_seconds: float | None = None, model: StepTimeModel | None = None
    ) -> None:
        self.max_tokens = max_tokens
        self.target_seconds = target_seconds
        self.model = model or StepTimeModel()
        self._slowness = Slowness()
        for work, seconds in self.model.samples():
            self._learn_slowness(work, seconds)

    def for_step(self, num_decodes: int, decode_context: int) -> StepBudget:
        """What is left for prefill beside these decodes. decode_context: as in StepWork."""
        budget = StepBudget(self.max_tokens - num_decodes)
        costs = self.model.costs
        if self.target_seconds is not None and num_decodes and costs is not None:
            allowed = self.target_seconds / max(self._slowness.expected, self.model.drift)
            budget.seconds = allowed - costs.seconds(StepWork(num_decodes, num_decodes, 0, decode_context))
            budget.costs = costs
            budget.reserve = MIN_PREFILL_TOKENS
        return budget

    def predict(self, work: StepWork) -> float | None:
        """Seconds that a step with this work should take, or None while nothing is known."""
        return self.model.predict(work)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a step and the seconds that it took."""
        self._learn_slowness(work, seconds)
        self.model.observe(work, seconds)

    def _learn_slowness(self, work: StepWork, seconds: float) -> None:
        if self.target_seconds is not None and work.is_mixed and self.model.costs is not None:
            self._slowness.add(seconds / max(self.model.costs.seconds(work), 1e-9))


class Slowness:
    """How many times the model's costs the next step in which decodes wait for prefill may take.

    As many as the slowest of the recent ones; a single one far slower than its like is a hiccup and tells nothing, a
    second one does. When the newest are slower than those before, the machine has just become slower, and the same
    spread is expected around its new pace.

    expected: 1 before the first step.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque([1.0] * RECENT_MIXED, maxlen=RECENT_MIXED)
        self.expected = 1.0

    def add(self, ratio: float) -> None:
        """Takes in a step that took `ratio` times what the model's costs say."""
        self._ratios.append(ratio)
        *before, one, two, three = self._ratios
        pace, spread = median((one, two, three)), _slowest(before) / median(before)
        self.expected = ROOM * max(_slowest(self._ratios), pace * spread)


def _slowest(ratios: Iterable[float]) -> float:
    *_, second, largest = sorted(ratios)
    return largest if largest <= OUTLIER * second else second
