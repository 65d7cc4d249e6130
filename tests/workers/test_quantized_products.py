"""Products with int8 and int4 weights against the exact product with the numbers that they stand for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel.group import TensorParallelGroup
from parallel.layers import Matrix
from parallel.loader import Checkpoint
from parallel.quantization import Quantization
from tests.models import make_tiny_model
from tests.workers.compiled import DTYPES, Fp32Scales, assert_product, kernels_or_skip, poisoned, quantized, randn
from workers.architecture import read_architecture
from workers.model import Decoder, make_shard
from workers.ops import CompiledOps
from workers.products import QUANTIZATIONS, PackedProducts, Packer, quantize

KERNELS = kernels_or_skip()
KINDS = [*QUANTIZATIONS.values(), Quantization(4, group=6), Fp32Scales(4, group=8), Fp32Scales(4, group=256)]
pytestmark = pytest.mark.usefixtures(poisoned.__name__)


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, range]:
    """A number of inputs, and the range of them that a rank holds."""
    total = draw(st.integers(1, 150))
    start = draw(st.integers(0, total - 1))
    return total, range(start, draw(st.integers(start + 1, total)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([1, 2, 3, 5, 7, 12, 13, 29, 97]),
    st.integers(1, 100),
    parts(),
    st.sampled_from(DTYPES),
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(0, 100),
)
def test_any_shape_and_any_part_of_the_inputs(
    rows: int, outputs: int, part: tuple[int, range], dtype: torch.dtype, kind: Quantization, has_bias: bool, seed: int
) -> None:
    total, inputs = part
    packed, numbers = quantized(KERNELS, outputs, total, inputs, dtype, kind, seed)
    x = randn(rows, len(inputs), dtype=dtype, seed=seed + 1)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    result = packed(x, bias)
    assert result.dtype == dtype
    assert_product(x, numbers, bias, result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 200])
def test_more_depth_than_is_converted_at_once(kind: Quantization, rows: int) -> None:
    packed, numbers = quantized(KERNELS, 45, 5001, range(5001), torch.bfloat16, kind)
    x = randn(rows, 5001, dtype=torch.bfloat16, seed=1) / 70
    assert_product(x, numbers, None, packed(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [range(200), range(3, 199), range(32, 96)])
def test_a_row_is_the_same_to_the_bit_whatever_is_computed_with_it(
    dtype: torch.dtype, kind: Quantization, inputs: range
) -> None:
    packed, _ = quantized(KERNELS, 100, 200, inputs, dtype, kind)
    x = randn(150, len(inputs), dtype=dtype, seed=1)
    together = packed(x)
    assert not together.isnan().any()
    for count in (1, 2, 3, 4, 6, 7, 11, 12, 13, 31):
        assert torch.equal(packed(x[:count]), together[:count])
        assert torch.equal(packed(x[-count:]), together[-count:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_wide_results_are_fp32_and_not_rounded_before(dtype: torch.dtype, kind: Quantization) -> None:
    packed, numbers = quantized(KERNELS, 40, 96, range(96), dtype, kind)
    if kind.group and dtype == torch.bfloat16:  # with their scales, integers become numbers of the activations' kind
        numbers = numbers.to(dtype)
    x = randn(3, 96, dtype=dtype, seed=1)
    result = packed(x, wide=True)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), x.double() @ numbers.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_lookup_gives_the_numbers_and_zeros_for_rows_of_others(dtype: torch.dtype, kind: Quantization) -> None:
    packed, numbers = quantized(KERNELS, 50, 70, range(1, 64), dtype, kind)
    rows = packed.lookup(torch.tensor([100, 149, 131, 131, 99, 150, 0]), 100)
    assert torch.equal(rows[:4], numbers[[0, 49, 31, 31]].to(dtype))
    assert torch.equal(rows[4:], torch.zeros(3, 63, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_inputs_adds_nothing(kind: Quantization) -> None:
    packed, _ = quantized(KERNELS, 20, 64, range(3, 3), torch.bfloat16, kind)
    assert torch.equal(packed(torch.empty(3, 0, dtype=torch.bfloat16)), torch.zeros(3, 20, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernels", [KERNELS, None])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # the first ties its head to the embedding
def test_linears_and_head_become_integers_and_an_embedding_of_its_own_does_not(
    kind: str, kernels: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(kind, tmp_path)
    arch = read_architecture(folder)
    model = Decoder(arch, make_shard(arch, TensorParallelGroup(), torch.float32, torch.device("cpu")), 64)
    quantize(model, model.head.matrix, "int4")
    with Checkpoint(folder) as checkpoint:
        model.load(checkpoint)
    down, head, embed = model.layers[0].mlp.down.matrix, model.head.matrix, model.embed.matrix
    assert (down.quantization.bits, head.quantization.bits) == (4, 8)
    assert (embed is head) == (kind == "qwen2")
    if embed is not head:
        assert embed.quantization is None
    numbers = down.plain()
    with caplog.at_level(logging.WARNING):
        for matrix in {part for part in model.modules() if isinstance(part, Matrix)}:
            Packer(kernels, None)(matrix)
    x = randn(2, down.inputs, dtype=torch.float32)
    torch.testing.assert_close(down(x), x @ numbers.T, rtol=1e-4, atol=1e-4)
    if kernels is None:
        assert down.weight.dtype == torch.float32
        assert "neither smaller nor faster" in caplog.text
    else:
        assert isinstance(embed.products, PackedProducts)
        assert down.weight.numel() == -(-down.outputs // 32) * 32 * down.inputs // 2
        assert not caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_gated_outputs_are_to_the_bit_those_of_two_steps(kind: Quantization, rows: int) -> None:
    packed, _ = quantized(KERNELS, 128, 96, range(96), torch.bfloat16, kind)
    x = randn(rows, 96, dtype=torch.bfloat16, seed=1)
    assert torch.equal(packed.products.multiply_gated(packed, x), CompiledOps(KERNELS).gate(packed(x)))
