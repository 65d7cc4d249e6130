"""The compiled all-reduce: the same sums and the same protocol as the one in Python, mixed with it at will."""

from __future__ import annotations

import re

import pytest
import torch

from parallel.shared_memory import SLOT_BYTES, RankMissingError, SharedMemory
from tests.ranks import run_shared
from tests.workers.compiled import DTYPES, kernels_or_skip, randn
from workers.kernels import compile_all_reduce

KERNELS = kernels_or_skip()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 231, SLOT_BYTES // 4 + 3])
def test_sums_are_those_of_python_and_the_same_bits_on_every_rank(size: int, dtype: torch.dtype, numel: int) -> None:
    def run(shared: SharedMemory) -> list[torch.Tensor]:
        mine = randn(numel, dtype=dtype, seed=shared.rank)
        plain = shared.all_reduce(mine.clone())
        compile_all_reduce(shared, KERNELS)
        return [plain, shared.all_reduce(mine.clone()), shared.all_gather(mine).sum(0, dtype=torch.float32).to(dtype)]

    results = run_shared(size, run)
    for rank in results:
        for result in rank:
            torch.testing.assert_close(result, results[0][0], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(rank[1], results[0][1])


def test_ranks_may_differ_in_what_they_use() -> None:
    def run(shared: SharedMemory) -> list[float]:
        if shared.rank:
            compile_all_reduce(shared, KERNELS)
        return [shared.all_reduce(torch.full((3,), float(shared.rank + i))).sum().item() for i in range(50)]

    assert run_shared(3, run) == [[9.0 * (i + 1) for i in range(50)]] * 3


def test_a_missing_rank_is_named() -> None:
    def run(shared: SharedMemory) -> str | None:
        compile_all_reduce(shared, KERNELS)
        shared.all_reduce(torch.ones(2))
        if shared.rank == 1:
            return None
        with pytest.raises(RankMissingError) as error:
            shared.all_reduce(torch.ones(2))
        return str(error.value)

    messages = run_shared(3, run, timeout_seconds=0.2)
    assert re.fullmatch(r"rank 0 waited 0.2 s for rank 1 in exchange 2", messages[0])
    assert messages[1] is None
