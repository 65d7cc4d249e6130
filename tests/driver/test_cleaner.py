"""The cleaner ends what uses its folder once its driver is gone, and nothing else."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from driver import cleaner

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
RAYS_OWN = ["bash", "-c", "exec -a ray::IDLE sleep 60"]  # as Ray titles its workers
STUBBORN = [
    *(sys.executable, "-S", "-c"),
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
]
# A driver: holds a file of the folder open, starts the cleaner, says so, and ends in good order when told to.
DRIVER = """
import subprocess, sys
cleaner, folder = sys.argv[1:]
log = open(folder + "/driver.log", "w")
child = subprocess.Popen([sys.executable, "-S", cleaner, folder], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.readline()
child.stdin.close()
child.wait(20)
print("alive", flush=True)
"""

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def session() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quadriga-test-", ignore_cleanup_errors=True) as parent:
        session = Path(parent, "session")
        session.mkdir()
        yield session


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that end with the test."""
    started: list[subprocess.Popen] = []

    def start(command: list[str], **options: object) -> subprocess.Popen:
        started.append(subprocess.Popen(command, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def start_driver(start: Start, session: Path) -> tuple[subprocess.Popen, int]:
    """A driver and the process id of its cleaner."""
    driver = start(
        [sys.executable, "-S", "-c", DRIVER, cleaner.__file__, str(session)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return driver, int(driver.stdout.readline())


def holder(start: Start, session: Path, command: list[str] = RAYS_OWN) -> subprocess.Popen:
    """A process that has a file of the folder open and does not name it."""
    with open(session / "ray.log", "a") as file:
        process = start(command, stderr=file)
    time.sleep(0.2)  # until bash has become another
    return process


def wait_for_end(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (running := Path(f"/proc/{pid}").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running


def test_what_uses_the_folder_ends_and_the_rest_lives(start: Start, session: Path) -> None:
    driver, cleaner_pid = start_driver(start, session)
    holding, naming = holder(start, session), start([*SLEEP, f"--temp-dir={session}"])
    unrelated, client = start(SLEEP, cwd=session.parent), holder(start, session, SLEEP)
    time.sleep(0.3)
    assert [process.poll() for process in (driver, holding, naming, unrelated, client)] == [None] * 5
    assert session.exists()

    driver.stdin.write("\n")
    driver.stdin.flush()
    assert holding.wait(5) == -signal.SIGTERM
    assert naming.wait(5) == -signal.SIGTERM
    assert driver.stdout.readline() == "alive\n"
    assert driver.wait(5) == 0
    assert wait_for_end(cleaner_pid, 5)
    assert not session.exists()
    assert unrelated.poll() is None
    assert client.poll() is None, "a program that used the service ends with it"


def test_a_killed_driver_leaves_nothing(start: Start, session: Path) -> None:
    driver, cleaner_pid = start_driver(start, session)
    holding = holder(start, session)
    driver.kill()
    assert holding.wait(5) == -signal.SIGTERM
    assert wait_for_end(cleaner_pid, 5)
    assert not session.exists()


def test_what_ignores_the_request_is_killed(start: Start, session: Path) -> None:
    driver, cleaner_pid = start_driver(start, session)
    stubborn = start([*STUBBORN, str(session)], stdout=subprocess.PIPE)
    assert stubborn.stdout.readline() == "up\n"
    driver.kill()
    assert stubborn.wait(cleaner.LIMIT_SECONDS) == -signal.SIGKILL
    assert wait_for_end(cleaner_pid, 5)
    assert not session.exists()


def test_a_folder_whose_name_only_begins_alike_is_not_touched(start: Start, session: Path) -> None:
    """Two engines on one machine: the one that ends must not take the other along."""
    other = session.with_name(session.name + "-2")
    other.mkdir()
    driver, cleaner_pid = start_driver(start, session)
    neighbours = [holder(start, other), start([*SLEEP, f"--temp-dir={other}"])]
    driver.kill()
    assert wait_for_end(cleaner_pid, 10)
    assert not session.exists()
    assert other.exists()
    assert [neighbour.poll() for neighbour in neighbours] == [None, None]


def test_processes_are_found_by_open_file_and_by_command_line(start: Start, session: Path) -> None:
    holding, naming, other = holder(start, session), start([*SLEEP, str(session)]), start(SLEEP)
    time.sleep(0.3)
    found = cleaner.processes_of(str(session), spared=set())
    assert found >= {holding.pid, naming.pid}
    assert other.pid not in found
    assert os.getpid() not in found
    assert cleaner.processes_of(str(session), spared={holding.pid}) == found - {holding.pid}


def test_the_cleaner_is_small_and_needs_nothing_of_ours() -> None:
    code = f"import runpy, sys; runpy.run_path({cleaner.__file__!r}, run_name='x'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, timeout=20)
    assert run.returncode == 0, run.stderr
    assert not {"driver", "ray", "numpy", "psutil", "torch"} & set(run.stdout.split())


def test_a_process_that_may_not_be_ended_does_not_keep_the_folder(
    session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's that names the folder on its command line."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cleaner, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(cleaner, "processes_of", lambda folder, spared: {1})
    monkeypatch.setattr(cleaner.os, "kill", refuse)
    monkeypatch.setattr(sys, "argv", ["cleaner.py", str(session)])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    cleaner.main()
    assert not session.exists()
