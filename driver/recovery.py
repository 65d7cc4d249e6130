"""What becomes of requests when an epoch ends: all go on, except one that ends every epoch it runs in.

A request is suspected when two epochs in a row have ended during its steps without a token of it in between. Suspects
are tried one at a time, and nobody else is started meanwhile: who gets a token is acquitted, and goes on beside the
next one; who is on trial when the next epoch ends is the cause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from driver.wire import RequestFailed
from scheduler.request import Request
from scheduler.scheduler import Scheduler

EPOCHS_TO_SUSPECT = 2
EPOCHS_IN_VAIN = 5  # in a row that may end before a step of theirs is done


class RequestPoisonous(RequestFailed):
    """The workers fail whenever this request runs; the others go on without it."""


@dataclass(slots=True)
class Recoveries:
    """restarts: epochs that ended and were followed by another. restart_seconds: that took, summed; last_seconds: of
    the last one. in_vain: epochs in a row that ended before a step of theirs was done.
    """

    restarts: int = 0
    restart_seconds: float = 0.0
    last_seconds: float = 0.0
    in_vain: int = 0
    recovering: bool = False

    @property
    def hopeless(self) -> bool:
        return self.in_vain >= EPOCHS_IN_VAIN

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.perf_counter()
        self.in_vain += 1
        self.recovering = True
        try:
            yield
        finally:
            self.recovering = False
        self.restarts += 1
        self.last_seconds = time.perf_counter() - began
        self.restart_seconds += self.last_seconds


@dataclass(slots=True)
class _Record:
    """epochs: that ended during the request's steps, in a row, while it had this many tokens."""

    num_tokens: int
    epochs: int = 0


class Suspects:
    """Finds the request that ends epochs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._records: dict[Request, _Record] = {}
        self._to_try: list[Request] = []

    def epoch_ended(self) -> list[Request]:
        """To be called before the scheduler's next epoch. Returns who is found guilty; they are to be failed."""
        touched = self._in_flight()
        records = {}
        for request in touched:
            record = self._records.get(request)
            if record is None or record.num_tokens != len(request.tokens):
                record = _Record(len(request.tokens))
            record.epochs += 1
            records[request] = record
        # Those that waited while another was tried remain suspected.
        for request in self._to_try:
            records.setdefault(request, self._records[request])
        guilty = [request for request in touched if request is self._scheduler.only]
        self._records = records
        self._to_try = [
            request
            for request, record in records.items()
            if record.epochs >= EPOCHS_TO_SUSPECT and request not in guilty
        ]
        self._try_next()
        return guilty

    def review(self) -> None:
        """To be called with every step's result while somebody is on trial."""
        request = self._scheduler.only
        if request is not None and (
            request.finish_reason is not None or len(request.tokens) > self._records[request].num_tokens
        ):
            self._records.pop(request)
            self._to_try.remove(request)
            self._try_next()

    def _try_next(self) -> None:
        self._to_try = [request for request in self._to_try if request.finish_reason is None]
        self._scheduler.only = self._to_try[0] if self._to_try else None

    def _in_flight(self) -> list[Request]:
        """Requests of the steps whose results were awaited."""
        if not self._scheduler.in_flight:
            return []
        oldest = self._scheduler.in_flight[0].step
        return [request for request in self._scheduler.running if request.last_step >= oldest]
