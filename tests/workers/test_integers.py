"""Linears in int8 and int4 on a GPU, over stand-ins that check what the kernels demand and compute what they give."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel.formats import read_format
from parallel.group import TensorParallelGroup
from parallel.layers import Matrix, TorchProducts
from parallel.loader import Checkpoint
from parallel.quantization import Float8, Quantization, to_int8
from tests.models import make_tiny_model
from tests.packing import KINDS, Kind, store
from tests.ranks import run_ranks
from tests.workers import kernel_contracts
from tests.workers.compiled import randn
from tests.workers.kernel_contracts import random_matrix
from workers.architecture import read_architecture
from workers.fp8 import Fp8Products
from workers.integers import Int4Products, Int8Products
from workers.model import Decoder, make_shard
from workers.products import Packer, expect_stored

CPU, BF16 = torch.device("cpu"), torch.bfloat16
ANY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def stand_ins() -> Iterator[None]:
    with kernel_contracts.on_cpu():
        yield


def test_the_stand_in_packs_as_the_kernel_does() -> None:
    """Output 5 in lane 20 to 23; of lane 22's two tiles the inputs 4, 5, 12, 13 and 20, 21, 28, 29."""
    q = torch.zeros(8, 32, dtype=torch.uint8)
    q[5, [4, 5, 12, 13, 20, 21, 28, 29]] = torch.arange(1, 9, dtype=torch.uint8)
    packed = kernel_contracts.convert_weight_to_int4pack((q[:, ::2] << 4 | q[:, 1::2]).contiguous(), 2)
    assert packed[0, 0, 22, 0].item() & 0xFFFFFFFF == 0x86427531
    assert packed.count_nonzero() == 1


@ANY
@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.integers(1, 400),
    st.integers(0, 150),
    st.sampled_from([BF16, torch.float16, torch.float32]),
    st.booleans(),
    st.integers(0, 99),
)
def test_int4_of_any_shape_and_any_part_of_the_groups(
    rows: int, outputs: int, group: int, inputs: int, before: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    part = range(before, before + inputs)
    matrix = random_matrix(Quantization(4, group), outputs, before + inputs + 5, part, dtype, CPU, seed)
    numbers = matrix.quantization.dequantize(matrix.weight, matrix.scales.bfloat16(), matrix.begun)
    matrix.adopt(Int4Products())
    assert matrix.weight.dtype == torch.int32
    x, bias = randn(rows, inputs, dtype=dtype, seed=seed), randn(outputs, dtype=dtype, seed=3) if has_bias else None
    expected = x.bfloat16().double() @ numbers.bfloat16().double().T + (0 if bias is None else bias.double())
    result = matrix(x, bias)
    assert (result.dtype, result.shape) == (dtype, (rows, outputs))
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2 * inputs**0.5)
    assert matrix(x, wide=True).dtype == torch.float32
    assert kernel_contracts.calls[-1] == "int4"


def test_int4_takes_half_a_byte_a_weight_and_four_bytes_a_group() -> None:
    matrix = random_matrix(Quantization(4, 128), 256, 512, range(512), BF16, CPU, 0)
    matrix.adopt(Int4Products())
    assert matrix.weight.nbytes + matrix.scales.nbytes == 256 * 512 // 2 + 256 * 4 * 4


@ANY
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 100), st.booleans(), st.integers(0, 99))
def test_int8_of_any_shape(rows: int, outputs: int, inputs: int, has_bias: bool, seed: int) -> None:
    matrix = random_matrix(Quantization(8, activations=True), outputs, inputs, range(inputs), BF16, CPU, seed)
    numbers = matrix.quantization.dequantize(matrix.weight, matrix.scales)
    ids = torch.tensor([100, 99 + outputs, 99, 100 + outputs])
    matrix.adopt(Int8Products())
    x, bias = randn(2, rows, inputs, dtype=BF16, seed=seed), randn(outputs, dtype=BF16, seed=3) if has_bias else None
    codes, scales = to_int8(x.flatten(0, 1))
    taken = (codes.double() * scales[:, None]).view(x.shape)
    expected = taken @ numbers.double().T
    torch.testing.assert_close(matrix(x, wide=True).double(), expected, rtol=1e-5, atol=1e-3)
    result = matrix(x, bias)
    assert result.dtype == BF16
    torch.testing.assert_close(result.double(), expected + (0 if bias is None else bias.double()), rtol=1e-2, atol=1e-2)
    assert kernel_contracts.calls[-1] == "int8"
    rows_found = matrix.lookup(ids, 100)
    assert torch.equal(rows_found, torch.cat((numbers[[0, -1]], torch.zeros(2, inputs))).to(BF16))


