"""Whether a cluster has room, what is said of it, and waiting."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from driver import cli
from driver.cluster import Cluster
from driver.launch import EACH, Needs, Node, unreachable, wait_for_devices


def node(address: str, cpus: float, gpus: float = 0, taken_cpus: float = 0, taken_gpus: float = 0) -> Node:
    total = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return Node(address, total, {"CPU": cpus - taken_cpus, "GPU": gpus - taken_gpus})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_takes_what_the_engine_asks_ray_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_has_rank_places", lambda self: False)
    assert EACH[device] == Cluster.bundle(Cluster.__new__(Cluster), device)


@pytest.mark.parametrize(
    ("needs", "nodes", "missing"),
    [
        (Needs(2), [node("a", 2)], []),
        (Needs(3), [node("a", 2)], ["room for 1 rank"]),
        (Needs(3), [node("a", 2), node("b", 1)], []),
        (Needs(2), [], ["1 node", "room for 2 ranks"]),
        (Needs(2, nodes=3), [node("a", 8)], ["2 nodes"]),
        # A head without GPUs counts as a node, and gives no place.
        (Needs(4, nodes=2), [node("head", 8), node("b", 8, gpus=4)], []),
        (Needs(4, nodes=2), [node("head", 8), node("b", 8, gpus=3)], ["room for 1 rank"]),
        (Needs(4, device="cpu"), [node("a", 8, gpus=1)], []),
        (Needs(2, device="cuda"), [node("a", 8)], ["room for 2 ranks"]),
        # Taken devices and missing CPUs beside the GPUs are no room.
        (Needs(4), [node("a", 8, gpus=4, taken_gpus=1)], ["room for 1 rank"]),
        (Needs(4), [node("a", 2, gpus=4)], ["room for 2 ranks"]),
        (Needs(2), [node("a", 1.5), node("b", 1.5)], []),
    ],
)
def test_what_is_missing(needs: Needs, nodes: Sequence[Node], missing: list[str]) -> None:
    assert needs.missing(nodes) == missing


def test_the_report_has_each_nodes_devices_against_its_share() -> None:
    nodes = [node("10.0.0.1", 8), node("10.0.0.2", 16, gpus=8, taken_gpus=2)]
    assert Needs(16, nodes=3).report(nodes).splitlines() == [
        "16 ranks on 3 nodes, 1 GPU and 1 CPU each; found 2 nodes:",
        "  10.0.0.1: 0 of 0 GPUs free, 8 of 8 CPUs free: room for 0 of the 6 ranks that are its share",
        "  10.0.0.2: 6 of 8 GPUs free, 16 of 16 CPUs free: room for 6 of the 6 ranks that are its share",
    ]


def test_it_says_what_is_missing_before_it_waits_and_whenever_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver.launch.POLL_SECONDS", 0.01)
    seen = iter([[], [], [node("a", 1)], [node("a", 1)], [node("a", 1), node("b", 1)]])
    said: list[str] = []
    assert wait_for_devices(Needs(2, nodes=2), 30, lambda: next(seen), said.append)
    assert [text.splitlines()[-1].split(";")[0] for text in said] == [
        "missing: 2 nodes and room for 2 ranks",
        "missing: 1 node and room for 1 rank",
        "  b: 1 of 1 CPUs free: room for 1 of the 1 rank that are its share",
    ]
    assert said[-1].startswith("enough devices")


def test_it_gives_up_in_time_and_says_why() -> None:
    said: list[str] = []
    began = time.monotonic()
    assert not wait_for_devices(Needs(2), 0.2, lambda: [node("a", 1)], said.append)
    assert time.monotonic() - began < 2
    assert said[-1] == "gave up after 0.2 s; still missing: room for 1 rank"


def test_an_address_where_nobody_listens_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: host)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert unreachable(address) is None
        monkeypatch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: "127.0.0.9")
        assert "for Ray it is 127.0.0.9, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in unreachable(address)
    monkeypatch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: host)
    assert unreachable(address).startswith(f"no Ray cluster at {address}: ")
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert unreachable("auto") == unreachable(address)
    monkeypatch.delenv("RAY_ADDRESS")
    assert unreachable("auto") is None


@pytest.mark.parametrize("words", [["generate", "--prompt", "a"], ["serve", "--port", "0"]])
def test_no_command_waits_for_a_cluster_that_is_not_there(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(Cluster, "_connection", None)
    monkeypatch.setattr("driver.cli.signal.signal", lambda *_: None)
    monkeypatch.setattr("driver.serve.signal.signal", lambda *_: None)
    monkeypatch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: host)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cli.main([*words, "--model", str(folder), "--tp", "2"]) == cli.EXIT_USAGE
    assert f"no Ray cluster at {address}: " in capsys.readouterr().err


def test_the_command_gives_up_on_a_cluster_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever other tests of this process have joined
    monkeypatch.setattr("driver.cli.signal.signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = ["wait-for-devices", "--tp", "2", "--wait-seconds", "0", "--ray-address", address]
    assert cli.main(words) == cli.EXIT_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "quadriga: needs 2 ranks on 1 node, 1 CPU each; found 0 nodes"
    assert f"no Ray cluster at {address}" in lines[-1]
    assert cli.main(["wait-for-devices", "--tp", "0"]) == cli.EXIT_USAGE
