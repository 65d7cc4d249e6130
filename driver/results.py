"""What requests give back, to whoever asks: library, handle or server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from driver.engine import Update

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One request's result.

    finish_reason: "stop" (end token or stop string, named by stop_reason), "length", "abort", or "error".
    cached_tokens: prompt tokens that the prefix cache had.
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

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error


@dataclass(frozen=True, slots=True)
class Increment:
    """A piece of a stream; finish_reason is set in the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
