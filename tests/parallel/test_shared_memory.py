"""Collectives through shared memory: right, the same bits on every rank, and plain about a rank that is missing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from parallel.shared_memory import SLOT_BYTES, RankMissingError, SharedMemory, open_shared_memory
from tests.ranks import run_processes, run_shared

SIZES = [2, 3, 5]
SLOT_FLOATS = SLOT_BYTES // 4


def piece(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What `rank` brings; other ranks can compute it too."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**62), 2**62, shape, generator=generator).to(dtype)


def stacked(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.stack([piece(rank, shape, dtype, seed) for rank in range(size)])


class SlowReader(SharedMemory):
    """Reads the slots only some time after the others may have gone on."""

    def _exchange(self, piece: torch.Tensor) -> torch.Tensor:
        buffer = super()._exchange(piece)
        time.sleep(random.Random(f"{self.rank} {self._count}").choice([0, 0, 0.0005, 0.003]))
        return buffer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7, 33)])
def test_all_reduce_is_the_sum_and_the_same_bits_everywhere(
    size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    results = run_shared(size, lambda shared: shared.all_reduce(piece(shared.rank, shape, dtype)))
    expected = stacked(size, shape, dtype).double().sum(dim=0)
    torch.testing.assert_close(results[0], expected.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, results[0])


def test_all_reduce_works_in_place() -> None:
    def run(shared: SharedMemory) -> bool:
        tensor = torch.ones(4, 2)
        result = shared.all_reduce(tensor)
        return result is tensor and bool((tensor == 2).all())

    assert run_shared(2, run) == [True, True]


def test_half_precision_is_summed_in_fp32() -> None:
    """In bf16, 256 + 1 is 256 again, however often."""
    parts = [256.0, 1.0, 1.0]
    results = run_shared(3, lambda shared: shared.all_reduce(torch.tensor([parts[shared.rank]]).bfloat16()))
    assert [result.item() for result in results] == [258.0] * 3


@pytest.mark.parametrize("numel", [SLOT_FLOATS - 1, SLOT_FLOATS, SLOT_FLOATS + 1, 2 * SLOT_FLOATS + 5])
def test_tensors_around_and_beyond_a_slot(numel: int) -> None:
    def run(shared: SharedMemory) -> tuple[torch.Tensor, torch.Tensor]:
        mine = piece(shared.rank, (numel,), torch.float32)
        return shared.all_gather(mine), shared.all_reduce(mine.clone())

    parts = stacked(2, (numel,), torch.float32)
    for gathered, reduced in run_shared(2, run):
        assert torch.equal(gathered, parts)
        assert torch.equal(reduced, parts.sum(dim=0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_gathered_tensors_of_any_width_are_cut_by_bytes(dtype: torch.dtype) -> None:
    shape = (SLOT_FLOATS + 3,)
    for result in run_shared(2, lambda shared: shared.all_gather(piece(shared.rank, shape, dtype))):
        assert torch.equal(result, stacked(2, shape, dtype))


def test_a_large_bf16_tensor_is_cut_by_bytes_not_by_elements() -> None:
    shape = (3, SLOT_FLOATS)  # three halves of a slot
    results = run_shared(3, lambda shared: shared.all_reduce(piece(shared.rank, shape, torch.bfloat16)))
    expected = stacked(3, shape, torch.bfloat16).float().sum(dim=0).bfloat16()
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_run_ahead_of_slow_readers(size: int) -> None:
    """No rank's slot is overwritten before everybody has read it, however unevenly the ranks run."""
    calls = 150

    def run(shared: SharedMemory) -> list[torch.Tensor]:
        results = []
        for call in range(calls):
            mine = torch.full((64,), float(1000 * call + shared.rank))
            results.append(shared.all_gather(mine)[:, ::63] if call % 3 else shared.all_reduce(mine)[::63])
        return results

    for results in run_shared(size, run, kind=SlowReader):
        for call, result in enumerate(results):
            brought = torch.tensor([[1000.0 * call + rank] * 2 for rank in range(size)])
            assert torch.equal(result, brought if call % 3 else brought.sum(dim=0)), f"call {call}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_all_gather_stacks_by_rank(size: int, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (2, 3, 5)]
    results = run_shared(size, lambda shared: [shared.all_gather(piece(shared.rank, shape, dtype)) for shape in shapes])
    for gathered in results:
        for shape, result in zip(shapes, gathered, strict=True):
            assert result.dtype == dtype
            assert torch.equal(result, stacked(size, shape, dtype))


def test_all_gather_takes_tensors_that_are_not_contiguous() -> None:
    results = run_shared(2, lambda shared: shared.all_gather(piece(shared.rank, (4, 6), torch.float32).T[1:]))
    for result in results:
        assert torch.equal(result, stacked(2, (4, 6), torch.float32).transpose(1, 2)[:, 1:])


def test_gathered_tensors_keep_their_values_in_later_calls() -> None:
    def run(shared: SharedMemory) -> torch.Tensor:
        first = shared.all_gather(torch.full((8,), float(shared.rank)))
        for _ in range(4):
            shared.all_gather(torch.full((8,), 99.0))
        return first

    for result in run_shared(2, run):
        assert result[:, 0].tolist() == [0.0, 1.0]


def test_a_rank_that_never_comes_is_named_with_the_exchange() -> None:
    def run(shared: SharedMemory) -> None:
        shared.all_reduce(torch.ones(1))
        if shared.rank != 2:
            shared.all_reduce(torch.ones(1))

    with pytest.raises(RankMissingError, match=r"rank [01] waited 0\.2 s for rank 2 in exchange 2"):
        run_shared(3, run, timeout_seconds=0.2)


def _collect(store: dist.Store, rank: int, size: int) -> tuple[list[float], list[list[int]]]:
    shared = open_shared_memory(store, rank, size, 30.0)
    for _ in range(50):
        total = shared.all_reduce(torch.tensor([1.0, float(rank)]))
    return total.tolist(), shared.all_gather(torch.tensor([rank, 2**60 + rank])).tolist()


def test_ranks_in_processes_of_their_own() -> None:
    for total, gathered in run_processes(2, _collect):
        assert total == [2.0, 1.0]
        assert gathered == [[0, 2**60], [1, 2**60 + 1]]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("quadriga-somebody-else")
    yield number
    os.close(number)


def test_another_file_under_the_same_numbers_is_not_taken(store: dist.Store, descriptor: int) -> None:
    store.set("shared-memory", f"{os.getpid()} {descriptor} quadriga-0123456789abcdef")
    assert open_shared_memory(store, 1, 2, 1.0) is None


def test_a_rank_that_cannot_see_the_process_gets_none(store: dist.Store, descriptor: int) -> None:
    store.set("shared-memory", f"{2**22 + 1} {descriptor} quadriga-somebody-else")
    assert open_shared_memory(store, 1, 2, 1.0) is None


def test_machines_whose_stores_may_be_reordered_get_none(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert open_shared_memory(store, 0, 2, 1.0) is None
