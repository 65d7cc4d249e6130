"""Quantised linears of checkpoints: numbers worked out by hand, parts of ranks, and what is malformed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel.formats import StoredFormat, read_format
from parallel.layers import ColumnParallelLinear, Matrix, RowParallelLinear
from parallel.loader import SINGLE_FILE, Checkpoint, CheckpointError
from parallel.split import deal
from tests.packing import KINDS, Tensors, awq, compressed, gptq
from tests.ranks import run_ranks

CPU = torch.device("cpu")
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 8}


def word(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def grid(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([[word(value) for value in row] for row in rows], dtype=torch.int32)


def read(folder: Path, tensors: Tensors, stored: StoredFormat, shape: tuple[int, int]) -> torch.Tensor:
    """The numbers of the linear `a`."""
    save_file({f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    matrix = Matrix(*shape, torch.float32, CPU)
    matrix.stored = stored
    with Checkpoint(folder) as checkpoint:
        matrix.read(checkpoint, "a.weight", shape, range(shape[0]), range(shape[1]))
        checkpoint.finish()
    return matrix.plain()


# Of 8 outputs and 16 inputs in two groups, where output o has the zero points o + 1 and, in turn, 9 or 10.
SCALES = torch.tensor([[0.5] * 8, [0.25] * 8], dtype=torch.float16)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_puts_eight_inputs_in_a_word_from_the_lowest_bits_on(version: str, tmp_path: Path) -> None:
    tensors = {
        "qweight": grid([0x76543210, *[0x11111111] * 7], [0xFFFFFFFF] * 8),
        # Zero points 1 to 8, and 9 and 10 in turn. Version 1 stores one less.
        "qzeros": grid([0x87654321], [0xA9A9A9A9]) if version == "gptq_v2" else grid([0x76543210], [0x98989898]),
        "scales": SCALES,
        "g_idx": torch.tensor([0] * 8 + [1] * 8, dtype=torch.int32),
    }
    found = read(tmp_path, tensors, read_format(gptq(group=8, checkpoint_format=version)), (8, 16))
    assert found[0].tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0] + [1.5] * 8
    assert found[1].tolist() == [-0.5] * 8 + [1.25] * 8
    assert found[7].tolist() == [-3.5] * 8 + [1.25] * 8


def test_gptq_of_version_one_borrows_for_a_zero_point_of_zero(tmp_path: Path) -> None:
    """Zero points 0, 5, 5, ... are the word 0x55555550, less 0x11111111."""
    tensors = {"qweight": grid([0x33333333] * 8), "qzeros": grid([0x4444443F]), "scales": SCALES[:1] * 2}
    found = read(tmp_path, tensors, read_format(gptq(group=-1)), (8, 8))
    assert found[:3, 0].tolist() == [3.0, -2.0, -2.0]


def test_gptq_in_eight_bits(tmp_path: Path) -> None:
    tensors = {
        "qweight": grid([0xFF800100, 0, 0, 0], [0x7F7F7F7F, 0, 0, 0]),
        "qzeros": grid([0x0000007F]),  # 128 for the first output
        "scales": torch.full((1, 4), 0.5, dtype=torch.float16),
    }
    found = read(tmp_path, tensors, read_format(gptq(bits=8, group=8)), (4, 8))
    assert found[0].tolist() == [-64.0, -63.5, 0.0, 63.5] + [-0.5] * 4
    assert found[1, 0] == -0.5


def test_awq_puts_eight_outputs_in_a_word_in_an_order_of_its_own(tmp_path: Path) -> None:
    # From the lowest bits on: outputs 0, 2, 4, 6, 1, 3, 5, 7. The first input's q are the outputs' own numbers.
    tensors = {
        "qweight": grid([0x75316420], *[[0x99999999]] * 7, *[[0xFFFFFFFF]] * 8),
        "qzeros": grid([0x86427531], [0x0000000F]),  # first group: 1 to 8 by output; second: 15 for output 0 alone
        "scales": SCALES,
    }
    found = read(tmp_path, tensors, read_format(awq(group=8)), (8, 16))
    assert found[:, 0].tolist() == [-0.5] * 8
    assert found[:, 1].tolist() == [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5]
    assert found[:, 8].tolist() == [0.0] + [3.75] * 7


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packs_inputs_and_zero_points_along_outputs(symmetric: bool, tmp_path: Path) -> None:
    tensors = {
        "weight_packed": grid([0x76543210, 0xFEDCBA98], [0x88888888, 0x00000000]),
        "weight_scale": torch.tensor([[0.5, 1.0], [2.0, 0.25]], dtype=torch.bfloat16),
        "weight_shape": torch.tensor([2, 16]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = grid([0x00000098, 0x0000001F])  # outputs 0, 1: 8, 9 and 15, 1
    stored = read_format(compressed("pack-quantized", {**INT4, "symmetric": symmetric}))
    found = read(tmp_path, tensors, stored, (2, 16))
    first = [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    if symmetric:
        assert found[0].tolist() == [*first, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert found[1].tolist() == [0.0] * 8 + [-2.0] * 8
    else:
        assert found[0].tolist() == [*first, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0]
        assert found[1].tolist() == [-2.0] * 8 + [-0.25] * 8


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_ranks_hold_the_parts_of_one_matrix(name: str, size: int, tmp_path: Path) -> None:
    """Cuts fall inside of words and groups, and the numbers are those that the packers meant, to the bit."""
    kind, numbers, tensors = KINDS[name], {}, {}
    for seed, (linear, shape) in enumerate((("up", (160, 96)), ("gate", (160, 96)), ("down", (96, 160)))):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        parts, numbers[linear] = kind.pack(weight)
        tensors |= {f"{linear}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    half = range(0, 40)  # of the outputs of `up`, as if another rank had the rest

    def run(group) -> tuple[torch.Tensor, torch.Tensor]:
        cut = deal(160, group.size)[group.rank]
        both = ColumnParallelLinear(96, [("up", 160, half), ("gate", 160, cut)], False, torch.float32, CPU)
        down = RowParallelLinear("down", 160, cut, 96, False, group, torch.float32, CPU)
        with Checkpoint(tmp_path) as checkpoint:
            for layer in (both, down):
                layer.matrix.stored = read_format(kind.config)
                layer.load(checkpoint)
            checkpoint.finish()
        return both.matrix.plain(), down.matrix.plain()

    parts = run_ranks(size, run)
    for both, _ in parts:
        torch.testing.assert_close(both[:40], numbers["up"][:40], rtol=1e-6, atol=1e-6)
    gate, down = torch.cat([both[40:] for both, _ in parts]), torch.cat([down for _, down in parts], 1)
    torch.testing.assert_close(gate, numbers["gate"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(down, numbers["down"], rtol=1e-6, atol=1e-6)


def change(**changes: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Tensors], Tensors]:
    """Tensors with some of them changed, or taken away."""

    def apply(tensors: Tensors) -> Tensors:
        changed = {name: changes[name](tensor) for name, tensor in tensors.items() if changes.get(name)}
        return {name: changed.get(name, tensor) for name, tensor in tensors.items() if changes.get(name, 1)}

    return apply


MALFORMED = [
    (
        "gptq",
        change(qweight=lambda t: t[:-1]),
        r"'a\.qweight' in .*safetensors has shape \(5, 16\), .*\(6, 16\)",
    ),
    ("gptq", change(qzeros=None), r"has no tensor 'a\.qzeros'"),
    ("gptq", change(qzeros=lambda t: t[:, :1]), r"'a\.qzeros' .* has shape \(3, 1\), the model needs \(3, 2\)"),
    ("gptq", change(scales=lambda t: t[:-1]), r"'a\.scales' .* has shape \(2, 16\), the model needs \(3, 16\)"),
    ("gptq", change(scales=lambda t: t.fill_(float("nan"))), r"a in .* has scales that are no finite numbers"),
    ("gptq", change(scales=lambda t: t.int()), r"a in .* has scales of torch\.int32"),
    ("gptq", change(qweight=lambda t: t.long()), r"a in .* has a qweight of torch\.int64, not torch\.int32"),
    ("gptq", change(g_idx=lambda t: t.flip(0)), r"a in .* has a g_idx that puts inputs of one group apart"),
    ("awq", change(qweight=lambda t: t.T), r"'a\.qweight' .* has shape \(2, 48\), the model needs \(48, 2\)"),
    ("awq", change(qzeros=None), r"has no tensor 'a\.qzeros'"),
    (
        "packed",
        change(weight_shape=lambda t: t.flip(0)),
        r"the weight_shape \(48, 16\), the model needs \(16, 48\)",
    ),
    ("packed", change(weight_scale=None), r"has no tensor 'a\.weight_scale'"),
    ("packed asymmetric", change(weight_zero_point=None), r"has no tensor 'a\.weight_zero_point'"),
    ("w8a8", change(weight=lambda t: t.int()), r"'a\.weight' in .* has scales, but is torch\.int32, not torch\.int8"),
    ("fp8", change(weight=lambda t: t.to(torch.float8_e5m2)), r"torch\.float8_e5m2, not torch\.float8_e4m3fn"),
    ("fp8", change(weight_scale=lambda t: t[:3]), r"'a\.weight_scale' .* has shape \(3, 1\), .* \(16, 1\)"),
]


@pytest.mark.parametrize(
    ("name", "spoil", "message"), MALFORMED, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(MALFORMED)]
)
def test_malformed_tensors_are_named(
    name: str, spoil: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    tensors, _ = KINDS[name].pack(torch.randn(16, 48, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, spoil(tensors), read_format(KINDS[name].config), (16, 48))


def test_a_group_size_that_does_not_divide_and_words_that_are_not_full_are_named(tmp_path: Path) -> None:
    tensors, _ = KINDS["gptq"].pack(torch.randn(16, 48, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CheckpointError, match=r"a in .* has 48 inputs, which group_size 32 does not divide"):
        read(tmp_path, tensors, read_format(gptq(group=32)), (16, 48))
    with pytest.raises(CheckpointError, match=r"a in .* has the shape \(12, 48\): 12 numbers fill no words of 8"):
        read(tmp_path, {**tensors, "qweight": tensors["qweight"][:, :12]}, read_format(gptq(group=16)), (12, 48))


@pytest.mark.parametrize("name", ["w8a8", "packed"])
@pytest.mark.parametrize("value", [0, 3])
def test_zero_points_of_symmetric_weights_must_be_zero(name: str, value: int, tmp_path: Path) -> None:
    """Early versions of compressed-tensors stored them."""
    tensors, numbers = KINDS[name].pack(torch.randn(16, 48, generator=torch.Generator().manual_seed(0)))
    tensors["weight_zero_point"] = torch.full((16, 1), value, dtype=torch.int8)
    if value:
        with pytest.raises(CheckpointError, match=r"a in .* has a weight_zero_point other than zero"):
            read(tmp_path, tensors, read_format(KINDS[name].config), (16, 48))
    else:
        found = read(tmp_path, tensors, read_format(KINDS[name].config), (16, 48))
        torch.testing.assert_close(found, numbers)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_model_has_not_must_be_zero(value: float, tmp_path: Path) -> None:
    """AutoGPTQ gives every linear one."""
    tensors, _ = KINDS["gptq"].pack(torch.randn(16, 48, generator=torch.Generator().manual_seed(0)))
    tensors["bias"] = torch.full((16,), value)
    save_file({f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / SINGLE_FILE)
    layer = ColumnParallelLinear(48, [("a", 16, range(16))], False, torch.float32, CPU)
    layer.matrix.stored = read_format(KINDS["gptq"].config)
    with Checkpoint(tmp_path) as checkpoint:
        if value:
            with pytest.raises(CheckpointError, match=r"'a\.bias' in .* is not zero"):
                layer.load(checkpoint)
        else:
            layer.load(checkpoint)
            checkpoint.finish()
