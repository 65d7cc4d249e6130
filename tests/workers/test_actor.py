"""What a rank's actor makes of a step channel that breaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from parallel.channel import ChannelAddress, ChannelClosed
from parallel.errors import CollectiveError
from tests.exits import Exited, exit_process
from workers import actor
from workers.actor import WorkerActor

ADDRESS = ChannelAddress("ipc://@nobody", b"token")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> WorkerActor:
    """Its driver's connection breaks at once."""

    def serve(channel: Any) -> NoReturn:
        raise ChannelClosed("the driver has gone away")

    monkeypatch.setattr(actor, "WorkerChannel", lambda address, rank: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(actor.os, "_exit", exit_process)
    monkeypatch.setattr(actor, "LEAVE_SECONDS", 5.0)
    rank = WorkerActor(SimpleNamespace(rank=0))
    rank.worker = SimpleNamespace(serve=serve, group=SimpleNamespace(leave=lambda: None), ready=object())
    return rank


def test_a_driver_that_gave_up_the_connection_only_finds_the_rank_and_its_weights(rank: WorkerActor) -> None:
    serve = rank.worker.serve

    def told_to_leave(channel: Any) -> NoReturn:
        rank._leaving.set()
        serve(channel)

    rank.worker.serve = told_to_leave
    assert rank.serve(ADDRESS) == "the driver has gone away"
    assert rank.leave(1.0)


def test_a_rank_whose_driver_is_gone_ends(rank: WorkerActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LEAVE_SECONDS", 0.05)
    with pytest.raises(Exited):
        rank.serve(ADDRESS)


@pytest.mark.parametrize(
    ("error", "whole"), [(CollectiveError("rank 1 is gone"), True), (RuntimeError("CUDA error: unspecified"), False)]
)
def test_a_rank_that_cannot_join_again_by_its_own_fault_is_made_anew(
    rank: WorkerActor, error: Exception, whole: bool
) -> None:
    def rejoin(*_: Any) -> NoReturn:
        raise error

    rank.worker.rejoin = rejoin
    with pytest.raises(type(error)):
        rank.start(None, 0, "127.0.0.1", 1)
    assert rank.leave(1.0) is whole
