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
    """floor_seconds: no step that takes less hangs; then the ranks are asked, again and again.

    most_seconds: every step that takes longer hangs.
    """

    floor_seconds: float
    most_seconds: float

    def next_look(self, step: StepInFlight, model: StepTimeModel, waited: float = 0.0) -> float:
        """When `hangs` is to be asked: after so many seconds of the step. waited: those that it has taken so far."""
        return min((waited // self.floor_seconds + 1) * self.floor_seconds, self._limit(step, model))

    def hangs(self, step: StepInFlight, model: StepTimeModel, waited: float, executor: Executor) -> bool:
        """Whether a step that has taken so long hangs: it is over its limit, or a rank does not even answer.

        A rank that answers may be slow, as far as the model tells; no limit of a model holds for one that does not.
        """
        return waited >= self._limit(step, model) or None in executor.stacks()

    def _limit(self, step: StepInFlight, model: StepTimeModel) -> float:
        """Seconds after which a step hangs even if all ranks answer."""
        if step.predicted is None:
            return self.most_seconds
        expected = PATIENCE * step.predicted
        if step.work.tokens > 2 * model.most_tokens:
            # A prediction so far beyond what was seen is a guess; one token after the other is the worst that can be.
            expected = max(expected, 2 * step.work.tokens * model.costs.smallest)
        return min(max(self.floor_seconds, expected), self.most_seconds)

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
