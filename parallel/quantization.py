"""Weights as int8 or fp8 with a scale for each output, or as integers in groups of inputs with a scale and an offset.

What a number becomes depends on its whole group, or on its output's whole row, never on how ranks share the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LARGEST_FLOAT8 = 448.0
_BLOCK_ROWS = 2048  # quantised at once, so that the fp32 copy stays small


class NotFinite(ValueError):
    """Weights that are no finite numbers have no scale."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """bits: 8 or 4. group: inputs in a group, even, with a scale and an offset; 0 where the whole row shares a scale.

    activations: those multiplied with it are to be int8 too, with a scale for each token, where that is faster.
    """

    bits: int
    group: int = 0
    activations: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    def deciding(self, inputs: range, total: int) -> range:
        """The inputs of a whole row of `total` whose numbers decide what those in `inputs` become."""
        if not self.group:
            return range(total)
        begin, end = inputs.start // self.group, -(-inputs.stop // self.group)
        return range(begin * self.group, min(end * self.group, total))

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[outputs, inputs] of whole groups -> codes, int8 of the same shape, and scales.

        Made are 8 bits without groups, with scales [outputs] fp32, and 4 bits with groups, with scales
        [outputs, groups, 2] bf16: scale and offset. The last group of a row may be short. Raises NotFinite.
        """
        return _in_blocks(self._quantize, weight)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, begun: int = 0) -> torch.Tensor:
        """The numbers that codes [outputs, inputs] stand for, fp32. begun: inputs of the first group before these."""
        if not self.group:
            return codes.float() * scales[:, None]
        groups = (begun + torch.arange(codes.shape[1], device=codes.device)) // self.group
        scale, offset = scales.float()[:, groups].unbind(-1)
        return codes.float() * scale + offset

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.group:
            return to_int8(weight)
        outputs, inputs = weight.shape
        missing = -inputs % self.group
        groups = torch.cat((weight, weight[:, -1:].expand(-1, missing)), 1).view(outputs, -1, self.group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = (high - low) / 15
        first = _round_to(groups, step, low + 8 * step)
        # The line that fits best through the numbers that got those integers, where it brings others closer.
        codes = first[0]
        centre, mean = codes.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
        codes = codes - centre
        spread = codes.square().sum(-1, keepdim=True)
        step = (codes * (groups - mean)).sum(-1, keepdim=True) / _not_zero(spread)
        second = _round_to(groups, step, mean - step * centre)
        better = second[3] < first[3]
        codes, scale, offset = (torch.where(better, b, a) for a, b in zip(first[:3], second[:3], strict=True))
        return codes.to(torch.int8).view(outputs, -1)[:, :inputs], torch.cat((scale, offset), -1).bfloat16()


class Float8:
    """Weights in fp8 (e4m3: three bits of mantissa, up to 448) with an fp32 scale for each output."""

    bits, group, dtype = 8, 0, torch.float8_e4m3fn

    def deciding(self, inputs: range, total: int) -> range:
        """As for integers: the whole row."""
        return range(total)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[outputs, inputs] -> fp8 of the same shape, and scales [outputs] fp32. Raises NotFinite."""
        return _in_blocks(to_float8, weight)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, begun: int = 0) -> torch.Tensor:
        """The numbers that they stand for, fp32."""
        return codes.float() * scales[:, None]


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, m] -> int8 [n, m] and what each row was divided by, [n] fp32."""
    wide = rows.float()
    scale = _not_zero(wide.abs().amax(1, keepdim=True) / 127)
    return (wide / scale).round_().to(torch.int8), scale[:, 0]


def to_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, m] -> fp8 [n, m] and what each row was divided by, [n] fp32."""
    wide = rows.float()
    scale = _not_zero(wide.abs().amax(1, keepdim=True) / LARGEST_FLOAT8)
    return (wide / scale).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn), scale[:, 0]


def _in_blocks(
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = [quantize(block.float()) for block in weight.split(_BLOCK_ROWS)]
    codes, scales = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    if not scales.isfinite().all():
        raise NotFinite("holds numbers that are not finite, or too large for a scale")
    return codes, scales


def _round_to(
    groups: torch.Tensor, step: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of int4, scale and offset as they are kept in bf16, and each group's sum of squared errors."""
    scale, offset = _not_zero(step.bfloat16().float()), offset.bfloat16().float()
    codes = ((groups - offset) / scale).round_().clamp_(-8, 7)
    return codes, scale, offset, (codes * scale + offset - groups).square().sum(-1, keepdim=True)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return scale.masked_fill(scale == 0, 1)
