"""Work that one process of a machine does for all, and where its results lie: the others wait until it has."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("quadriga.locks")


def cache_root() -> Path:
    """$QUADRIGA_CACHE, else the user's cache folder."""
    named = os.environ.get("QUADRIGA_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "quadriga"


class LockTimeout(TimeoutError):
    """Another process has had the lock for too long; the message names it."""


@contextlib.contextmanager
def only_one(path: Path, seconds: float, doing: str) -> Iterator[None]:
    """Holds the lock of a file, which is made if need be. A process that dies frees it, one that hangs does not.

    doing: what it is held for, as in `process 5 has been converting x`. Raises LockTimeout after so many seconds.
    """
    deadline, said = time.monotonic() + seconds, False
    with open(path, "a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read() or "?"
            if time.monotonic() > deadline:
                raise LockTimeout(f"process {holder} has been {doing} for more than {seconds:g} s; end it if it hangs")
            if not said:
                logger.info("waiting for process %s, which is %s", holder, doing)
            said = True
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
