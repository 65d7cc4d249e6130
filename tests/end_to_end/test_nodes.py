"""Clusters of two nodes, both on this machine: where ranks go, and that they answer as one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from tests.end_to_end.clusters import python, two_nodes
from tests.end_to_end.conftest import TinyModels

PROMPT, MAX_TOKENS = [1, 2, 3, 200, 7], 12


@pytest.fixture(scope="module")
def small_nodes() -> Iterator[dict[str, str]]:
    """Each has room for one rank."""
    with two_nodes(["num_cpus=1"], ["num_cpus=1"]) as environment:
        yield environment


@pytest.fixture(scope="module")
def head_without_devices() -> Iterator[dict[str, str]]:
    with two_nodes(["num_cpus=0"], ["num_cpus=4", "num_gpus=4"]) as environment:
        yield environment


def program(*words: str, environment: Mapping[str, str]) -> dict[str, Any]:
    done = python("-m", "tests.end_to_end.nodes_program", *words, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def generate(tiny: TinyModels, environment: Mapping[str, str]) -> dict[str, Any]:
    words = map(str, [tiny.folder("llama"), MAX_TOKENS, *PROMPT])
    answer = program("generate", *words, environment=environment)
    assert answer["tokens"] == tiny.greedy("llama", PROMPT, MAX_TOKENS)
    return answer


def nodes_of(answer: dict[str, Any]) -> list[str]:
    return [place["node"] for place in answer["places"]]


def test_one_rank_on_each_of_two_nodes(small_nodes: Mapping[str, str], tiny: TinyModels) -> None:
    answer = generate(tiny, small_nodes)
    assert len(nodes_of(answer)) == len(set(nodes_of(answer))) == 2


@pytest.mark.skipif(
    "QUADRIGA_TEST_NETWORK" not in os.environ, reason="listens on the network: set QUADRIGA_TEST_NETWORK to run it"
)
def test_ranks_on_nodes_with_different_addresses_talk_over_tcp(tiny: TinyModels) -> None:
    addresses = [a.address for many in psutil.net_if_addrs().values() for a in many if a.family.name == "AF_INET"]
    outer = next(address for address in addresses if not address.startswith("127."))
    with two_nodes(["num_cpus=1"], ["num_cpus=1", f"node_ip_address={outer}"]) as environment:
        answer = generate(tiny, environment)
    assert {place["ip"] for place in answer["places"]} == {"127.0.0.1", outer}


def test_what_two_nodes_lack_is_said_for_each_and_waiting_ends(small_nodes: Mapping[str, str]) -> None:
    words = ["wait-for-devices", "--tp", "6", "--nodes", "3", "--wait-seconds", "1"]
    done = python("-m", "quadriga", *words, environment=small_nodes)
    assert done.returncode == 1
    assert "needs 6 ranks on 3 nodes, 1 CPU each; found 2 nodes:" in done.stderr
    assert done.stderr.count("127.0.0.1: 1 of 1 CPUs free: room for 1 of the 2 ranks that are its share") == 2
    assert "gave up after 1 s; still missing: 1 node and room for 4 ranks" in done.stderr


def test_the_driver_may_be_on_a_node_without_devices(head_without_devices: Mapping[str, str], tiny: TinyModels) -> None:
    answer = generate(tiny, head_without_devices)
    (node,) = set(nodes_of(answer))
    assert node != answer["driver"]


def test_two_engines_get_different_gpus_and_see_only_theirs(
    head_without_devices: Mapping[str, str], tiny: TinyModels
) -> None:
    places = program("gpus", str(tiny.folder("llama")), environment=head_without_devices)["places"]
    assert sorted(gpu for place in places for gpu in place["gpus"]) == ["0", "1", "2", "3"]
    assert [place["visible"] for place in places] == [",".join(place["gpus"]) for place in places]
