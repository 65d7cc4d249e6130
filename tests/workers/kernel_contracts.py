"""What torch's CUDA kernels for integers take and give, in plain torch on CPU, to stand in for them in tests.

Written from aten/src/ATen/native/cuda/int4mm.cu and Blas.cpp of torch 2.13:

    _convert_weight_to_int4pack   [n, k / 2] uint8, the even input in the upper half -> [n / 8, k / (tiles * 16), 32,
                                  tiles / 2] int32: lane t of a tile holds output t / 4 and inputs 2 (t % 4) + 0, 1, 8
                                  and 9 of two tiles of 16, 8 half bytes in the order of `_HALVES`
    _weight_int4pack_mm           x [m, k] bf16, that, groups of 32, 64, 128 or 256, [k / group, n, 2] bf16 -> [m, n]
                                  bf16: numbers are (q - 8) * scale + offset, rounded to bf16 as both go in
    _int_mm                       [m, k] and [k, n] int8 -> [m, n] int32; more than 16 rows, k and n multiples of 8

They check what the kernels check, and what the kernels leave unchecked but need.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from parallel.layers import Matrix
from parallel.quantization import Float8, Quantization

# Of the eight inputs that a lane holds, in the order of their places in the tiles, where each lies in its word.
_HALVES = (0, 4, 1, 5, 2, 6, 3, 7)
calls: list[str] = []  # the kernels that were called


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The stand-ins are what torch's operators do on CPU."""
    calls.clear()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a kernel that is there already
        library.impl("_convert_weight_to_int4pack", convert_weight_to_int4pack, "CPU")
        library.impl("_weight_int4pack_mm", weight_int4pack_mm, "CPU")
        library.impl("_int_mm", int_mm, "CPU")
    try:
        yield
    finally:
        library._destroy()


def random_matrix(
    quantization: Quantization | Float8,
    outputs: int,
    total: int,
    inputs: range,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Matrix:
    """A matrix of random codes, of a part of the inputs, as reading leaves it."""
    generator = torch.Generator().manual_seed(seed)
    matrix = Matrix(outputs, len(inputs), dtype, device)
    matrix.quantize(quantization)
    half = 1 << (quantization.bits - 1)
    codes = torch.randint(-half, half, (outputs, len(inputs)), generator=generator, dtype=torch.int8)
    matrix.weight = torch.nn.Parameter(codes.to(device, quantization.dtype), requires_grad=False)
    shape: tuple[int, ...] = (outputs,)
    if quantization.group:
        shape = (outputs, -(-len(quantization.deciding(inputs, total)) // quantization.group), 2)
        matrix.begun = inputs.start % quantization.group
    scales = (torch.rand(shape, generator=generator) + 0.5).to(device)
    matrix.scales = torch.nn.Parameter(scales, requires_grad=False)
    return matrix


def convert_weight_to_int4pack(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    calls.append("convert")
    _check(weight.dim() == 2 and weight.dtype == torch.uint8 and weight.is_contiguous(), "uint8 [n, k / 2] in a row")
    n, k = weight.shape[0], 2 * weight.shape[1]
    _check(tiles in (2, 4, 8) and n % 8 == 0 and k >= 16 * tiles and k % (16 * tiles) == 0, f"{n} x {k}, {tiles} tiles")
    q = torch.stack((weight >> 4, weight & 15), -1).flatten(1).long()
    lanes = _lanes(q, tiles)
    words = sum(lanes[..., place] << (4 * half) for place, half in enumerate(_HALVES))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def weight_int4pack_mm(x: torch.Tensor, weight: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    calls.append("int4")
    m, k = x.shape
    tiles = 2 * weight.shape[3]
    n = 8 * weight.shape[0]
    _check(m > 0 and x.dtype == torch.bfloat16 and x.is_contiguous(), f"x is {x.dtype}, [{m}, {k}]")
    _check(weight.dtype == torch.int32 and weight.is_contiguous() and weight.dim() == 4, "packed int32")
    _check(
        tiles in (2, 4, 8) and weight.shape[1] == k // (16 * tiles) and weight.shape[2] == 32, f"{weight.shape}, {k}"
    )
    _check(group in (32, 64, 128, 256) and k % group == 0, f"groups of {group} for {k} inputs")
    _check(scales.shape == (k // group, n, 2) and scales.dtype == torch.bfloat16, f"scales are {scales.shape}")
    _check(scales.is_contiguous(), "scales in a row")
    lanes = torch.stack([(weight.long() >> (4 * half)) & 15 for half in _HALVES], -1)
    scale, offset = scales.float().repeat_interleave(group, 0).unbind(-1)
    numbers = ((_numbers(lanes, n, k) - 8).T * scale + offset).bfloat16()
    return (x.float() @ numbers.float()).bfloat16()


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    calls.append("int8")
    _check(a.dtype == b.dtype == torch.int8 and a.dim() == b.dim() == 2, f"{a.dtype} and {b.dtype}")
    _check(a.shape[0] > 16, f"self.size(0) needs to be greater than 16, but got {a.shape[0]}")
    _check(
        a.shape[1] > 0 and a.shape[1] % 8 == 0 and b.shape[1] > 0 and b.shape[1] % 8 == 0, f"{a.shape} and {b.shape}"
    )
    _check(a.is_contiguous() and b.t().is_contiguous(), "rows of the first, columns of the second in a row")
    return a.int() @ b.int()


def _lanes(q: torch.Tensor, tiles: int) -> torch.Tensor:
    """[n, k] -> [n / 8, k / (tiles * 16), 32, tiles / 2, 8]: tile of 8 outputs, run of inputs, lane, pair of tiles."""
    n, k = q.shape
    # Within a pair of tiles an input is: tile of the pair, which half of 8, which pair in it, which of the two.
    parts = q.view(n // 8, 8, k // (16 * tiles), tiles // 2, 2, 2, 4, 2)
    return parts.permute(0, 2, 1, 6, 3, 4, 5, 7).reshape(n // 8, k // (16 * tiles), 32, tiles // 2, 8)


def _numbers(lanes: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The way back: [n, k]."""
    super_tiles, pairs = lanes.shape[1], lanes.shape[3]
    parts = lanes.view(n // 8, super_tiles, 8, 4, pairs, 2, 2, 2)
    return parts.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(n, k)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the kernel does not take this: {what}")
