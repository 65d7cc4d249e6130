"""Whether whoever owns a service is still there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from driver.wire import SILENCE_SECONDS

OWNER_SECONDS = 10.0  # an owner unheard of for so long is gone, unless its process can be seen
_LATE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class OwnerProcess:
    """The process that owns a service: its Ray node, pid, and when it was created, so that no other is taken for it."""

    node_id: str
    pid: int
    created: float

    @classmethod
    def this(cls, node_id: str) -> OwnerProcess:
        """The calling process, connected to the Ray node `node_id`."""
        return cls(node_id, os.getpid(), psutil.Process().create_time())

    def is_seen_from(self, node_id: str) -> bool:
        """Whether it lives, as far as can be told from a node: only its own node sees it."""
        if node_id != self.node_id:
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class OwnerWatch:
    """Judges an owner by its handle's messages and, where it can be seen, by its process.

    A process that is stopped, or swapped out, says nothing, and is no reason to end what it will go on to use.
    """

    def __init__(self, owner: OwnerProcess | None, node_id: str) -> None:
        """node_id: the Ray node of the calling process."""
        self._owner, self._node_id = owner, node_id
        self._began = self._looked_at = time.monotonic()

    def is_gone(self, seen_at: float) -> bool:
        """To be asked several times a second. seen_at: `time.monotonic()` of its last message, 0 while none came."""
        now = time.monotonic()
        if now - self._looked_at > _LATE_SECONDS:
            self._began = now  # it was this process that was stopped; messages may wait to be read
        self._looked_at = now
        patience = OWNER_SECONDS if seen_at else OWNER_SECONDS + 2 * SILENCE_SECONDS
        if now - max(seen_at, self._began) <= patience:
            return False
        return self._owner is None or not self._owner.is_seen_from(self._node_id)
