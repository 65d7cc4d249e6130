"""Time as this process has lived it: who was stopped itself must not take that for the others' silence."""

from __future__ import annotations

import time

LONGEST_GAP = 1.0  # seconds between two looks that count at most; what is more, the process stood still


class AwakeClock:
    """Seconds, less those in which the process was stopped (SIGSTOP, a frozen container, Ctrl-Z in a shell).

    For one thread, which must look more often than every LONGEST_GAP while it waits for others.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        at = time.monotonic()
        self._now += min(at - self._looked_at, LONGEST_GAP)
        self._looked_at = at
        return self._now
