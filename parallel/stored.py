"""Reading the quantised linears of a checkpoint, slice by slice: codes, and what turns them into numbers.

Every layout is brought to that of parallel/quantization.py: [outputs, inputs] codes around zero, and for each group of
inputs a scale and an offset. With q as it is stored and z its zero point, (q - z) * scale = code * scale + offset.
Scales of fp16 or bf16 and their offsets are exact in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel.formats import StoredFormat
from parallel.loader import Checkpoint, CheckpointError
from parallel.quantization import Float8, Quantization

# Where AutoAWQ puts each of eight neighbours within a word, in units of four bits.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)

_WHOLE_ROW = 128  # the group of a whole row is that row, rounded up to what any kernel takes


def holds(checkpoint: Checkpoint, stored: StoredFormat, name: str) -> bool:
    """Whether the checkpoint has quantised the linear whose weight would be called `name`."""
    return f"{_linear(name)}.{stored.tensor}" in checkpoint


def quantization_of(stored: StoredFormat, inputs: int) -> Quantization | Float8:
    """What codes of a row of so many inputs stand for."""
    if stored.is_float:
        return Float8()
    if stored.bits == 8 and stored.symmetric and not stored.group:
        return Quantization(8, activations=stored.activations)
    return Quantization(stored.bits, stored.group or -(-inputs // _WHOLE_ROW) * _WHOLE_ROW)


def read_stored(
    checkpoint: Checkpoint, stored: StoredFormat, name: str, shape: tuple[int, int], outputs: range, inputs: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [outputs, inputs] of a part of the weight of that shape, and their scales as its quantization has them.

    Scales are fp32: [outputs], or [outputs, groups, 2] for the groups that `inputs` touches. Raises CheckpointError.
    """
    part = _Part(checkpoint, stored, _linear(name), shape, outputs, inputs)
    if stored.layout == "plain":
        return _read_plain(part)
    if stored.group and shape[1] % stored.group:
        raise part.error(f"has {shape[1]} inputs, which group_size {stored.group} does not divide")
    codes, zeros, scales = _LAYOUTS[stored.layout](part)
    scales = scales.float()
    if not scales.isfinite().all():
        raise part.error("has scales that are no finite numbers")
    half = 1 << (stored.bits - 1)
    codes = (codes - half).view(torch.int8)  # of uint8, whose wrapping around makes the sign
    if not quantization_of(stored, shape[1]).group:
        return codes, scales[:, 0]
    offsets = torch.zeros_like(scales) if zeros is None else (half - zeros.float()) * scales
    return codes, torch.stack((scales, offsets), -1)


@dataclass(frozen=True, slots=True)
class _Part:
    """What is to be read of a linear's weight, whose whole shape is [outputs, inputs]."""

    checkpoint: Checkpoint
    stored: StoredFormat
    linear: str
    shape: tuple[int, int]
    outputs: range
    inputs: range

    @property
    def in_word(self) -> int:
        """Numbers in a word."""
        return 32 // self.stored.bits

    @property
    def group(self) -> int:
        return self.stored.group or self.shape[1]

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group)

    @property
    def groups(self) -> range:
        return _covering(self.inputs, self.group)

    def words(self, tensor: str, shape: tuple[int, int], cut: dict[int, range]) -> torch.Tensor:
        """int32 [...] as numbers, uint8 [..., in_word], lowest bits first."""
        words = self.checkpoint.read(f"{self.linear}.{tensor}", shape, cut)
        if words.dtype != torch.int32:
            raise self.error(f"has a {tensor} of {words.dtype}, not torch.int32")
        if tensor == "qzeros":  # GPTQModel takes the shift from whole words, borrowing from neighbours
            words = words + self.stored.zero_shift * sum(1 << place for place in range(0, 32, self.stored.bits))
        octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
        return octets if self.stored.bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)

    def scales(self, tensor: str, shape: tuple[int, int], cut: dict[int, range]) -> torch.Tensor:
        scales = self.checkpoint.read(f"{self.linear}.{tensor}", shape, cut)
        if not scales.is_floating_point():
            raise self.error(f"has {tensor} of {scales.dtype}, which is no floating-point number")
        return scales

    def count_words(self, size: int) -> int:
        if size % self.in_word:
            raise self.error(f"has the shape {self.shape}: {size} numbers fill no words of {self.in_word}")
        return size // self.in_word

    def check_order(self, tensor: str) -> None:
        """The group of each input, where that is stored, must be the one that it lies in. Zeros alone say nothing."""
        if f"{self.linear}.{tensor}" not in self.checkpoint:
            return
        order = self.checkpoint.read(f"{self.linear}.{tensor}", (self.shape[1],)).long()
        if order.any() and not torch.equal(order, torch.arange(self.shape[1]) // self.group):
            raise self.error(
                f"has a {tensor} that puts inputs of one group apart, which is not supported; use a checkpoint that "
                "was quantised with desc_act (actorder) off"
            )

    def check_zero(self, tensor: str) -> None:
        """A tensor that should not be there, and was stored by early versions, says nothing new."""
        name = f"{self.linear}.{tensor}"
        if name in self.checkpoint and self.checkpoint.read(name, self.checkpoint.shape(name)).float().any():
            raise self.error(f"has a {tensor} other than zero, but config.json calls its weights symmetric")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.linear} in {self.checkpoint.folder} {what}")


