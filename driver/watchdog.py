"""Notices a step that hangs, and writes down what everybody was doing."""

from __future__ import annotations

import faulthandler
import os
import pprint
import tempfile
from dataclasses import dataclass
from typing import IO

from driver.executor import Executor
from scheduler.frame import decode_plan
from scheduler.step import StepInFlight
from scheduler.step_time import StepTimeModel

PATIENCE = 20.0  # times what a step is expected to take
MOST_PLAN_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Watchdog:
    """floor_seconds: no step that takes less hangs. most_seconds: every step that takes longer does."""

    floor_seconds: float
    most_seconds: float

    def bound(self, step: StepInFlight, model: StepTimeModel, waited: float = 0.0) -> float:
        """Seconds that a step may take before `hangs` is asked. waited: seconds that it has taken so far."""
        if step.predicted is None:
            return min((waited // self.floor_seconds + 1) * self.floor_seconds, self.most_seconds)
        expected = PATIENCE * step.predicted
        if step.work.tokens > 2 * model.most_tokens:
            # A prediction so far beyond what was seen is a guess; one token after the other is the worst that can be.
            expected = max(expected, 2 * step.work.tokens * model.costs.smallest)
        return min(max(self.floor_seconds, expected), self.most_seconds)

    def hangs(self, step: StepInFlight, waited: float, executor: Executor) -> bool:
        """Whether a step beyond its bound hangs. While nothing is known of steps, a rank that answers may be slow."""
        known = step.predicted is not None or waited >= self.most_seconds
        return known or None in executor.stacks()

    def report(self, step: StepInFlight, frame: bytes, executor: Executor) -> str:
        """Writes the plan and the stacks of driver and ranks to a file. Returns its path."""
        descriptor, path = tempfile.mkstemp(prefix="quadriga-hang-", suffix=".txt")
        with os.fdopen(descriptor, "w+") as file:
            _heading(file, f"step {step.step} hangs: {step.work}, expected to take {step.predicted} s; newest plan")
            file.write(pprint.pformat(decode_plan(frame))[:MOST_PLAN_CHARACTERS])
            for rank, text in enumerate(executor.stacks()):
                _heading(file, f"rank {rank}")
                file.write(text or "it does not answer")
            _heading(file, "driver")
            file.flush()
            faulthandler.dump_traceback(file)
        return path


def _heading(file: IO[str], text: str) -> None:
    file.write(f"\n\n==== {text}\n\n")
