"""Whether whoever owns a service is still there."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from driver.awake import AwakeClock
from driver.wire import SILENCE_SECONDS

OWNER_SECONDS = 10.0  # an owner of this machine that says nothing for so long is gone, unless its process is seen
DISTANT_SECONDS = 60.0  # the same of one whose process cannot be seen from here: the network may be what is gone


@dataclass(frozen=True, slots=True)
class OwnerProcess:
    """The process that owns a service. machine: from where its pid means something; created: no other has both."""

    machine: str
    pid: int
    created: float

    @classmethod
    def this(cls) -> OwnerProcess:
        return cls(this_machine(), os.getpid(), psutil.Process().create_time())

    def lives(self) -> bool:
        """For callers on its machine."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class OwnerWatch:
    """Judges an owner by its handle's messages and, where it can be seen, by its process.

    A process that is stopped, or swapped out, says nothing, and is no reason to end what it will go on to use.
    """

    def __init__(self, owner: OwnerProcess | None) -> None:
        """owner: None for one of whom nothing is known."""
        self._owner = owner if owner is not None and owner.machine == this_machine() else None
        self._patience = DISTANT_SECONDS if self._owner is None else OWNER_SECONDS
        self._clock = AwakeClock()  # stopped for a while, this process must not take that for the owner's silence
        self._seen_at, self._heard_at = 0.0, self._clock.now()

    @property
    def has_ended(self) -> bool:
        """Whether its process can be looked for from here, and is not there."""
        return self._owner is not None and not self._owner.lives()

    def is_gone(self, seen_at: float) -> bool:
        """To be asked several times a second. seen_at: when its last message came, by any clock, 0 while none did."""
        now = self._clock.now()
        if seen_at != self._seen_at:
            self._seen_at, self._heard_at = seen_at, now
        patience = self._patience if seen_at else self._patience + 2 * SILENCE_SECONDS
        if now - self._heard_at <= patience:
            return False
        return self._owner is None or self.has_ended


def this_machine() -> str:
    """What all processes have in common that see each other's pids: the running kernel and the namespace of pids."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, which has no such namespaces
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
