"""The step channel: order, identity of the ranks, and how either side learns that the other is gone."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel import channel
from parallel.channel import ChannelAddress, ChannelClosed, DriverChannel, WorkerChannel

ROOT = Path(__file__).parents[2]
WAIT = 10.0


class Connections:
    """Connects workers and closes them in threads, so that a close that blocks cannot hold up the tests."""

    def __init__(self) -> None:
        self._open: list[WorkerChannel] = []

    def __call__(self, address: ChannelAddress, rank: int) -> WorkerChannel:
        worker = WorkerChannel(address, rank)
        self._open.append(worker)
        return worker

    def close(self, worker: WorkerChannel) -> threading.Thread:
        self._open.remove(worker)
        thread = threading.Thread(target=worker.close, daemon=True)
        thread.start()
        return thread

    def close_all(self) -> None:
        for thread in [self.close(worker) for worker in list(self._open)]:
            thread.join(0.1)


@pytest.fixture(params=[None, "127.0.0.1"], ids=["ipc", "tcp"])
def host(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture
def connect() -> Iterator[Connections]:
    connections = Connections()
    yield connections
    connections.close_all()


@pytest.fixture
def driver(host: str | None) -> Iterator[DriverChannel]:
    channel = DriverChannel(3, host)
    yield channel
    channel.close()


def gather_ranks(driver: DriverChannel, missing: int | None = None) -> None:
    deadline = time.monotonic() + WAIT
    while driver.missing_rank != missing:
        assert time.monotonic() < deadline, f"rank {driver.missing_rank} did not connect"
        assert driver.receive(0.1) is None


@pytest.fixture
def workers(driver: DriverChannel, connect: Connections) -> list[WorkerChannel]:
    connected = [connect(driver.address, rank) for rank in range(driver.size)]
    gather_ranks(driver)
    return connected


def test_frames_reach_every_rank_whole_and_in_order(driver: DriverChannel, workers: list[WorkerChannel]) -> None:
    frames = [b"%d" % i for i in range(200)] + [os.urandom(200_000), b"", b"last"]
    for frame in frames:
        driver.publish(frame)
    for worker in workers:
        assert [worker.receive(WAIT) for _ in frames] == frames
        assert worker.receive(0) is None


def test_results_come_back_in_order_with_the_rank_of_their_sender(
    driver: DriverChannel, workers: list[WorkerChannel]
) -> None:
    for i in range(50):
        for worker in reversed(workers):
            worker.send(b"result", b"%d of %d" % (i, worker.rank))
    messages = [driver.receive(WAIT) for _ in range(150)]
    for rank in range(3):
        bodies = [m.body for m in messages if m.rank == rank]
        assert bodies == [b"%d of %d" % (i, rank) for i in range(50)]
    assert {m.kind for m in messages} == {b"result"}


def test_missing_rank_is_the_first_that_has_not_connected(driver: DriverChannel, connect: Connections) -> None:
    assert driver.missing_rank == 0
    connect(driver.address, 2)
    connect(driver.address, 0)
    gather_ranks(driver, missing=1)
    connect(driver.address, 1)
    gather_ranks(driver, missing=None)


@pytest.mark.parametrize(
    ("rank", "token"), [(0, b"x" * 32), (0, b""), (3, None), (10**6, None)], ids=["wrong", "empty", "rank3", "rank1e6"]
)
def test_who_shows_no_valid_token_and_rank_is_ignored(
    driver: DriverChannel, connect: Connections, rank: int, token: bytes | None
) -> None:
    address = driver.address if token is None else dataclasses.replace(driver.address, token=token)
    intruder = connect(address, rank)
    intruder.send(b"result", b"forged")
    for late in range(3):
        connect(driver.address, late).send(b"result", b"true")
    seen = []
    while len(seen) < 3:
        message = driver.receive(WAIT)
        if message is not None:
            seen.append(message.body)
    gather_ranks(driver)
    assert driver.receive(0.1) is None
    assert seen == [b"true"] * 3
    driver.publish(b"secret")
    assert intruder.receive(0.3) is None


def test_over_tcp_the_wrong_server_key_does_not_connect(connect: Connections) -> None:
    driver, other = DriverChannel(1, "127.0.0.1"), DriverChannel(1, "127.0.0.1")
    try:
        connect(dataclasses.replace(driver.address, server_key=other.address.server_key), 0)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert driver.receive(0.1) is None
        assert driver.missing_rank == 0
    finally:
        driver.close()
        other.close()


def test_a_worker_with_nothing_to_do_gets_none_after_its_timeout(workers: list[WorkerChannel]) -> None:
    began = time.monotonic()
    assert workers[0].receive(0.2) is None
    assert 0.15 < time.monotonic() - began < WAIT / 2


def test_wake_ends_a_receive_that_waits(driver: DriverChannel) -> None:
    timer = threading.Timer(0.2, driver.wake)
    timer.start()
    began = time.monotonic()
    assert driver.receive(None) is None
    assert time.monotonic() - began > 0.1
    timer.join()


def test_a_wake_between_receives_is_not_lost_and_counts_once(driver: DriverChannel) -> None:
    driver.wake()
    driver.wake()
    began = time.monotonic()
    assert driver.receive(WAIT) is None
    assert time.monotonic() - began < WAIT / 2
    began = time.monotonic()
    assert driver.receive(0.2) is None
    assert time.monotonic() - began > 0.15


def test_wake_never_blocks_and_may_come_after_close(driver: DriverChannel) -> None:
    for _ in range(70_000):  # more than a pipe holds
        driver.wake()
    driver.close()
    driver.wake()
    driver.close()


def test_closing_says_goodbye_after_the_frames_sent_before(driver: DriverChannel, workers: list[WorkerChannel]) -> None:
    driver.publish(b"last")
    driver.close()
    for worker in workers:
        assert worker.receive(WAIT) == b"last"
        with pytest.raises(ChannelClosed) as closed:
            worker.receive(WAIT)
        assert closed.value.farewell


def test_a_worker_can_close_before_and_after_the_driver(
    driver: DriverChannel, workers: list[WorkerChannel], connect: Connections
) -> None:
    before = connect.close(workers[0])
    before.join(WAIT / 2)
    assert not before.is_alive()
    driver.close()
    after = connect.close(workers[1])
    after.join(WAIT / 2)
    assert not after.is_alive()


def test_publishing_to_a_rank_that_has_gone_names_it(
    driver: DriverChannel, workers: list[WorkerChannel], connect: Connections
) -> None:
    connect.close(workers[1])

    def publish_for_a_while() -> None:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            driver.publish(b"plan")
            time.sleep(0.05)

    with pytest.raises(ChannelClosed, match="rank 1 is no longer connected"):
        publish_for_a_while()


DRIVER = """
import sys
from parallel.channel import DriverChannel
channel = DriverChannel(1, sys.argv[1] or None)
address = channel.address
print(address.url, address.token.hex(), (address.server_key or b"").hex(), flush=True)
while channel.missing_rank is not None:
    channel.receive(1)
