"""How a driver actor ends itself, and nobody else."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray

from driver import awake, owner, service_actor
from driver.owner import OwnerProcess
from driver.service_actor import DriverActor, ServiceSettings
from driver.startup import FAILED, READY, StartStatus
from tests.exits import Exited, exit_process


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actors that were ended. This one is on node `here`; `nodes` is to be set."""
    found: list[str] = []
    context = SimpleNamespace(get_node_id=lambda: "here", current_actor="me")
    monkeypatch.setattr(service_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(service_actor.ray, "kill", lambda actor, no_restart: found.append(actor))
    monkeypatch.setattr(service_actor.os, "_exit", exit_process)
    return found


def have_nodes(monkeypatch: pytest.MonkeyPatch, **alive: bool) -> None:
    nodes = [{"NodeID": name, "Alive": value} for name, value in alive.items()]
    monkeypatch.setattr(service_actor.ray, "nodes", lambda: nodes)


def test_a_driver_whose_machine_is_known_ends_its_actor(killed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    have_nodes(monkeypatch, there=False, here=True)
    object.__new__(DriverActor)._end()
    assert killed == ["me"]


def test_a_driver_whose_machine_was_taken_for_lost_leaves_its_successor_alone(
    killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_nodes(monkeypatch, there=True, here=False)
    with pytest.raises(Exited):
        object.__new__(DriverActor)._end()
    assert killed == []


def test_a_driver_that_cannot_ask_ray_ends_alone(killed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> NoReturn:
        raise ray.exceptions.RpcError("no answer from the head")

    monkeypatch.setattr(service_actor.ray, "nodes", nodes)
    with pytest.raises(Exited):
        object.__new__(DriverActor)._end()
    assert killed == []


class FakePort:
    """Of a port what its actor looks at. The owner is heard all the time, until it is told otherwise."""

    def __init__(self) -> None:
        self.owner_left, self.failure, self.heard, self.closed = False, None, True, 0
        self.service = SimpleNamespace(hurry=lambda: None, drain=lambda seconds: 0)
        self._seen_at = 0.0

    @property
    def owner_seen_at(self) -> float:
        self._seen_at = time.monotonic() if self.heard else self._seen_at
        return self._seen_at

    def close(self) -> None:
        self.closed += 1


def fail(*_: object) -> NoReturn:
    raise RuntimeError("the actor is dead")


@pytest.fixture
def driver(killed: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that is up; its clean-up fails."""
    have_nodes(monkeypatch, here=True)
    monkeypatch.setattr(owner, "OWNER_SECONDS", 0.5)
    monkeypatch.setattr(owner, "SILENCE_SECONDS", 0.1)
    found = object.__new__(DriverActor)
    found._settings = ServiceSettings("llm", owner=OwnerProcess.this())
    found._port = FakePort()
    found._llm = SimpleNamespace(failure=None, close=fail)
    found._stopping, found._status, found._restarted = threading.Lock(), StartStatus(), False
    monkeypatch.setattr(found, "_bring_up", lambda: found._status.now.update(state=READY))
    return found


def owner_is(monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    monkeypatch.setattr(OwnerProcess, "lives", lambda _: not dead)


def test_an_owner_that_has_ended_takes_the_service_along_whatever_goes_wrong_then(
    driver: Any, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_is(monkeypatch, dead=True)
    port, driver._port.heard = driver._port, False
    driver._watch()
    assert killed == ["me"]
    assert port.closed == 1
    assert driver._port is None


def test_an_owner_that_is_stopped_is_waited_for(
    driver: Any, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_is(monkeypatch, dead=False)
    driver._port.heard = False
    watch = threading.Thread(target=driver._watch)
    watch.start()
    time.sleep(2)
    assert watch.is_alive()
    assert killed == []
    owner_is(monkeypatch, dead=True)
    watch.join(10)
    assert killed == ["me"]


def test_a_driver_that_stood_still_does_not_take_that_for_its_owners_silence(
    driver: Any, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_is(monkeypatch, dead=True)  # as long as it is not asked, that does not matter
    monkeypatch.setattr(awake, "LONGEST_GAP", 0.3)
    stops: list[float] = []

    def sleep(seconds: float, sleep: Any = time.sleep) -> None:
        if len(stops) == 2:
            driver._port = None  # stopped, which ends the watch
        driver._port and setattr(driver._port, "heard", False)
        stops.append(seconds)
        sleep(2.0 if len(stops) == 1 else seconds)
        driver._port and setattr(driver._port, "heard", len(stops) != 1)

    monkeypatch.setattr(service_actor.time, "sleep", sleep)
    driver._watch()
    assert len(stops) == 3
    assert killed == []


@pytest.mark.parametrize("failing", ["engine", "port"])
def test_a_driver_that_has_failed_ends_for_ray_to_start_it_again(driver: Any, failing: str) -> None:
    if failing == "engine":
        driver._llm.failure = RuntimeError("out of ranks")
    else:
        driver._port.failure = RuntimeError("out of sockets")
    with pytest.raises(Exited):
        driver._watch()


def test_a_start_that_fails_is_told_though_its_clean_up_fails(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(driver, "_wait_for_owner", lambda: ended.append(True))

    def bring_up() -> NoReturn:
        raise ValueError("a damaged file")

    monkeypatch.setattr(driver, "_bring_up", bring_up)
    driver._live()
    assert driver._status.now["state"] == FAILED
    assert driver._status.now["error"] == "a damaged file"
    assert ended == [True]


@pytest.fixture
def restarted(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that Ray has started again, and whose first two attempts to come up fail."""
    driver._restarted, driver.attempts = True, []
    monkeypatch.setattr(service_actor, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(driver, "_watch", lambda: None)

    def bring_up() -> None:
        driver.attempts.append(driver._llm)
        if len(driver.attempts) < 3:
            driver._llm = SimpleNamespace(failure=None, close=fail)
            raise RuntimeError("no place for rank 1")
        driver._status.now.update(state=READY)

    monkeypatch.setattr(driver, "_bring_up", bring_up)
    return driver


def test_a_driver_that_was_up_before_tries_again(restarted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner_is(monkeypatch, dead=False)
    restarted._live()
    assert restarted._status.state == READY
    assert restarted.attempts[1:] == [None, None]


def test_a_driver_that_tries_again_ends_with_its_owner(
    restarted: Any, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_is(monkeypatch, dead=True)
    restarted._live()
    assert len(restarted.attempts) == 1
    assert killed == ["me"]


def test_a_driver_that_was_up_before_gives_up_at_last(restarted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_actor, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(restarted, "_wait_for_owner", lambda: None)
    restarted._live()
    assert restarted._status.now["error"] == "no place for rank 1"


def test_a_watch_that_fails_starts_the_driver_again(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_watch", fail)
    with pytest.raises(Exited):
        driver._live()
