"""One request's whole life, told by a few counters.

    tokens     |<---- prompt ---->|<-- outputs received -->|<- sampled, in flight ->|
    scheduled  |-- keys and values computed or being computed --|
                                                                 ^ next to compute

A request whose scheduled count lags behind its known tokens has prefill left, however that came about: it is new,
its prompt is being chunked, or it was preempted and is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from scheduler.logprobs import TokenLogprobs
from scheduler.params import SamplingParams


class Phase(Enum):
    """Where a request stands. Only PREFILL and DECODE hold a row and blocks."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request as the scheduler sees it.

    tokens: prompt token ids followed by the output token ids received so far.
    max_tokens: new tokens at most, already bounded by the room in the context.
    stop_ids: token ids that end it, the model's end tokens included unless they are ignored.
    seed: 64-bit key of its random numbers.
    order: its place among requests, given by the scheduler; smaller is served first.
    num_prompt: how many of `tokens` are the prompt; None means all of them. The others are output of an earlier run.
    cached_tokens: prompt tokens whose keys and values the prefix cache had when it first started.
    logprobs: of its newest output tokens, for whoever passes them on to take out.
    prompt_logprobs: of its leading prompt tokens, as far as they are known; the first token has none.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    num_prompt: int | None = None

    order: tuple[float, int] = field(default=(0.0, 0), init=False)
    phase: Phase = field(default=Phase.WAITING, init=False)
    row: int = field(default=-1, init=False)
    blocks: list[int] = field(default_factory=list, init=False)
    scheduled: int = field(default=0, init=False)
    block_keys: list[bytes] = field(default_factory=list, init=False)  # of its leading full blocks, as far as known
    published: int = field(default=0, init=False)  # leading blocks offered to the prefix cache
    cached_tokens: int = field(default=0, init=False)
    in_flight: int = field(default=0, init=False)  # tokens being sampled by steps whose result is not in yet
    last_step: int = field(default=-1, init=False)  # the newest step that touches its blocks
    finish_reason: str | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    preemptions: int = field(default=0, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None], init=False)

    def __post_init__(self) -> None:
        if self.num_prompt is None:
            self.num_prompt = len(self.tokens)

    @property
    def is_scored(self) -> bool:
        """Whether all log probabilities of the prompt that were asked for are known."""
        return self.params.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_outputs(self) -> int:
        """Output tokens received or on their way."""
        return len(self.tokens) - self.num_prompt + self.in_flight

    @property
    def num_known(self) -> int:
        """Tokens received or on their way."""
        return len(self.tokens) + self.in_flight
