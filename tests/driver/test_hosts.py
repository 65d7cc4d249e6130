"""What a host says of a driver that does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import pytest
import ray

from driver.hosts import ActorHost
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