channel.publish(b"hello")
while channel.receive(60) is None:
    pass
channel.publish(b"again")
channel.receive(60)
"""


def test_a_killed_driver_is_noticed_within_ten_seconds(host: str | None, connect: Connections) -> None:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, host or ""], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url, token, key = process.stdout.readline().rstrip("\n").split(" ")
        worker = connect(ChannelAddress(url, bytes.fromhex(token), bytes.fromhex(key) or None), 0)
        assert worker.receive(WAIT) == b"hello"
        process.kill()
        process.wait()
        began = time.monotonic()
        with pytest.raises(ChannelClosed) as closed:
            worker.receive(20)
        assert not closed.value.farewell
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever judges by heartbeats judges soon."""
    monkeypatch.setattr(channel, "HEARTBEAT_MS", 50)
    monkeypatch.setattr(channel, "HEARTBEAT_TIMEOUT_MS", 200, raising=False)


def test_a_driver_that_is_stopped_for_a_while_keeps_its_ranks(
    impatient: None, host: str | None, connect: Connections
) -> None:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, host or ""], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url, token, key = process.stdout.readline().rstrip("\n").split(" ")
        worker = connect(ChannelAddress(url, bytes.fromhex(token), bytes.fromhex(key) or None), 0)
        assert worker.receive(WAIT) == b"hello"
        process.send_signal(signal.SIGSTOP)
        assert worker.receive(1.5) is None
        worker.send(b"result", b"")
        process.send_signal(signal.SIGCONT)
        assert worker.receive(WAIT) == b"again"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_worker_whose_driver_is_gone_already_does_not_wait_for_ever(
    host: str | None, connect: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel.channel.CONNECT_SECONDS", 0.5)
    gone = DriverChannel(1, host)
    gone.close()
    worker = connect(gone.address, 0)
    with pytest.raises(ChannelClosed):
        worker.receive(WAIT)


WORKER = """
import sys
from parallel.channel import ChannelAddress, WorkerChannel
url, token, key = sys.argv[1:]
channel = WorkerChannel(ChannelAddress(url, bytes.fromhex(token), bytes.fromhex(key) or None), 0)
print(channel.receive(60).decode())
"""


def test_a_rank_that_is_stopped_for_a_while_stays_connected(impatient: None, host: str | None) -> None:
    driver = DriverChannel(1, host)
    address = driver.address
    words = [address.url, address.token.hex(), (address.server_key or b"").hex()]
    process = subprocess.Popen([sys.executable, "-c", WORKER, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        gather_ranks(driver)
        process.send_signal(signal.SIGSTOP)
        listen(driver, time.monotonic() + 1.5)
        driver.publish(b"hello")
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=WAIT)[0] == "hello\n"
    finally:
        process.kill()
        process.wait()
        driver.close()


def listen(driver: DriverChannel, until: float) -> None:
    while time.monotonic() < until:
        driver.receive(1.0)


def test_over_tcp_the_driver_notices_a_rank_whose_connection_breaks_and_no_stranger() -> None:
    driver = DriverChannel(1, "127.0.0.1")
    address = driver.address
    words = [address.url, address.token.hex(), address.server_key.hex()]
    process = subprocess.Popen([sys.executable, "-c", WORKER, *words], cwd=ROOT)
    try:
        deadline = time.monotonic() + WAIT
        while driver.missing_rank is not None and time.monotonic() < deadline:
            driver.receive(0.1)
        assert driver.missing_rank is None
        host, _, port = address.url.removeprefix("tcp://").partition(":")
        for _ in range(3):
            socket.create_connection((host, int(port))).close()
            assert driver.receive(0.5) is None
        process.kill()
        began = time.monotonic()
        with pytest.raises(ChannelClosed, match="rank 0 is no longer connected"):
            listen(driver, began + WAIT)
    finally:
        process.kill()
        process.wait()
        driver.close()
