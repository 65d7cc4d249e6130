"""The part of gpu_check.py about small sums: two processes on this one GPU, which torch allows for tests."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from parallel.group import join_store, open_store
from parallel.symmetric import ONE_SHOT_BYTES, TorchPeers, open_symmetric

SECONDS = 90.0


def check_peers(settings: Any) -> dict[str, Any]:
    """Whether memory can be mapped and the kernels add up. A GPU that cannot is no failure, wrong sums are one."""
    if not settings.full:
        return {"problems": [], "result": "for GPUs only"}
    store, port = open_store("127.0.0.1", 2, SECONDS)
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
    ranks = [spawn.Process(target=_rank, args=(rank, port, pipes[rank][1]), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found, deadline = [], time.monotonic() + SECONDS
    for receive, _ in pipes:
        found.append(receive.recv() if receive.poll(max(0.0, deadline - time.monotonic())) else "no answer in time")
    for rank in ranks:
        rank.join(5)
        if rank.is_alive():  # a kernel that waits for the other one cannot be ended
            rank.kill()
    del store
    wrong = [result for result in found if isinstance(result, str)]
    return {"problems": wrong, "result": found}


def _rank(rank: int, port: int, answer: Connection) -> None:
    try:
        answer.send(_sums(rank, port))
    except Exception as error:  # noqa: BLE001 - it is the answer
        answer.send(f"rank {rank}: {error}")


def _sums(rank: int, port: int) -> dict[str, Any] | str:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=join_store("127.0.0.1", port, 2, SECONDS), rank=rank, world_size=2)

    def smallest(value: int) -> int:
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    reasons: list[str] = []

    def map_peers() -> TorchPeers:
        try:
            return TorchPeers(dist.group.WORLD, device)
        except Exception as error:
            reasons.append(str(error))
            raise RuntimeError(str(error)) from error

    sums = open_symmetric(map_peers, smallest, rank, 2, "127.0.0.1", device)
    if sums is None:
        if not smallest(int(not reasons)):
            return {"mapped": False, "reason": "; ".join(reasons)}
        return f"rank {rank}: mapped, but refused; see the log"
    graph, tensor = torch.cuda.CUDAGraph(), torch.ones(4096, dtype=torch.bfloat16, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sums.all_reduce(tensor)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        sums.all_reduce(tensor)
    for value in (3.0, 5.0):
        tensor.fill_(value + rank)
        graph.replay()
        if not bool((tensor == 2 * value + 1).all()):
            return f"rank {rank}: a replayed sum is wrong: {tensor[:4].tolist()} for {value} and {value + 1}"
    microseconds = {}
    for nbytes in (8192, ONE_SHOT_BYTES, 4 * ONE_SHOT_BYTES):
        one = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            sums.all_reduce(one)
        torch.cuda.synchronize()
        microseconds[nbytes] = (time.perf_counter() - began) / 20 * 1e6
    return {"mapped": True, "microseconds_sharing_one_gpu": microseconds}
