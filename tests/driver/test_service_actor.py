"""How a driver actor ends itself, and nobody else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from driver import service_actor
from driver.service_actor import DriverActor
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
