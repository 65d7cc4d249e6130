"""Packed linears against the exact product, for every dtype and shape, into memory full of NaN."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention.native import Recording
from parallel.layers import ColumnParallelLinear, Matrix, TorchProducts
from tests.workers.compiled import DTYPES, assert_product, kernels_or_skip, poisoned, randn
from workers.ops import CompiledOps, TorchOps
from workers.products import PackedProducts, settle_products

KERNELS = kernels_or_skip()
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)


def matrix(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Matrix, torch.Tensor]:
    """A packed matrix and its weight as it was."""
    made = Matrix(outputs, inputs, dtype, CPU)
    weight = randn(outputs, inputs, dtype=dtype, seed=seed)
    made.fill(weight)
    made.adopt(PackedProducts(KERNELS))
    return made, weight


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([1, 2, 5, 12, 13, 29, 97]),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 100),
)
def test_any_shape(rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool, seed: int) -> None:
    packed, weight = matrix(outputs, inputs, dtype, seed)
    x, bias = randn(rows, inputs, dtype=dtype, seed=seed + 1), randn(outputs, dtype=dtype) if has_bias else None
    result = packed(x, bias)
    assert result.dtype == dtype
    assert_product(x, weight, bias, result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 200])
def test_sums_longer_than_a_block_of_depth(dtype: torch.dtype, rows: int) -> None:
    packed, weight = matrix(45, 5001, dtype)
    x = randn(rows, 5001, dtype=dtype, seed=1) / 70
    assert_product(x, weight, None, packed(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [33, 64])
def test_a_row_is_the_same_to_the_bit_whatever_is_computed_with_it(dtype: torch.dtype, inputs: int) -> None:
    packed, _ = matrix(100, inputs, dtype)
    x = randn(150, inputs, dtype=dtype, seed=1)
    together = packed(x)
    for count in (1, 2, 3, 7, 11, 12, 13, 31):
        assert torch.equal(packed(x[:count]), together[:count])
        assert torch.equal(packed(x[-count:]), together[-count:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_results_are_fp32_and_not_rounded_before(dtype: torch.dtype) -> None:
    packed, weight = matrix(40, 48, dtype)
    x = randn(3, 48, dtype=dtype, seed=1)
    result = packed(x, wide=True)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [7, 64])
def test_lookup_gives_back_the_very_rows_and_zeros_for_those_of_others(dtype: torch.dtype, inputs: int) -> None:
    packed, weight = matrix(50, inputs, dtype)
    ids = torch.tensor([100, 149, 131, 131, 99, 150, 0])
    rows = packed.lookup(ids, 100)
    assert torch.equal(rows[:4], weight[[0, 49, 31, 31]])
    assert torch.equal(rows[4:], torch.zeros(3, inputs, dtype=dtype))
    assert torch.equal(rows, TorchProducts().lookup(_plain(weight), ids, 100))


def _plain(weight: torch.Tensor) -> Matrix:
    plain = Matrix(*weight.shape, weight.dtype, CPU)
    plain.fill(weight)
    return plain


def test_slices_and_more_dimensions_are_taken() -> None:
    packed, weight = matrix(20, 16, torch.float32)
    x = randn(2, 3, 40, dtype=torch.float32)
    result = packed(x[..., 5:21])
    assert result.shape == (2, 3, 20)
    torch.testing.assert_close(result, x[..., 5:21] @ weight.T)


def test_a_rank_without_inputs_adds_nothing() -> None:
    packed, _ = matrix(20, 0, torch.float32)
    assert torch.equal(packed(torch.empty(3, 0)), torch.zeros(3, 20))


def test_products_are_settled_by_measurement_and_the_log_says_how(caplog: pytest.LogCaptureFixture) -> None:
    shared = Matrix(64, 32, torch.bfloat16, CPU)
    weight = randn(64, 32, dtype=torch.bfloat16)
    shared.fill(weight)
    empty = Matrix(0, 32, torch.bfloat16, CPU)
    empty.fill(torch.empty(0, 32))
    model = torch.nn.ModuleList([shared, torch.nn.ModuleList([shared]), empty])
    with caplog.at_level(logging.INFO):
        settle_products(model, KERNELS)
    assert "64x32" in caplog.text
    assert torch.equal(shared.lookup(torch.arange(64), 0), weight)  # tied, and packed once only
    assert len({type(part.products) for part in (shared, model[2])}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 12, 13, 100])
def test_gated_outputs_are_to_the_bit_those_of_two_steps(dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    packed, _ = matrix(192, 40, dtype)
    x, bias = randn(rows, 40, dtype=dtype, seed=1), randn(192, dtype=dtype) if has_bias else None
    expected = CompiledOps(KERNELS).gate(packed(x, bias))
    result = packed.products.multiply_gated(packed, x, bias)
    assert result.dtype == dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("size", "is_one_step"), [(64, True), (33, False)])
def test_gates_that_share_a_panel_with_others_take_two_steps(size: int, is_one_step: bool) -> None:
    parts = [("gate", size, range(size)), ("up", size, range(size))]
    linear = ColumnParallelLinear(40, parts, False, torch.float32, CPU)
    linear.matrix.fill(randn(2 * size, 40, dtype=torch.float32))
    linear.matrix.adopt(PackedProducts(KERNELS))
    recording = Recording()
    with recording.record():
        CompiledOps(KERNELS).gated(linear, randn(3, 40, dtype=torch.float32))
    assert len(recording.calls) == (1 if is_one_step else 2)
    x = randn(3, 40, dtype=torch.float32)
    torch.testing.assert_close(CompiledOps(KERNELS).gated(linear, x), TorchOps().gated(linear, x))
