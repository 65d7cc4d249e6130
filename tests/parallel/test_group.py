"""Process groups: the right interface, the same collectives over either transport, and no endless waiting."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import parallel.group
from parallel.group import (
    GroupError,
    TensorParallelGroup,
    interface_of,
    join_group,
    nccl_advice,
    open_store,
    refuse_shared_gpus,
)
from tests.ranks import run_processes

CPU = torch.device("cpu")
# Which ranks cannot map the shared memory, and what must then carry the collectives of all.
SITUATIONS = {"all see it": ((), "shared memory"), "none sees it": ((0, 1), "gloo"), "one does not": ((1,), "gloo")}


def _use_every_collective(store: dist.Store, rank: int, size: int) -> dict[str, Any]:
    open_shared_memory = parallel.group.open_shared_memory
    seen: dict[str, Any] = {}
    for situation, (blind, _) in SITUATIONS.items():
        parallel.group.open_shared_memory = (lambda *_: None) if rank in blind else open_shared_memory
        group = join_group(dist.PrefixStore(situation, store), rank, size, CPU, "127.0.0.1", 30.0)
        reduced = {
            str(dtype): group.all_reduce(torch.tensor([1.5, 10.0 * rank], dtype=dtype)).tolist()
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        seen[situation] = {
            "transport": group.transport,
            "reduced": reduced,
            "large": group.all_reduce(torch.full((600_000,), rank + 1.0)).unique().tolist(),
            "gathered": group.all_gather(torch.tensor([[rank, 2**60 + rank]])).tolist(),
            "gathered_fp64": group.all_gather(torch.tensor(rank + 0.25, dtype=torch.float64)).tolist(),
            "smallest": group.smallest(7 - rank, CPU),
        }
        group.close()
    seen["interface"] = os.environ["GLOO_SOCKET_IFNAME"]
    seen["alone"] = _join_without_the_other(store, rank, size) if rank == 0 else None
    return seen


def _join_after_a_vain_attempt(store: dist.Store, rank: int, size: int) -> list[float]:
    """Rank 0 has waited in vain for one that died meanwhile; rank 1 is the one that was made in its place."""
    if rank == 0:
        _join_without_the_other(store, rank, size)
    group = join_group(dist.PrefixStore("again", store), rank, size, CPU, "127.0.0.1", 10.0)
    try:
        return group.all_reduce(torch.tensor([1.0 + rank])).tolist()
    finally:
        group.close()


def _join_without_the_other(store: dist.Store, rank: int, size: int) -> str:
    try:
        join_group(dist.PrefixStore("alone", store), rank, size, CPU, "127.0.0.1", 1.0)
    except GroupError as error:
        return str(error)
    return "joined"


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What two ranks saw, each in a process of its own: they start once for all these tests."""
    return run_processes(2, _use_every_collective)


def test_who_has_joined_in_vain_joins_one_that_has_not() -> None:
    assert run_processes(2, _join_after_a_vain_attempt) == [[3.0], [3.0]]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_collectives_are_right_over_the_transport_that_all_ranks_share(
    seen: list[dict[str, Any]], situation: str
) -> None:
    for of_rank in seen:
        result = of_rank[situation]
        assert result["transport"] == SITUATIONS[situation][1]
        assert result["reduced"] == {f"torch.{name}": [3.0, 10.0] for name in ("float32", "bfloat16", "float16")}
        assert result["large"] == [3.0]
        assert result["gathered"] == [[[0, 2**60]], [[1, 2**60 + 1]]]
        assert result["gathered_fp64"] == [0.25, 1.25]
        assert result["smallest"] == 6


def test_gloo_is_bound_to_the_interface_of_the_node_ip(seen: list[dict[str, Any]]) -> None:
    assert [of_rank["interface"] for of_rank in seen] == [interface_of("127.0.0.1")] * 2


def test_a_rank_that_is_left_alone_says_who_and_where(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["alone"].startswith("rank 0 of 2 could not join its gloo group over lo: ")


def test_one_rank_needs_no_transport() -> None:
    group, tensor = TensorParallelGroup(), torch.arange(3.0)
    assert group.transport == "none"
    assert group.all_reduce(tensor) is tensor
    assert torch.equal(group.all_gather(tensor), tensor.unsqueeze(0))
    assert group.smallest(5, CPU) == 5
    group.close()


def test_the_loopback_address_is_on_lo() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.3") == "lo"


def test_every_address_of_this_machine_has_its_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET":
                assert interface_of(address.address) == name


def test_an_unknown_address_is_refused_with_those_there_are() -> None:
    with pytest.raises(GroupError, match=r"has address 203\.0\.113\.9; this node has .*lo 127\.0\.0\.1"):
        interface_of("203.0.113.9")


def _tell_gpus(store: dist.Store, rank: int, size: int) -> str:
    try:
        refuse_shared_gpus(dist.PrefixStore("own", store), rank, size, f"10.0.0.1 GPU {rank}", 20.0)
        refuse_shared_gpus(dist.PrefixStore("same", store), rank, size, "10.0.0.1 GPU A", 20.0)
    except GroupError as error:
        return str(error)
    return "joined"


def test_two_ranks_on_one_gpu_are_refused_by_all_before_nccl_hangs() -> None:
    for message in run_processes(2, _tell_gpus):
        assert message.startswith(
            "NCCL needs a GPU of its own for every rank, but there are ranks 0, 1 on 10.0.0.1 GPU A"
        )


def test_the_meeting_point_listens_on_its_own_address_alone() -> None:
    store, port = open_store("127.0.0.1", 1, 10.0)
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == [("127.0.0.1", port)]
    del store


def test_a_rank_whose_peer_never_tells_its_gpu_says_so() -> None:
    store, _ = open_store("127.0.0.1", 2, 10.0)
    with pytest.raises(GroupError, match=r"rank 0 of 2 waited 0\.2 s for the others' GPUs"):
        refuse_shared_gpus(store, 0, 2, "10.0.0.1 GPU A", 0.2)


def test_advice_for_nccl_names_the_interface_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    advice = nccl_advice("eth0")
    for part in ("GPUs 1 and 0 have no peer access", "NCCL_P2P_DISABLE=1", "If eth0 does not reach", "(now eth7)"):
        assert part in advice


def test_a_worker_that_sees_its_own_gpu_alone_is_told_how_peer_access_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "no peer access (`nvidia-smi topo -p2p r` shows it), set NCCL_P2P_DISABLE=1" in nccl_advice("eth0")
