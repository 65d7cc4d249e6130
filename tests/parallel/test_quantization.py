"""Integers stand for the numbers they were made of as closely as their scale allows, however a matrix is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallel.layers import ColumnParallelLinear, Matrix, RowParallelLinear
from parallel.loader import SINGLE_FILE, Checkpoint, CheckpointError
from parallel.quantization import NotFinite, Quantization
from parallel.split import deal
from tests.ranks import run_ranks

CPU = torch.device("cpu")
INT8, INT4 = Quantization(8), Quantization(4, group=32)
KINDS = [INT8, INT4, Quantization(4, group=6)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 20),
    st.integers(1, 100),
    st.sampled_from([1e-6, 1.0, 1e4]),
    st.sampled_from([0.0, 3.0]),
    st.integers(0, 9),
)
def test_numbers_are_kept_as_closely_as_rounding_to_the_nearest_does(
    kind: Quantization, outputs: int, inputs: int, size: float, shift: float, seed: int
) -> None:
    weight = (randn(outputs, inputs, seed=seed) + shift) * size
    codes, scales = kind.quantize(weight)
    assert codes.shape == weight.shape
    error = (kind.dequantize(codes, scales) - weight).abs()
    if kind.bits == 8:
        assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    else:
        for part, off in zip(weight.split(kind.group, 1), error.split(kind.group, 1), strict=True):
            low, high = part.aminmax(dim=1, keepdim=True)
            # On average half a step, and what bf16 rounds off the scale (which moves the range's ends) and the offset.
            rounding = (high - low) / 256 + torch.maximum(low.abs(), high.abs()) / 256
            most = ((high - low) / 15 * 0.51 + rounding).squeeze(1)
            assert (off.square().mean(1).sqrt() <= most).all()


@pytest.mark.parametrize("kind", KINDS)
def test_constant_rows_and_groups_are_exact(kind: Quantization) -> None:
    weight = torch.tensor([0.0, 1.0, -0.5, 256.0])[:, None].repeat(1, 70)
    assert torch.equal(kind.dequantize(*kind.quantize(weight)), weight)


def test_a_checkpoint_that_was_int4_with_offsets_before_is_kept() -> None:
    """16 equal steps from a group's smallest to its largest number, as Q4_1 has them."""
    steps = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(i)) % 16 for i in range(40)])
    weight = steps.view(10, 128) * 0.125 - 1
    assert torch.equal(INT4.dequantize(*INT4.quantize(weight)), weight)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 90), st.integers(1, 5), st.data())
def test_a_part_of_the_inputs_is_the_same_part_of_the_whole(
    kind: Quantization, inputs: int, outputs: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, inputs - 1))
    part = range(start, data.draw(st.integers(start + 1, inputs)))
    weight = randn(outputs, inputs, seed=inputs)
    deciding = kind.deciding(part, inputs)
    assert deciding.start <= part.start < part.stop <= deciding.stop <= inputs
    codes, _ = kind.quantize(weight[:, deciding.start : deciding.stop])
    whole, _ = kind.quantize(weight)
    assert torch.equal(codes[:, part.start - deciding.start :][:, : len(part)], whole[:, part.start : part.stop])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_without_a_scale_are_refused(kind: Quantization, number: float, tmp_path: Path) -> None:
    weight = randn(3, 40)
    weight[1, 33] = number
    with pytest.raises(NotFinite):
        kind.quantize(weight)
    save_file({"bad.weight": weight}, tmp_path / SINGLE_FILE)
    layer = ColumnParallelLinear(40, [("bad", 3, range(3))], False, torch.float32, CPU)
    layer.matrix.quantize(kind)
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"'bad\.weight'.*cannot be quantised"),
    ):
        layer.load(checkpoint)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_the_parts_of_one_matrix(kind: Quantization, size: int, tmp_path: Path) -> None:
    """Row-parallel cuts fall inside of groups, and every rank's numbers are those of a single rank."""
    weights = {"up.weight": randn(45, 70), "gate.weight": randn(45, 70, seed=1), "down.weight": randn(70, 45, seed=2)}
    save_file(weights, tmp_path / SINGLE_FILE)

    def run(group) -> tuple[torch.Tensor, torch.Tensor]:
        cut = deal(45, group.size)[group.rank]
        both = ColumnParallelLinear(70, [("up", 45, cut), ("gate", 45, cut)], False, torch.float32, CPU)
        down = RowParallelLinear("down", 45, cut, 70, False, group, torch.float32, CPU)
        for layer in (both, down):
            layer.matrix.quantize(kind)
            with Checkpoint(tmp_path) as checkpoint:
                layer.load(checkpoint)
        return both.matrix.plain(), down.matrix.plain()

    parts = run_ranks(size, run)
    for place, names in enumerate((("up", "gate"), ("down",))):
        whole = torch.cat([kind.dequantize(*kind.quantize(weights[f"{name}.weight"])) for name in names])
        if place == 0:
            halves = [part[0].chunk(2) for part in parts]
            got = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        else:
            got = torch.cat([part[1] for part in parts], 1)
        assert torch.equal(got, whole)


def test_a_matrix_that_plain_torch_adopts_is_plain_again(tmp_path: Path) -> None:
    matrix = Matrix(5, 40, torch.bfloat16, CPU)
    matrix.quantize(INT4)
    save_file({"w": randn(5, 40)}, tmp_path / SINGLE_FILE)
    with Checkpoint(tmp_path) as checkpoint:
        matrix.read(checkpoint, "w", (5, 40), range(5), range(40))
    assert matrix.weight.dtype == torch.int8
    numbers = matrix.plain()
    matrix.adopt(matrix.products)
    assert matrix.weight.dtype == torch.bfloat16
    x = randn(3, 40).bfloat16()
    assert torch.equal(matrix(x), x @ numbers.T)
