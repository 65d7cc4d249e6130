"""The kernels as they are compiled for lesser processors than this one."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attention.native
from attention.cpu import CpuBackend
from attention.native import load_library
from parallel.layers import Matrix
from parallel.quantization import Quantization
from tests.attention.batches import Batch, Case
from tests.workers.compiled import (
    DTYPES,
    TOLERANCE,
    Fp32Scales,
    assert_close,
    assert_product,
    kernels_or_skip,
    quantized,
    randn,
)
from workers.kernels import Kernels
from workers.ops import CompiledOps, TorchOps
from workers.products import QUANTIZATIONS, PackedProducts

kernels_or_skip()
NEEDED = {"x86-64": set(), "haswell": {"avx2", "fma", "f16c"}, "skylake-avx512": {"avx512bw", "avx512vl"}}


@pytest.fixture(params=NEEDED, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    info = Path("/proc/cpuinfo")
    features = set(info.read_text().split()) if info.exists() else set()
    if platform.machine() != "x86_64" or not NEEDED[request.param] <= features:
        pytest.skip("this processor is of another kind")
    flags = [flag if flag != "-march=native" else f"-march={request.param}" for flag in attention.native._FLAGS]
    assert flags != list(attention.native._FLAGS)
    monkeypatch.setattr(attention.native, "_FLAGS", tuple(flags))
    load_library.cache_clear()
    yield Kernels()
    load_library.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype) -> None:
    for case in (
        Case([(40, 70), (1, 300), (2, 5)], [1, 64, 257], 16, 2, 3, None, 4, 24),
        Case([(90, 90)], [30], 4, 1, 1, 20, 5, 64),
    ):
        result, expected = (Batch(case, dtype).run(*kind) for kind in ((CpuBackend,), ()))
        assert_close(result, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype, kernels: Kernels) -> None:
    matrix, weight = Matrix(77, 53, dtype, torch.device("cpu")), randn(77, 53, dtype=dtype)
    matrix.fill(weight)
    matrix.adopt(PackedProducts(kernels))
    for rows in (1, 3, 40):
        x = randn(rows, 53, dtype=dtype, seed=rows)
        expected = (x.double() @ weight.double().T).to(dtype)
        torch.testing.assert_close(matrix(x), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    assert torch.equal(matrix.lookup(torch.arange(77), 0), weight)


@pytest.mark.parametrize("quantization", [*QUANTIZATIONS.values(), Fp32Scales(4, group=64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_integers(dtype: torch.dtype, quantization: Quantization, kernels: Kernels) -> None:
    matrix, numbers = quantized(kernels, 77, 90, range(5, 58), dtype, quantization)
    for rows in (1, 3, 40):
        x = randn(rows, 53, dtype=dtype, seed=rows)
        assert_product(x, numbers, None, matrix(x))
    assert torch.equal(matrix.lookup(torch.arange(77), 0), numbers.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operations(dtype: torch.dtype, kernels: Kernels) -> None:
    x, weight, ours, plain = randn(9, 84, dtype=dtype), randn(84, dtype=dtype, seed=1), CompiledOps(kernels), TorchOps()
    assert_close(ours.norm(x, weight, 1e-5), plain.norm(x, weight, 1e-5), dtype)
    assert_close(ours.gate(x), plain.gate(x.float()), dtype)


def test_numbers_of_every_kind_keep_their_value(kernels: Kernels) -> None:
    """All fp16 and bf16 numbers go through a product with one: infinite ones too."""
    for dtype in (torch.float16, torch.bfloat16):
        numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).unsqueeze(1)
        numbers = numbers[~numbers.isnan() & ((numbers == 0) | (numbers.abs() >= torch.finfo(dtype).tiny))].unsqueeze(1)
        matrix = Matrix(1, 1, dtype, torch.device("cpu"))
        matrix.fill(torch.ones(1, 1))
        matrix.adopt(PackedProducts(kernels))
        assert torch.equal(matrix(numbers), numbers)
