"""What the engine counts of requests and steps, for /metrics and `quadriga top`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Upper bounds in seconds. From a token of a small model to a prompt that waited long in the queue.
WAIT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
WHOLE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Numbers of values up to each bound, and above the last; their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> dict[str, Any]:
        """bounds; counts, one more, each of its own range; sum."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


@dataclass(slots=True)
class Figures:
    """Written by the engine's thread alone; others may look at any time.

    ended: requests by finish reason. budget, step_tokens: tokens that the newest step could and did have.
    """

    ttft: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    tbt: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE_BOUNDS))
    step: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    generated: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    budget: int = 0
    step_tokens: int = 0
    # Of the step whose tokens are being told: rows by when their last token came, which is the same for most.
    _since: dict[float, int] = field(default_factory=dict)

    def took_step(self, seconds: float, budget: int, tokens: int) -> None:
        self.step.add(seconds)
        self.budget, self.step_tokens = budget, tokens

    def told_token(self, asked_at: float, told_at: float, now: float) -> None:
        """A request's token. told_at: when its last one came, 0 for the first. End the step with `told_step`."""
        self.generated += 1
        if told_at:
            self._since[told_at] = self._since.get(told_at, 0) + 1
        else:
            self.ttft.add(now - asked_at)

    def told_step(self, now: float) -> None:
        for told_at, rows in self._since.items():
            self.tbt.add(now - told_at, rows)
        self._since.clear()

    def ended_request(self, reason: str, seconds: float) -> None:
        self.ended[reason] = self.ended.get(reason, 0) + 1
        self.whole.add(seconds)

    def snapshot(self) -> dict[str, Any]:
        """Plain values, for stats."""
        return {
            "generated_tokens": self.generated,
            "ended_requests": dict(self.ended),
            "step_budget": self.budget,
            "step_tokens": self.step_tokens,
            "histograms": {name: getattr(self, name).snapshot() for name in ("ttft", "tbt", "whole", "step")},
        }
