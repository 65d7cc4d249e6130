"""Outlives a driver that started a private Ray: ends what is left of that Ray and removes its folder.

Run as `python cleaner.py FOLDER` with a pipe as standard input; the pipe closes when the driver ends, however it ends.
Standard library only, so that it is up in a moment and small.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

GRACE_SECONDS = 2.0
LIMIT_SECONDS = 8.0


def processes_of(folder: str) -> set[int]:
    """Ray's processes that name `folder` on their command line, and all their descendants."""
    parents: dict[int, int] = {}
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if folder.encode() in file.read():
                    found.add(int(entry))
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return found - {os.getpid()}


def main() -> None:
    folder = sys.argv[1]
    sys.stdin.read()
    started = time.monotonic()
    known: set[int] = set()
    while time.monotonic() < started + LIMIT_SECONDS:
        # Descendants of a process that has died since are remembered: they would no longer be found by descent.
        known = {pid for pid in known if os.path.exists(f"/proc/{pid}")} | processes_of(folder)
        if not known:
            break
        late = time.monotonic() > started + GRACE_SECONDS
        for pid in known:
            try:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
