"""Small sums through symmetric memory: which algorithm takes what, when it is not used, and its place on the stream.

In place of torch's kernels stand threads that do what they document: ranks meet, read every buffer in the order of the
ranks, and meet again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.group import TensorParallelGroup
from parallel.symmetric import (
    DTYPES,
    MOST_RANKS,
    ONE_SHOT_BYTES,
    TWO_SHOT_BYTES,
    SymmetricSums,
    open_symmetric,
)
from tests.workers.recording import RecordedGraph
from workers.graphs import capture_refusal

CPU = torch.device("cpu")


class Board:
    """What the ranks share.

    ends_together: whether kernels end only once all have read. first: the rank that reads before the others.
    """

    def __init__(self, size: int, ends_together: bool = True, first: int | None = None) -> None:
        self.size, self.ends_together, self.first = size, ends_together, first
        self.barrier = threading.Barrier(size, timeout=10)
        self.buffers: list[torch.Tensor | None] = [None] * size
        self.values = [0] * size

    def smallest(self, rank: int, value: int) -> int:
        self.values[rank] = value
        self.barrier.wait()
        found = min(self.values)
        self.barrier.wait()
        return found


class ThreadPeers:
    """calls: the name and size in bytes of each."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.calls = board, rank, []
        self.buffer = torch.empty(TWO_SHOT_BYTES, dtype=torch.uint8)
        board.buffers[rank] = self.buffer

    def _sum(self, name: str, staged: torch.Tensor) -> torch.Tensor:
        self.calls.append((name, staged.nbytes))
        self.board.barrier.wait()
        if self.board.first not in (None, self.rank):
            time.sleep(0.02)
        views = [buffer[: staged.nbytes].view(staged.dtype).view(staged.shape) for buffer in self.board.buffers]
        total = views[0].clone()
        for view in views[1:]:
            total += view
        if self.board.ends_together:
            self.board.barrier.wait()
        return total

    def one_shot(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._sum("one", staged))

    def two_shot(self, staged: torch.Tensor) -> None:
        staged.copy_(self._sum("two", staged))


