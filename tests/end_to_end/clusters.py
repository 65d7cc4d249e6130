"""Ray clusters in processes of their own, on the loopback address and with a token, that leave nothing behind."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end.test_life import processes_naming, until

ROOT = Path(__file__).parents[2]
SECONDS = 60  # to start or to end, on a busy machine


def ray_environment(**more: str) -> dict[str, str]:
    """This process's environment for a cluster of its own. Ray replaces the loopback address without the switch."""
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "2",
    }
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**environment, "PYTHONPATH": str(ROOT), **own, **more}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def short_folder() -> Iterator[Path]:
    """For Ray's files. All processes that use it must be gone at the end, and it goes with them."""
    folder = Path(tempfile.mkdtemp(prefix="q", dir="/tmp"))
    try:
        yield folder
        assert until(lambda: not processes_naming(folder), 15), processes_naming(folder)
    finally:
        cleaner = [sys.executable, str(ROOT / "driver" / "cleaner.py"), str(folder)]
        subprocess.run(cleaner, stdin=subprocess.DEVNULL, check=True, timeout=SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def two_nodes(head: Sequence[str], other: Sequence[str], **environment: str) -> Iterator[dict[str, str]]:
    """Two nodes; see two_nodes.py. Gives the environment in which programs find them."""
    environment = ray_environment(**environment)
    with short_folder() as folder:
        command = [sys.executable, "-m", "tests.end_to_end.two_nodes", str(folder), *head, "/", *other]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, text=True, cwd=ROOT, **pipes)
        try:
            address = process.stdout.readline().strip()
            assert address, "the two nodes could not be started"
            yield {**environment, "RAY_ADDRESS": address}
        finally:
            process.stdin.close()
            process.wait(timeout=SECONDS)
            process.stdout.close()


def python(*words: str, environment: Mapping[str, str], seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` from the project's folder."""
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds
    )
