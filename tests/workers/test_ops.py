"""The compiled small operations against those in plain torch, which rounds in between unless it computes in fp32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention.backend import HeadLayout
from attention.reference import ReferenceBackend
from tests.workers.compiled import DTYPES, assert_close, kernels_or_skip, poisoned, randn
from workers.ops import CompiledOps, TorchOps

COMPILED, TORCH = CompiledOps(kernels_or_skip()), TorchOps()
pytestmark = pytest.mark.usefixtures(poisoned.__name__)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
rows_, sizes, dtypes, seeds = (
    st.sampled_from([1, 2, 3, 17, 300]),
    st.integers(1, 150),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)


@relaxed
@given(rows_, sizes, dtypes, st.booleans(), seeds)
def test_norm_with_and_without_residual(rows: int, size: int, dtype: torch.dtype, has_delta: bool, seed: int) -> None:
    x, delta = randn(rows, size, dtype=dtype, seed=seed), randn(rows, size, dtype=dtype, seed=seed + 1)
    weight, delta = randn(size, dtype=dtype, seed=seed + 2), delta if has_delta else None
    expected = TORCH.add_norm(x.clone(), delta, weight, 1e-5)
    for result, wanted in zip(COMPILED.add_norm(x, delta, weight, 1e-5), expected, strict=True):
        assert result.dtype == dtype
        assert_close(result, wanted, dtype)


@relaxed
@given(rows_, st.integers(1, 5), st.sampled_from([8, 20, 64]), dtypes)
def test_norm_of_heads_that_are_slices(rows: int, heads: int, size: int, dtype: torch.dtype) -> None:
    fused = randn(rows, heads * size + 24, dtype=dtype)
    x, weight = fused[:, : heads * size].unflatten(1, (heads, size)), randn(size, dtype=dtype, seed=1)
    assert_close(COMPILED.norm(x, weight, 1e-6), TORCH.norm(x, weight, 1e-6), dtype)


@relaxed
@given(rows_, sizes, dtypes, st.sampled_from([0.1, 1.0, 30.0, 300.0]))
def test_gate(rows: int, size: int, dtype: torch.dtype, scale: float) -> None:
    gate_up = (randn(rows, 2 * size, dtype=torch.float32) * scale).to(dtype)
    gate_up[:, size:] /= scale
    assert_close(COMPILED.gate(gate_up) / scale, TORCH.gate(gate_up.float()) / scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_of_extremes(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-math.inf, math.inf, math.nan, -1e4, 1e4, 0.0]]).to(dtype)
    result = COMPILED.gate(torch.cat((gate, torch.ones_like(gate)), dim=1))[0].float()
    assert result[1] == math.inf
    assert result[2].isnan()
    torch.testing.assert_close(result[3:], gate[0, 3:].float().clamp(min=0), rtol=0, atol=1e-30)


@relaxed
@given(rows_, st.integers(1, 4), st.integers(1, 2), st.sampled_from([2, 8, 20, 64, 128]), dtypes, st.booleans())
def test_rotation_with_the_cache_write(
    rows: int, group: int, kv_heads: int, size: int, dtype: torch.dtype, rotates: bool
) -> None:
    heads, blocks = group * kv_heads, -(-rows // 4) + 2
    slots = torch.randperm(blocks * 4, generator=torch.Generator().manual_seed(rows))[:rows]
    angles = COMPILED.gather(randn(500, 2, 1, size, dtype=dtype, seed=1), torch.arange(rows) % 500)
    backend, results = ReferenceBackend(HeadLayout(heads, kv_heads, size), 1.0), []
    for ops, precision in ((COMPILED, dtype), (TORCH, torch.float32)):
        rotary = angles.to(precision).unbind(1) if rotates else None
        pages = tuple(torch.full((blocks, 4, kv_heads, size), float("nan"), dtype=precision) for _ in range(2))
        fused = randn(rows, (heads + 2 * kv_heads) * size, dtype=dtype, seed=2).to(precision)
        parts = fused.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
        query, key, value = (part.unflatten(1, (-1, size)) for part in parts)
        results.append((ops.store(query, key, value, rotary, pages, slots, backend), *pages))
    for result, wanted in zip(*results, strict=True):
        assert torch.equal(result.isnan(), wanted.isnan())
        assert_close(result.nan_to_num(), wanted.nan_to_num(), dtype)


def test_gather_takes_rows_of_any_shape() -> None:
    table, rows = randn(9, 2, 1, 5, dtype=torch.float32), torch.tensor([8, 0, 0, 3])
    assert torch.equal(COMPILED.gather(table, rows), table[rows])
