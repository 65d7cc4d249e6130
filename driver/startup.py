"""How far a service has come up, for whoever shows its start."""

from __future__ import annotations

from typing import Any

from driver.errors import is_input_fault
from driver.setup import Phases

STARTING, READY, FAILED = "starting", "ready", "failed"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # of every process of ours


class StartStatus:
    """`now` holds: state (starting, ready, failed); phase of the start and the share of it that is done, where known;
    seconds of the phases that are done; error and input_fault where it has failed."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"state": STARTING, "phase": "process", "share": None, "seconds": {}}

    @property
    def state(self) -> str:
        return self.now["state"]

    def begin(self, phase: str) -> None:
        self.now.update(phase=phase, share=None)

    def follow(self, phases: Phases) -> None:
        """Takes over what the phases of a start tell."""
        phases.on_begin = self.begin
        phases.on_share = lambda share: self.now.update(share=share)

    def ready(self, phases: Phases) -> None:
        self.now.update(state=READY, phase=None, share=None, seconds=dict(phases.times))

    def failed(self, error: BaseException) -> None:
        self.now.update(state=FAILED, error=str(error), input_fault=is_input_fault(error))
