"""What a host says of a driver that does not answer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import NoReturn

import pytest
import ray

from driver import hosts
from driver.hosts import ActorHost, InlineHost
from driver.startup import FAILED


@pytest.mark.parametrize(
    ("private", "alive", "failed"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_service_whose_own_ray_has_ended_has_failed(
    monkeypatch: pytest.MonkeyPatch, private: bool, alive: bool, failed: bool
) -> None:
    def status() -> NoReturn:
        raise ray.exceptions.ActorUnavailableError("it restarts", None)

    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": alive}])
    host = object.__new__(ActorHost)
    host._actor = SimpleNamespace(status=SimpleNamespace(remote=status))
    host._cluster = SimpleNamespace(private=private)
    now = host.status()
    assert (now["state"] == FAILED) == failed
    assert ("its own Ray has ended" in str(now.get("error"))) == failed


def test_a_head_that_does_not_answer_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise ray.exceptions.RpcError("no answer within 60 s")

    monkeypatch.setattr(ray, "nodes", fail)
    host = object.__new__(ActorHost)
    host._actor = SimpleNamespace(status=SimpleNamespace(remote=fail))
    host._cluster = SimpleNamespace(private=True)
    assert host.status()["state"] == "starting"


def test_a_start_that_hangs_does_not_keep_a_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosts, "START_SECONDS", 0.2)
    go_on, closed = threading.Event(), []
    host = object.__new__(InlineHost)
    host._thread = threading.Thread(target=go_on.wait, args=(30,), daemon=True)
    host._port, host._llm = None, SimpleNamespace(close=lambda: closed.append(True))
    host._thread.start()
    began = time.monotonic()
    host.close()
    assert time.monotonic() - began < 5
    assert closed == [True]
    assert "the start has not come to its end within 0.2 s" in caplog.text
    go_on.set()
