"""Tensor-parallel ranks for tests: as threads over real shared memory, or as processes that meet at a store."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from parallel.group import TensorParallelGroup, join_store, open_store
from parallel.shared_memory import SharedMemory, _segment_bytes

Result = TypeVar("Result")


def run_ranks(size: int, fn: Callable[[TensorParallelGroup], Result], *, timeout_seconds: float = 20.0) -> list[Result]:
    """Runs fn(group) once per rank, each in a thread; returns the results by rank, or raises the first error."""
    if size == 1:
        return [fn(TensorParallelGroup())]
    return run_shared(
        size, lambda shared: fn(TensorParallelGroup(shared.rank, size, None, shared)), timeout_seconds=timeout_seconds
    )


def run_shared(
    size: int,
    fn: Callable[[SharedMemory], Result],
    *,
    timeout_seconds: float = 20.0,
    kind: type[SharedMemory] = SharedMemory,
) -> list[Result]:
    """Like `run_ranks`, for a function that wants the bare shared memory."""
    descriptor = os.memfd_create("quadriga-test")
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(kind(descriptor, rank, size, timeout_seconds))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's own thread
            errors.append(error)

    try:
        os.ftruncate(descriptor, _segment_bytes(size))
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(descriptor)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def run_processes(
    size: int, fn: Callable[[dist.Store, int, int], Result], *, timeout_seconds: float = 60.0
) -> list[Result]:
    """Runs fn(store, rank, size), a module's function, once per rank in a process of its own; results by rank."""
    store, port = open_store("127.0.0.1", size, timeout_seconds)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(size, mp_context=spawn) as pool:
        jobs = [pool.submit(_meet_and_run, fn, port, rank, size, timeout_seconds) for rank in range(size)]
        results = [job.result(timeout=2 * timeout_seconds) for job in jobs]
    del store  # it is the meeting point, and must outlive the ranks
    return results


def _meet_and_run(
    fn: Callable[[dist.Store, int, int], Result], port: int, rank: int, size: int, timeout_seconds: float
) -> Result:
    return fn(join_store("127.0.0.1", port, size, timeout_seconds), rank, size)