# Codes and zero points, [outputs, inputs] and [outputs, groups] uint8, and scales like those.
_Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def _read_gptq(part: _Part) -> _Stored:
    """qweight [inputs / n, outputs] with n inputs in a word, qzeros [groups, outputs / n], scales [groups, outputs]."""
    n, (num_outputs, num_inputs) = part.in_word, part.shape
    cut = {0: _covering(part.inputs, n), 1: part.outputs}
    codes = part.words("qweight", (part.count_words(num_inputs), num_outputs), cut).transpose(0, 1).flatten(1)
    cut = {0: part.groups, 1: _covering(part.outputs, n)}
    zeros = part.words("qzeros", (part.num_groups, part.count_words(num_outputs)), cut).flatten(1)
    scales = part.scales("scales", (part.num_groups, num_outputs), {0: part.groups, 1: part.outputs})
    part.check_order("g_idx")
    return _cut(codes, part.inputs, n), _cut(zeros, part.outputs, n).T, scales.T


def _read_awq(part: _Part) -> _Stored:
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""
    columns, words = part.count_words(part.shape[0]), _covering(part.outputs, 8)

    def read(tensor: str, rows: int, taken: range) -> torch.Tensor:
        numbers = part.words(tensor, (rows, columns), {0: taken, 1: words})[..., AWQ_NIBBLES]
        return _cut(numbers.flatten(1), part.outputs, 8).T

    codes, zeros = read("qweight", part.shape[1], part.inputs), read("qzeros", part.num_groups, part.groups)
    scales = part.scales("scales", (part.num_groups, part.shape[0]), {0: part.groups, 1: part.outputs})
    return codes, zeros, scales.T


def _read_packed(part: _Part) -> _Stored:
    """weight_packed [outputs, inputs / n], weight_scale [outputs, groups], weight_zero_point [outputs / n, groups].

    Words that numbers do not fill are padded.
    """
    n, (num_outputs, num_inputs) = part.in_word, part.shape
    shape = tuple(part.checkpoint.read(f"{part.linear}.weight_shape", (2,)).tolist())
    if shape != part.shape:
        raise part.error(f"has the weight_shape {shape}, the model needs {part.shape}")
    part.check_order("weight_g_idx")
    cut = {0: part.outputs, 1: _covering(part.inputs, n)}
    codes = part.words("weight_packed", (num_outputs, -(-num_inputs // n)), cut).flatten(1)
    codes = _cut(codes, part.inputs, n)
    scales = part.scales("weight_scale", (num_outputs, part.num_groups), {0: part.outputs, 1: part.groups})
    if part.stored.symmetric:
        part.check_zero("weight_zero_point")
        return codes, None, scales
    cut = {0: _covering(part.outputs, n), 1: part.groups}
    zeros = part.words("weight_zero_point", (-(-num_outputs // n), part.num_groups), cut)
    return codes, _cut(zeros.permute(1, 0, 2).flatten(1), part.outputs, n).T, scales


_LAYOUTS: dict[str, Callable[[_Part], _Stored]] = {"gptq": _read_gptq, "awq": _read_awq, "packed": _read_packed}


def _read_plain(part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """weight in int8 or fp8, weight_scale [outputs, 1], or one number for all of them."""
    name, checkpoint = f"{part.linear}.weight", part.checkpoint
    codes = checkpoint.read(name, part.shape, {0: part.outputs, 1: part.inputs})
    wanted = torch.float8_e4m3fn if part.stored.is_float else torch.int8
    if codes.dtype != wanted:
        raise CheckpointError(f"tensor {name!r} in {checkpoint.folder} has scales, but is {codes.dtype}, not {wanted}")
    if math.prod(checkpoint.shape(f"{name}_scale")) == 1:
        scales = torch.full((len(part.outputs),), checkpoint.read_scalar(f"{name}_scale"))
    else:
        scales = part.scales("weight_scale", (part.shape[0], 1), {0: part.outputs})[:, 0].float()
    part.check_zero("weight_zero_point")
    for tensor in ("input_scale", "input_zero_point"):  # activations get scales of their own, which come closer
        checkpoint.skip(f"{part.linear}.{tensor}")
    return codes, scales


def _linear(name: str) -> str:
    return name.removesuffix(".weight")


def _covering(numbers: range, size: int) -> range:
    """The words, or groups, of `size` numbers that hold these."""
    return range(numbers.start // size, -(-numbers.stop // size))


def _cut(unpacked: torch.Tensor, numbers: range, in_word: int) -> torch.Tensor:
    """Of the numbers of whole words, along the last dimension, those that were asked for."""
    first = numbers.start % in_word
    return unpacked[..., first : first + len(numbers)]
