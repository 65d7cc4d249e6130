"""Kernels for tests, poisoned memory for their results, and what tensors of each dtype may differ by."""

from __future__ import annotations

import pytest
import torch

from attention.native import NativeError
from workers.kernels import Kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def kernels_or_skip() -> Kernels:
    try:
        return Kernels()
    except NativeError as error:
        pytest.skip(f"no compiled kernels here: {error}", allow_module_level=True)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN."""
    fresh = torch.empty
    poison = lambda *shape, **kinds: fresh(*shape, **kinds).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", poison)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(result.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
