"""Faults on purpose, for tests: QUADRIGA_FAULT in the driver's environment, and nothing without it.

QUADRIGA_FAULT=rank:when:kind[,rank:when:kind ...]

when    a number: in the first epoch's step of that number
        load: while the weights are being loaded; reload: the same, in the process that replaces a lost one
        token=N: whenever a request that has token N is admitted, in every epoch
kind    kill (SIGKILL), stop (SIGSTOP), raise, memory (as if there were none left), hang (in this process's Python),
            nan (logits are not finite: of the request with the token, or of the first that is sampled in the step)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.plan import StepPlan

VARIABLE = "QUADRIGA_FAULT"
FIRST = -1
KINDS = ("kill", "stop", "raise", "memory", "hang", "nan")


class FaultError(ValueError):
    """QUADRIGA_FAULT does not say what it should."""


class InjectedFault(RuntimeError):
    """What a fault of kind `raise` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    rank: int
    when: str
    kind: str


def read_faults(text: str) -> tuple[Fault, ...]:
    """The faults that the variable's text stands for. Raises FaultError."""
    faults = []
    for item in filter(None, text.split(",")):
        rank, _, rest = item.partition(":")
        when, _, kind = rest.partition(":")
        known = when in ("load", "reload") or when.removeprefix("token=").isdigit()
        if not rank.isdigit() or not known or kind not in KINDS:
            raise FaultError(
                f"{VARIABLE} must be a list of rank:when:kind with when a step, token=N, load or reload and kind "
                f"one of {', '.join(KINDS)}; got {item!r}"
            )
        faults.append(Fault(int(rank), when, kind))
    return tuple(faults)


class Faults:
    """Those of one rank. generation: how many processes of this rank came before."""

    def __init__(self, faults: Sequence[Fault], rank: int, generation: int) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._generation = generation
        self._first_epoch: int | None = None

    def on_load(self) -> None:
        for fault in self._faults:
            if fault.when == ("reload" if self._generation == 1 else "load" if self._generation == 0 else ""):
                _commit(fault)

    def on_plan(self, plan: StepPlan) -> list[int]:
        """Rows whose logits are to be spoiled, FIRST for whichever comes first; other kinds of faults happen here."""
        spoiled: list[int] = []
        if self._first_epoch is None and self._generation == 0:
            self._first_epoch = plan.epoch
        for fault in self._faults:
            if fault.when.startswith("token="):
                token = int(fault.when.removeprefix("token="))
                rows = [admission.row for admission in plan.admissions if token in admission.tokens]
            else:
                rows = [FIRST] if fault.when == str(plan.step) and plan.epoch == self._first_epoch else []
            if fault.kind == "nan":
                spoiled += rows
            elif rows:
                _commit(fault)
        return spoiled


def _commit(fault: Fault) -> None:
    if fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif fault.kind == "raise":
        raise InjectedFault(f"rank {fault.rank} was told to fail, {fault.when}")
    elif fault.kind == "memory":
        raise MemoryError(f"rank {fault.rank} was told to run out of memory, {fault.when}")
    elif fault.kind == "hang":
        threading.Event().wait()