def run(size: int, fn: Callable[[int], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 - raised again below
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(size)]


class CountingGroup(TensorParallelGroup):
    """Notes what goes to NCCL."""

    def __init__(self, symmetric: SymmetricSums | None) -> None:
        super().__init__(0, 2, None, None, symmetric)
        self.others: list[int] = []

    def _run(self, collective: Callable[..., object], *tensors: object, **options: object) -> None:
        assert collective is dist.all_reduce
        self.others.append(tensors[0].nbytes)


class Alone:
    """Peers whose only other rank has the same numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.buffer = torch.zeros(TWO_SHOT_BYTES, dtype=torch.uint8)

    def one_shot(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        self.calls.append(("one", staged.nbytes))
        out.copy_(staged + staged)

    def two_shot(self, staged: torch.Tensor) -> None:
        self.calls.append(("two", staged.nbytes))
        staged += staged.clone()


def sums_of(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(nbytes // dtype.itemsize, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("nbytes", "way"),
    [
        (16, "one"),
        (ONE_SHOT_BYTES, "one"),
        (ONE_SHOT_BYTES + 16, "two"),
        (TWO_SHOT_BYTES, "two"),
        (TWO_SHOT_BYTES + 16, None),
    ],
)
def test_size_decides_the_way(nbytes: int, way: str | None, dtype: torch.dtype) -> None:
    peers = Alone()
    group = CountingGroup(SymmetricSums(peers))
    tensor = sums_of(nbytes, dtype)
    assert group.all_reduce(tensor) is tensor
    assert peers.calls == ([(way, nbytes)] if way else [])
    assert group.others == ([] if way else [nbytes])
    assert bool((tensor == (2 if way else 1)).all())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(64, dtype=torch.float16),
        torch.ones(64, dtype=torch.int32),
        torch.ones(0),
        torch.ones(5),
        torch.ones(9)[1:],
        torch.ones(8, 8).t(),
    ],
    ids=["fp16", "int32", "empty", "20 bytes", "begins at byte 4", "transposed"],
)
def test_what_the_kernels_cannot_take_goes_to_nccl(tensor: torch.Tensor) -> None:
    peers = Alone()
    group = CountingGroup(SymmetricSums(peers))
    group.all_reduce(tensor)
    assert (peers.calls, group.others) == ([], [tensor.nbytes])


def test_switched_off_everything_goes_to_nccl() -> None:
    group = CountingGroup(None)
    group.all_reduce(torch.ones(64))
    assert group.others == [256]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_one_after_the_other_are_right_and_equal_on_all_ranks(size: int) -> None:
    """Without a pause between them, over the same buffer, in shapes that change."""
    board = Board(size)
    shapes = [(4, 8), (1, 96), (300, 256), (4, 8), (33, 4096), (2, 8)]

    def draw(rank: int, step: int) -> torch.Tensor:
        return torch.randn(shapes[step], generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()

    def rank_sums(rank: int) -> list[torch.Tensor]:
        sums = SymmetricSums(ThreadPeers(board, rank))
        board.barrier.wait()
        return [sums.all_reduce(draw(rank, step)) for step in range(len(shapes))]

    first, *others = run(size, rank_sums)
    for step, found in enumerate(first):
        exact = sum(draw(rank, step).double() for rank in range(size))
        torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.1)
        assert all(torch.equal(found, other[step]) for other in others)


@pytest.mark.parametrize("nbytes", [4096, ONE_SHOT_BYTES * 2])
def test_a_captured_sum_is_replayed_on_what_the_tensor_holds_then(nbytes: int) -> None:
    """Its buffer stays where it is, and the host reads and decides nothing."""
    sums, tensor = SymmetricSums(Alone()), torch.ones(nbytes // 4)
    sums.all_reduce(tensor)
    graph = RecordedGraph()
    with graph:
        sums.all_reduce(tensor)
    for value in (3.0, -5.0):
        tensor.fill_(value)
        graph.replay()
        assert bool((tensor == 2 * value).all())
    assert graph.names().count("aten.copy_") == 2


def test_steps_may_be_captured_with_it() -> None:
    assert CountingGroup(SymmetricSums(Alone())).symmetric is not None
    for transport, refused in (("nccl", False), ("nccl and symmetric memory", False), ("gloo", True)):
        reason = capture_refusal(torch.device("cuda"), "mixed", transport, enforce_eager=False)
        assert (reason is not None) == refused


def opened(
    size: int, make: Callable[[Board, int], Any] = ThreadPeers, board: Board | None = None, ips: str = "same"
) -> list[SymmetricSums | None]:
    board = board or Board(size)

    def open_one(rank: int) -> SymmetricSums | None:
        ip = "10.0.0.1" if ips == "same" else f"10.0.0.{rank}"
        return open_symmetric(lambda: make(board, rank), lambda value: board.smallest(rank, value), rank, size, ip, CPU)

    return run(size, open_one)


@pytest.mark.parametrize("size", [2, 5, MOST_RANKS])
def test_it_is_used_where_it_was_seen_to_add_up(size: int) -> None:
    assert None not in opened(size)


def refuse(board: Board, rank: int) -> ThreadPeers:
    if rank == 1:
        raise RuntimeError("CUDA driver error: peer access is not supported")
    return ThreadPeers(board, rank)


class Wrong(ThreadPeers):
    def two_shot(self, staged: torch.Tensor) -> None:
        super().two_shot(staged)
        if self.rank == 1:
            staged.view(-1)[-1] += 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": 3, "ips": "many"}, "the ranks are on several nodes"),
        ({"size": 3, "make": refuse}, "the ranks' memory cannot be mapped: another rank could not"),
        ({"size": 2, "make": Wrong}, "its kernels added up wrongly when they were tried"),
        ({"size": 2, "board": Board(2, ends_together=False, first=0)}, "its kernels added up wrongly"),
        ({"size": MOST_RANKS + 1}, "9 ranks are more than 8"),
    ],
)
def test_all_ranks_do_without_where_one_has_to(options: dict, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last but one: kernels that do not meet again before they end, so that the next copy overtakes a reader."""
    with caplog.at_level(logging.INFO):
        found = opened(**options)
    assert found == [None] * options["size"]
    assert f"no symmetric memory for small sums: {reason}" in caplog.text


def test_torch_has_the_kernels_that_are_called() -> None:
    names = {
        "one_shot_all_reduce_out": "(Tensor input, str reduce_op, str group_name, Tensor(a!) out) -> Tensor(a!)",
        "two_shot_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    }
    for name, signature in names.items():
        assert str(getattr(torch.ops.symm_mem, name).default._schema) == f"symm_mem::{name}{signature}"


def test_a_renewed_group_has_the_buffers_of_its_new_life() -> None:
    group, other = CountingGroup(SymmetricSums(Alone())), CountingGroup(SymmetricSums(Alone()))
    group.renew(other)
    assert group.symmetric is other.symmetric
    group.symmetric, group.size = other.symmetric, 1
    group.close()
    assert group.symmetric is None
