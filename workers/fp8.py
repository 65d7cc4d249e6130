"""Linears in fp8 by torch: weights with a scale for each output, activations scaled anew for each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.layers import Matrix
from parallel.quantization import to_float8

LEAST_CAPABILITY = (8, 9)  # of a GPU whose matrix units take fp8
_MULTIPLE = 16  # of which sizes of fp8 products must be


class NoFp8(ValueError):
    """A GPU that cannot multiply fp8."""


def check_fp8(device: torch.device) -> None:
    """Raises NoFp8."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise NoFp8(
            f"quantization fp8 needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}, "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}; leave it out"
        )


class ScaledProducts:
    """Products of codes, of one kind for weights and activations, with a scale for each output and each token."""

    def pack(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = padded(padded(matrix.weight, 1), 0)
        return weight, F.pad(matrix.scales, (0, len(weight) - matrix.outputs))

    def lookup(self, matrix: Matrix, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        """As `Products.lookup`."""
        local = ids - first_id
        elsewhere = (local < 0) | (local >= matrix.outputs)
        local = local.masked_fill(elsewhere, 0)
        rows = matrix.weight[local, : matrix.inputs].float() * matrix.scales[local, None]
        return rows.masked_fill(elsewhere[:, None], 0).to(matrix.dtype)


class Fp8Products(ScaledProducts):
    """Row-wise scaled products (`torch._scaled_mm`). Results are bf16, the only kind that it gives on every GPU."""

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        codes, scales = to_float8(x.flatten(0, -2))
        y = torch._scaled_mm(
            padded(codes, 1),
            matrix.weight.t(),
            scale_a=scales[:, None],
            scale_b=matrix.scales[None],
            out_dtype=torch.bfloat16,
        )[:, : matrix.outputs]
        y = (y if bias is None else y + bias).unflatten(0, x.shape[:-1])
        return y.float() if wide else y.to(x.dtype)


def padded(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """With zeros, so that the size along dim is a multiple of what products take."""
    missing = -codes.shape[dim] % _MULTIPLE
    if not missing:
        return codes
    shape = list(codes.shape)
    shape[dim] = missing
    return torch.cat((codes, torch.zeros(shape, dtype=codes.dtype, device=codes.device)), dim)
