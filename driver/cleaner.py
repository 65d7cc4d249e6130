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


def processes_of(folder: str, spared: set[int]) -> set[int]:
    """Processes of the Ray in `folder`: they name it on their command line, or have put a title of Ray's there and hold
    a file in it open. Who only holds a file is a client of that Ray, and somebody else's."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                names = os.fsdecode(file.read()).split("\0")
            if names[0].startswith("ray::"):
                descriptors = f"/proc/{entry}/fd"
                names += [os.readlink(f"{descriptors}/{descriptor}") for descriptor in os.listdir(descriptors)]
        except OSError:
            continue  # it ended while we looked, or is another user's
        if any(f"{folder}/" in name or name.endswith(folder) for name in names):
            found.add(int(entry))
    return found - spared


def main() -> None:
    folder = sys.argv[1]
    spared = {os.getpid(), os.getppid()}  # a driver that ends in good order may still have its log open
    sys.stdin.read()
    started = time.monotonic()
    while time.monotonic() < started + LIMIT_SECONDS and (left := processes_of(folder, spared)):
        late = time.monotonic() > started + GRACE_SECONDS
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            except (ProcessLookupError, PermissionError):  # it has ended, or is another user's that names the folder
                continue
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
