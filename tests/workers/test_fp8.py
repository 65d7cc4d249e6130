"""Linears in fp8, by torch's product on CPU, which is the function that CUDA runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.group import TensorParallelGroup
from parallel.layers import Matrix
from parallel.loader import Checkpoint
from parallel.quantization import Float8, NotFinite, to_float8
from tests.models import make_tiny_model
from tests.workers.compiled import OneTensor, randn
from workers.architecture import read_architecture
from workers.fp8 import Fp8Products, NoFp8, check_fp8
from workers.model import Decoder, make_shard
from workers.products import Packer, quantize

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def fp8_matrix(outputs: int, inputs: range, total: int, seed: int) -> tuple[Matrix, torch.Tensor]:
    """A matrix of a part of the inputs, and the numbers that it stands for."""
    matrix = Matrix(outputs, len(inputs), BF16, CPU)
    matrix.quantize(Float8())
    weight = randn(outputs, total, dtype=torch.float32, seed=seed)
    matrix.read(OneTensor(weight), "weight", (outputs, total), range(outputs), inputs)
    numbers = Float8().dequantize(matrix.weight, matrix.scales)
    whole = Float8().dequantize(*Float8().quantize(weight))
    assert torch.equal(numbers, whole[:, inputs.start : inputs.stop])  # whatever part a rank holds
    matrix.adopt(Fp8Products())
    return matrix, numbers


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 50), st.integers(1, 70), st.integers(0, 9), st.booleans(), st.integers(0, 99))
def test_any_shape(rows: int, outputs: int, inputs: int, before: int, has_bias: bool, seed: int) -> None:
    matrix, numbers = fp8_matrix(outputs, range(before, before + inputs), before + inputs + 3, seed)
    x = randn(2, rows, inputs, dtype=BF16, seed=seed + 1)
    bias = randn(outputs, dtype=BF16, seed=3) if has_bias else None
    codes, scales = to_float8(x.flatten(0, 1))
    taken = (codes.float() * scales[:, None]).view(x.shape)
    expected = taken.double() @ numbers.double().T + (0 if bias is None else bias.double())
    result = matrix(x, bias)
    assert result.dtype == BF16
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2 * inputs**0.5)
    assert matrix(x, wide=True).dtype == torch.float32


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_numbers_keep_three_bits_of_mantissa(size: float) -> None:
    weight = randn(9, 50, dtype=torch.float32) * size
    weight[3] = 0
    error = (Float8().dequantize(*Float8().quantize(weight)) - weight).abs()
    least = weight.abs().amax(1, keepdim=True) / 448 * 2**-9  # below, numbers are subnormal
    assert (error <= torch.maximum(weight.abs() * 2**-4, least) * 1.01).all()
    with pytest.raises(NotFinite):
        Float8().quantize(torch.tensor([[1.0, float("nan")]]))


def test_lookup_gives_rows_and_zeros_for_those_of_others() -> None:
    matrix, numbers = fp8_matrix(50, range(1, 22), 30, 0)
    rows = matrix.lookup(torch.tensor([100, 149, 99, 150]), 100)
    assert torch.equal(rows, torch.cat((numbers[[0, 49]], torch.zeros(2, 21))).to(BF16))


def test_linears_become_fp8_and_head_and_embedding_do_not(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    arch = read_architecture(folder)
    models = [Decoder(arch, make_shard(arch, TensorParallelGroup(), BF16, CPU), 64) for _ in range(2)]
    quantize(models[0], models[0].head.matrix, "fp8")
    for model, pack in zip(models, (Packer(None, (8, 9)), None), strict=True):
        with Checkpoint(folder) as checkpoint:
            model.load(checkpoint, pack=pack)
    layer = models[0].layers[0]
    for part in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
        assert part.matrix.weight.dtype == torch.float8_e4m3fn
    assert {models[0].head.matrix.weight.dtype, models[0].embed.matrix.weight.dtype} == {BF16}
    x = randn(5, arch.hidden_size, dtype=BF16)
    got, plain = (model.layers[0].mlp(x).float() for model in models)
    assert 0 < (got - plain).norm() / plain.norm() < 0.1


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(NoFp8, match=r"8\.9, A100 has 8\.0"):
        check_fp8(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_fp8(torch.device("cuda", 0))
    check_fp8(CPU)