@pytest.mark.parametrize(
    ("quantization", "capability", "kind"),
    [
        (Quantization(4, 128), (8, 0), Int4Products),
        (Quantization(4, 128), (7, 5), TorchProducts),
        (Quantization(4, 48), (9, 0), TorchProducts),
        (Quantization(8, activations=True), (8, 0), Int8Products),
        (Quantization(8, activations=True), (7, 5), TorchProducts),
        (Quantization(8), (9, 0), TorchProducts),
        (Quantization(8, 32), (9, 0), TorchProducts),
        (Float8(), (8, 9), Fp8Products),
        (Float8(), (8, 0), TorchProducts),
    ],
)
def test_what_a_gpu_has_no_kernel_for_becomes_plain_numbers(
    quantization: Quantization | Float8, capability: tuple[int, int], kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = random_matrix(quantization, 16, 96, range(96), BF16, CPU, 0)
    numbers, pack = matrix.plain(), Packer(None, capability)
    with caplog.at_level(logging.WARNING):
        pack(matrix)
    assert isinstance(matrix.products, kind)
    assert ("no kernel here for" in caplog.text) == (kind is TorchProducts)
    if kind is TorchProducts:
        assert torch.equal(matrix.weight, numbers)


GPU_KINDS: dict[str, tuple[Kind, str, float]] = {
    "gptq": (KINDS["gptq 32"], "int4", 0.03),
    "awq": (KINDS["awq 32"], "int4", 0.03),
    "packed rows": (KINDS["packed rows"], "int4", 0.03),
    "w8a8": (KINDS["w8a8"], "int8", 0.05),
    "fp8": (KINDS["fp8"], "", 0.15),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", GPU_KINDS)
def test_a_model_on_gpus_computes_what_its_numbers_give(name: str, size: int, tmp_path: Path) -> None:
    """Without attention, so that nothing but linears is rounded; a single matrix at a time is there unpacked."""
    kind, kernel, tolerance = GPU_KINDS[name]
    sizes = {"hidden_size": 96, "head_dim": 16, "intermediate_size": 160}
    stored, plain = store(make_tiny_model("llama", tmp_path / "model", **sizes), kind, tmp_path)
    ids = torch.arange(30)

    def run(folder: Path, group: TensorParallelGroup) -> torch.Tensor:
        arch = read_architecture(folder)
        model = Decoder(arch, make_shard(arch, group, torch.float32, CPU), 64)
        matrices = [part for part in model.modules() if isinstance(part, Matrix)]
        assert all(matrix.weight.is_meta for matrix in matrices)
        packer, packed = Packer(None, (9, 0)), set()

        def pack(matrix: Matrix) -> None:
            assert all(other is matrix or other in packed or other.weight.is_meta for other in matrices)
            packer(matrix)
            packed.add(matrix)

        if arch.stored:
            expect_stored(model, arch.stored)
        with Checkpoint(folder) as checkpoint, torch.inference_mode():
            model.load(checkpoint, pack=pack)
            return model(ids, ids, lambda layer, query, *_: query)

    expected = run(plain, TensorParallelGroup())
    kernel_contracts.calls.clear()
    for found in run_ranks(size, lambda group: run(stored, group)):
        assert 0 < (found - expected).norm() / expected.norm() < tolerance
    assert (kernel in kernel_contracts.calls) == bool(kernel)


def test_the_format_of_a_checkpoint_reaches_linears_and_a_head_of_its_own(tmp_path: Path) -> None:
    for kind, tied in (("llama", False), ("qwen2", True)):
        arch = read_architecture(make_tiny_model(kind, tmp_path / kind))
        model = Decoder(arch, make_shard(arch, TensorParallelGroup(), BF16, CPU), 64)
        stored = read_format(KINDS["awq"].config)
        expect_stored(model, stored)
        assert model.layers[0].mlp.down.matrix.stored == model.layers[0].attention.qkv.matrix.stored == stored
        assert (model.head.matrix.stored is None) == tied
        assert model.embed.matrix.stored is None
