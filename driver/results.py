"""What requests give back, to whoever asks: library, handle or server."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from driver.engine import Update
from scheduler.logprobs import TokenLogprobs

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One request's result.

    finish_reason: "stop" (end token or stop string, named by stop_reason), "length", "abort", or "error".
    cached_tokens: prompt tokens that the prefix cache had.
    logprobs: of the output tokens, one each. prompt_logprobs: of the prompt's, None for the first token. None where
    they were not asked for, or the request ended before they were known.
    error: why the request failed; None otherwise.
    ttft_s: seconds from submission to the first token. mean_tbt_s: mean seconds between tokens. None without tokens.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None
    submitted: float = 0.0
    token_times: list[float] = field(default_factory=list, repr=False)

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.submitted if self.token_times else None

    @property
    def mean_tbt_s(self) -> float | None:
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def take(self, update: Update) -> None:
        self.text += update.text
        self.output_token_ids += update.token_ids
        self.token_times += [update.at] * len(update.token_ids)
        self.finish_reason, self.stop_reason, self.error = update.finish_reason, update.stop_reason, update.error
        self.cached_tokens = update.cached_tokens
        if update.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error


@dataclass(frozen=True, slots=True)
class Increment:
    """A piece of a stream; finish_reason is set in the last one.

    logprobs: of its tokens, one each. prompt_logprobs: in one piece, no later than the first token's.
    cached_tokens: as in Completion.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0

    @classmethod
    def of(cls, update: Update) -> Increment:
        """Raises what the request has failed with."""
        if update.error is not None:
            raise update.error
        return cls(
            update.text,
            update.token_ids,
            update.finish_reason,
            update.stop_reason,
            update.logprobs,
            update.prompt_logprobs,
            update.cached_tokens,
        )


class Stream:
    """An iterator over the increments of one request. Closing it early, or dropping it, aborts the request."""

    _ended = True  # nothing to abort, should it never have begun

    def __init__(self, request_id: str | int, updates: queue.SimpleQueue[Update], abort: Callable[[], None]) -> None:
        """request_id: what the `abort` of whoever made the stream takes. abort: ends the request if it still runs."""
        self.request_id, self._updates, self._abort = request_id, updates, abort
        self._ended = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Increment:
        if self._ended:
            raise StopIteration
        update = self._updates.get()
        self._ended = update.finish_reason is not None
        return Increment.of(update)

    def close(self) -> None:
        """Aborts the request if it is still running. May be called twice."""
        if not self._ended:
            self._ended = True
            self._abort()

    def __del__(self) -> None:
        self.close()
