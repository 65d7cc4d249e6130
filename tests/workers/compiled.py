"""Kernels for tests, poisoned memory for their results, and what tensors of each dtype may differ by."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from attention.native import NativeError
from parallel.layers import Matrix
from parallel.quantization import Quantization
from workers.kernels import Kernels
from workers.products import PackedProducts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def kernels_or_skip() -> Kernels:
    try:
        return Kernels()
    except NativeError as error:
        pytest.skip(f"no compiled kernels here: {error}", allow_module_level=True)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or a number that is hardly right."""
    fresh = torch.empty

    def poison(*shape: object, **kinds: object) -> torch.Tensor:
        tensor = fresh(*shape, **kinds)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x5A)

    monkeypatch.setattr(torch, "empty", poison)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(result.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def assert_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = TOLERANCE[result.dtype] * max(1.0, weight.shape[1] ** 0.5)
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[result.dtype], atol=tolerance)


@dataclass(frozen=True, slots=True)
class Fp32Scales(Quantization):
    """int4 with the scales that checkpoints bring: none that fit in bf16."""

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = Quantization.quantize(self, weight)
        return codes, scales.float() * (1 + 2**-12)


class OneTensor:
    """A checkpoint of a single tensor in memory."""

    folder = "memory"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __contains__(self, name: str) -> bool:
        return name == "weight"

    def read(self, name: str, shape: tuple[int, ...], cut: dict[int, range]) -> torch.Tensor:
        assert shape == self.tensor.shape
        return self.tensor[cut[0].start : cut[0].stop, cut[1].start : cut[1].stop]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)


def quantized(
    kernels: Kernels, outputs: int, total: int, inputs: range, dtype: torch.dtype, kind: Quantization, seed: int = 0
) -> tuple[Matrix, torch.Tensor]:
    """A packed matrix of integers, of a part of the inputs, and the fp32 numbers that they stand for."""
    matrix = Matrix(outputs, len(inputs), dtype, torch.device("cpu"))
    matrix.quantize(kind)
    weight = randn(outputs, total, dtype=torch.float32, seed=seed)
    matrix.read(OneTensor(weight), "weight", (outputs, total), range(outputs), inputs)
    numbers = kind.dequantize(matrix.weight, matrix.scales, matrix.begun)
    matrix.adopt(PackedProducts(kernels))
    return matrix, numbers
