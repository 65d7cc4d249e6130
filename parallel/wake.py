"""Waking a thread that waits for sockets, from any other thread."""

from __future__ import annotations

import os
import threading


class WakePipe:
    """A thread polls `fileno()` with its sockets and calls `take` when that is readable; any other calls `wake`.

    What is handed over must be put in place before `wake` and looked at after `take`; then none is missed, however
    many wake-ups fall together. `wake` may come after `close`, and from a destructor while this thread is in here.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._woken = False  # a byte is in the pipe, or `take` is about to be done with it
        self._closed = False
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        if self._woken:
            return  # without a call to the system
        with self._lock:
            if not (self._woken or self._closed):
                self._woken = True
                os.write(self._write, b"w")

    def take(self) -> None:
        """Takes the wake-up; to be called when `fileno()` is readable."""
        os.read(self._read, 1)
        self._woken = False

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)
