"""Linears in int8 and int4 by torch's CUDA kernels, for checkpoints that are stored so.

What the kernels demand of shapes is met with zeros, which add nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.layers import Matrix
from parallel.quantization import to_int8
from workers.fp8 import ScaledProducts, padded

LEAST_CAPABILITY = (8, 0)  # of a GPU that both kernels run on
INT4_GROUPS = (128, 64, 32)  # that the int4 kernel takes; larger ones are several of these

_LEAST_ROWS = 17  # of _int_mm
_INNER_TILES = (8, 4, 2)  # tiles of 16 inputs that lie together in memory; more load better


class Int8Products(ScaledProducts):
    """int8 with int8 (`torch._int_mm`): weights with scales for outputs, activations scaled anew for each token."""

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        codes, scales = to_int8(x.flatten(0, -2))
        rows = len(codes)
        codes = F.pad(padded(codes, 1), (0, 0, 0, max(0, _LEAST_ROWS - rows)))
        sums = torch._int_mm(codes, matrix.weight.t())[:rows, : matrix.outputs]
        y = sums.float() * scales[:, None] * matrix.scales[: matrix.outputs]
        y = (y if bias is None else y + bias).unflatten(0, x.shape[:-1])
        return y if wide else y.to(x.dtype)


class Int4Products:
    """int4 weights in groups with bf16 activations (`aten::_weight_int4pack_mm`); results are bf16.

    Scales and offsets are rounded to bf16 for it. A number is (q - 8) * scale + offset, with q from 0 to 15.
    """

    @staticmethod
    def takes(group: int) -> bool:
        """Whether groups of so many inputs can be had from the kernel's."""
        return any(group % size == 0 for size in INT4_GROUPS)

    def pack(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        whole, begun = matrix.quantization.group, matrix.begun
        size = next(size for size in INT4_GROUPS if whole % size == 0)
        # A slice may begin and end inside of a group: it is filled up to whole groups of the kernel.
        matrix.begun = begun % size
        depth = -(-(matrix.begun + matrix.inputs) // size) * size
        groups = torch.arange(begun - matrix.begun, begun - matrix.begun + depth, size) // whole
        codes = (matrix.weight + 8).to(torch.uint8)
        codes = padded(F.pad(codes, (matrix.begun, depth - matrix.begun - matrix.inputs)), 0)
        scales = padded(matrix.scales[:, groups.to(matrix.scales.device)].bfloat16(), 0)
        tiles = next(tiles for tiles in _INNER_TILES if depth % (16 * tiles) == 0)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs, tiles), scales.transpose(0, 1).contiguous()

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        _, super_tiles, _, half_tiles = matrix.weight.shape
        depth = super_tiles * half_tiles * 32
        rows = x.flatten(0, -2).to(torch.bfloat16)
        rows = F.pad(rows, (matrix.begun, depth - matrix.begun - matrix.inputs)).contiguous()
        size = depth // len(matrix.scales)
        y = torch.ops.aten._weight_int4pack_mm(rows, matrix.weight, size, matrix.scales)[:, : matrix.outputs]
        y = (y if bias is None else y + bias).unflatten(0, x.shape[:-1])
        return y.float() if wide else y.to(x.dtype)

    def lookup(self, matrix: Matrix, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        raise TypeError("embeddings are never kept in int4 on a GPU")
