"""A record of every step, one JSON object a line, for `scripts/plot_steps.py` and for wondering people."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from driver.config import ConfigError
from scheduler.frame import StepResult
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler
from scheduler.step import StepInFlight

logger = logging.getLogger("quadriga.trace")


class StepTrace:
    """Writes a line when a step's result is in.

    Fields: epoch, step; published_s and done_s, seconds since the trace began; measured_s, from when the workers could
    begin the step to its result, predicted_s, what the step-time model expected (null while it knows nothing),
    worker_s, what rank 0 spent on it; prefill_tokens, decode_tokens, budget, which the step could have had;
    prefill_pairs and decode_context as in StepWork; chunks, [row, start, length] each; running, waiting and free_blocks
    after planning.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigError when the file cannot be written."""
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 open until the engine ends
        except OSError as error:
            raise ConfigError(f"cannot write the step trace {path}: {error}") from error
        self._broken = False
        self._began = time.perf_counter()
        self._pending: deque[dict[str, object]] = deque()

    def published(self, plan: StepPlan, scheduler: Scheduler) -> None:
        step = scheduler.in_flight[-1]
        self._pending.append(
            {
                "epoch": plan.epoch,
                "step": plan.step,
                "published_s": round(time.perf_counter() - self._began, 6),
                "prefill_tokens": plan.num_prefill_tokens,
                "decode_tokens": plan.num_decodes,
                "budget": step.budget,
                "prefill_pairs": step.work.prefill_pairs,
                "decode_context": step.work.decode_context,
                "chunks": [[chunk.row, chunk.start, chunk.length] for chunk in plan.chunks],
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "free_blocks": scheduler.pool.num_free,
            }
        )

    def done(self, step: StepInFlight, result: StepResult, seconds: float) -> None:
        line = self._pending.popleft()
        line["done_s"] = round(time.perf_counter() - self._began, 6)
        line["measured_s"] = round(seconds, 6)
        line["predicted_s"] = None if step.predicted is None else round(step.predicted, 6)
        line["worker_s"] = round(result.seconds, 6)
        if not self._broken:
            self._careful(lambda: self._file.write(json.dumps(line) + "\n"))

    def epoch_ended(self) -> None:
        """The results of the steps in flight will not come."""
        self._pending.clear()

    def close(self) -> None:
        self._careful(self._file.close)

    def _careful(self, write: Callable[[], object]) -> None:
        """A disk that is full ends the trace, not the engine."""
        try:
            write()
        except OSError as error:
            logger.error("the step trace %s is not complete: %s", self._file.name, error)
            self._broken = True
