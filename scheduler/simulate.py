"""Discrete-event simulation: the scheduler as it is, and a formula in the place of the device.

A virtual clock jumps from event to event, and nothing waits. Events are a request that arrives and a step that ends.
Between them the loop does what the engine's does: it plans as long as fewer steps are in flight than may be. Steps run
one after another; one that was planned early knows only what was known then.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler.frame import StepResult
from scheduler.params import InvalidRequest, SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.step_time import StepTimeModel, StepWork, chunk_pairs

StepSeconds = Callable[[StepWork, int], float]  # of a step with this work that samples so many tokens

TOKEN = 0  # every prompt and every answer is made of it
NEVER = float("inf")

# What `profiled` runs: decodes, each with this context, beside a chunk of each length behind each start.
PROFILE_DECODES, PROFILE_CONTEXT = (32, 1, 128, 8), 1024
PROFILE_CHUNKS, PROFILE_STARTS = (256, 0, 1024, 64, 512, 2048), (0, 4096)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: when, in seconds, how long its prompt is, and how many tokens it is going to get."""

    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What became of a request. token_times: when each of its tokens was there, in seconds on the arrivals' clock.

    refusal: why it was not served, None if it was.
    """

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    refusal: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.token_times[0] - self.arrival.at

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that ran from start to end, in seconds, and what was planned for it.

    sampled: tokens that came out of it. running, waiting: requests after planning.
    predicted: seconds that the step-time model expected, None while it knew nothing.
    """

    start: float
    end: float
    work: StepWork
    prefill_tokens: int
    sampled: int
    predicted: float | None
    running: int
    waiting: int


class Simulation:
    """One run of a scheduler whose prefix cache is off: as all prompts are alike, it would find all of them.

    step_seconds: what a step takes on the device.
    async_depth: steps in flight at once, as in the engine; 0 counts as 1.
    driver_seconds: from planning a step until the device can begin it; hidden while another step runs.
    """

    def __init__(
        self, scheduler: Scheduler, step_seconds: StepSeconds, async_depth: int = 2, driver_seconds: float = 0.0
    ) -> None:
        self.scheduler = scheduler
        self.outcomes: list[Outcome] = []
        self.steps: list[SimulatedStep] = []
        self._step_seconds = step_seconds
        self._max_in_flight = max(1, async_depth)
        self._driver_seconds = driver_seconds
        self._now = 0.0
        self._device_free = 0.0
        self._last_done = 0.0
        self._in_flight: deque[tuple[float, SimulatedStep]] = deque()  # with the time of planning
        self._live: dict[str, Outcome] = {}

    def run(self, arrivals: Iterable[Arrival], on_end: Callable[[], None] = lambda: None) -> None:
        """Runs until every request has ended. on_end is called whenever one has, or is refused."""
        coming = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        while coming or self.scheduler.has_work:
            if coming and coming[0].at <= self._now:
                self._add(coming.popleft(), on_end)
                continue
            self._plan_ahead()
            arrives = coming[0].at if coming else NEVER
            ends = self._in_flight[0][1].end if self._in_flight else NEVER
            if arrives == ends == NEVER:
                raise RuntimeError("work is left, nothing is in flight, and nothing can be planned")
            self._now = min(arrives, ends)
            if ends <= arrives:
                self._take_result(on_end)

    def _add(self, arrival: Arrival, on_end: Callable[[], None]) -> None:
        number = len(self.outcomes)
        outcome = Outcome(arrival)
        self.outcomes.append(outcome)
        prompt = [TOKEN] * arrival.prompt_tokens
        request = Request(f"r{number}", prompt, SamplingParams(temperature=0), arrival.output_tokens, frozenset(), 0)
        try:
            self.scheduler.add(request)
        except InvalidRequest as error:
            outcome.refusal = str(error)
            on_end()
            return
        self._live[request.id] = outcome

    def _plan_ahead(self) -> None:
        scheduler = self.scheduler
        while len(self._in_flight) < self._max_in_flight:
            plan = scheduler.schedule()
            if plan is None:
                return
            entry = scheduler.in_flight[-1]
            start = max(self._device_free, self._now + self._driver_seconds)
            self._device_free = start + self._step_seconds(entry.work, len(entry.sampled))
            step = SimulatedStep(
                start,
                self._device_free,
                entry.work,
                plan.num_prefill_tokens,
                len(entry.sampled),
                entry.predicted,
                len(scheduler.running),
                len(scheduler.waiting),
            )
            self._in_flight.append((self._now, step))

    def _take_result(self, on_end: Callable[[], None]) -> None:
        scheduler, entry = self.scheduler, self.scheduler.in_flight[0]
        planned, step = self._in_flight.popleft()
        self.steps.append(step)
        # What the engine can measure: from when the workers could begin the step to its result.
        seconds, self._last_done = step.end - max(planned, self._last_done), step.end
        scheduler.budget.observe(entry.work, seconds)
        result = StepResult(scheduler.epoch, entry.step, [TOKEN] * len(entry.sampled), seconds)
        for request, _ in scheduler.update(result, 0):
            self._live[request.id].token_times.append(self._now)
            if request.finish_reason is not None:
                del self._live[request.id]
                on_end()


def profiled(step_seconds: StepSeconds) -> StepTimeModel:
    """A step-time model fitted to a few steps of each kind, as the engine has one after its start."""
    steps = []
    for decodes, start, chunk in itertools.product(PROFILE_DECODES, PROFILE_STARTS, PROFILE_CHUNKS):
        sequences = decodes + (chunk > 0)
        work = StepWork(decodes + chunk, sequences, chunk_pairs(start, chunk), decodes * PROFILE_CONTEXT)
        steps.append((work, step_seconds(work, sequences)))
    model = StepTimeModel()
    model.learn(steps)
    return model
