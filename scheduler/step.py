"""A step while it is put together, and after it was published; what steps add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.budget import StepBudget
from scheduler.frame import StepExtras
from scheduler.plan import StepPlan
from scheduler.request import Phase, Request
from scheduler.step_time import StepWork


@dataclass(slots=True)
class StepInFlight:
    """A published plan whose result is awaited.

    sampled: the requests whose tokens it samples, in the result's order.
    filled: (request, its preemptions so far, tokens computed after this step) where a block border is reached.
    chunks: the requests whose prompts it computes, in the plan's order.
    predicted: seconds that it should take, None while the step-time model knows nothing. budget: tokens it could have.
    """

    step: int
    sampled: list[Request]
    filled: list[tuple[Request, int, int]]
    chunks: list[Request]
    work: StepWork
    predicted: float | None
    budget: int


def take_extras(entry: StepInFlight, extras: StepExtras) -> list[tuple[Request, str]]:
    """Hands the log probabilities that came with the step's result to their requests. Returns those that failed."""
    for place, logprobs in extras.logprobs:
        request = entry.sampled[place]
        if request.phase is not Phase.FINISHED:
            request.logprobs.append(logprobs)
    for chunk, first, entries in extras.prompt_logprobs:
        known = entry.chunks[chunk].prompt_logprobs
        if first > len(known):
            raise RuntimeError(
                f"step {entry.step} scores prompt tokens from {first} on, but only {len(known)} are known"
            )
        # What was in flight when the request was preempted may come a second time.
        known += entries[len(known) - first :]
    return [(entry.sampled[place], reason) for place, reason in extras.failures]


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    not_finite: requests that failed because their logits were not finite.
    late_steps: steps whose decodes left prefill no time under the target TBT, so that it took the minimum anyway.
    """

    steps: int = 0
    late_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    discarded_tokens: int = 0
    not_finite: int = 0


@dataclass(slots=True)
class BegunChunk:
    """A chunk being put together."""

    request: Request
    start: int
    length: int


@dataclass(slots=True)
class Draft:
    """The step being put together. budget: what is left for prefill, once the decodes are known."""

    plan: StepPlan
    budget: StepBudget = field(init=False)
    chunks: list[BegunChunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    preempted: bool = False
