"""Linears over packed weights (linear.cpp), where they are measured to be faster than torch's."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from torch import nn

from attention.memory import LargePages
from attention.native import FORMATS, Recording, call, empty
from parallel.formats import StoredFormat
from parallel.layers import ColumnParallelLinear, Matrix, ParallelHead, Products, RowParallelLinear, TorchProducts
from parallel.quantization import Float8, Quantization
from workers import fp8, integers
from workers.kernels import Kernels

logger = logging.getLogger("quadriga.worker")

COLUMNS = 32  # outputs of a panel, as in attention/vector.h
QUANTIZATIONS = {"int8": Quantization(8), "int4": Quantization(4, group=32)}

_TRIED_ROWS = (1, 16, 128)  # single stream, a few streams, prefill
_TRIED_OUTPUTS = 4096  # of a larger weight so many are tried
_TRIAL_SECONDS = 0.004


class PackedProducts:
    """One copy of the weight, in panels, serves any number of rows and lookups. A row's result depends on no other."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._pages = LargePages()

    def pack(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        bits = matrix.quantization.bits if matrix.quantization else 8 * matrix.dtype.itemsize
        outputs, inputs = -(-matrix.outputs // COLUMNS) * COLUMNS, matrix.inputs + matrix.begun % 2
        packed = self._pages.allocate(outputs * (inputs + inputs % 2) * bits // 8)
        weight = _weight(matrix, packed, None)
        call(self.kernels.pack, FORMATS[matrix.dtype], torch.get_num_threads(), matrix.weight.data_ptr(), *weight)
        return packed, None if matrix.scales is None else _pack_scales(matrix.scales)

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        out = empty((*x.shape[:-1], matrix.outputs), torch.float32 if wide else x.dtype)
        self._multiply(matrix, x.contiguous(), bias, out, wide=wide)
        return out

    @staticmethod
    def can_gate(matrix: Matrix) -> bool:
        """Whether gates and what they let through lie in panels of their own."""
        return matrix.outputs % (2 * COLUMNS) == 0

    def multiply_gated(self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """SiLU of the product's first half times its second, [..., outputs / 2], rounded as if in two steps."""
        out = empty((*x.shape[:-1], matrix.outputs // 2), x.dtype)
        self._multiply(matrix, x.contiguous(), bias, out, gated=True)
        return out

    def _multiply(
        self,
        matrix: Matrix,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        wide: bool = False,
        gated: bool = False,
    ) -> None:
        call(
            self.kernels.multiply,
            *(FORMATS[x.dtype], torch.get_num_threads(), x.data_ptr(), math.prod(x.shape[:-1])),
            *(0 if bias is None else bias.data_ptr(), out.data_ptr(), int(wide), int(gated)),
            *_weight(matrix, matrix.weight, matrix.scales),
        )

    def lookup(self, matrix: Matrix, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        out = empty((len(ids), matrix.inputs), matrix.dtype)
        call(
            self.kernels.lookup,
            *(FORMATS[out.dtype], torch.get_num_threads(), first_id, ids.data_ptr(), len(ids), out.data_ptr()),
            *_weight(matrix, matrix.weight, matrix.scales),
        )
        return out


def _weight(matrix: Matrix, packed: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, ...]:
    """What the kernels know of a weight."""
    bits, group = (matrix.quantization.bits, matrix.quantization.group) if matrix.quantization else (0, 0)
    address, is_fp32 = (0, 0) if scales is None else (scales.data_ptr(), int(scales.dtype == torch.float32))
    return bits, packed.data_ptr(), matrix.outputs, matrix.inputs, address, group, matrix.begun, is_fp32


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[outputs, ...] -> [panels, ..., COLUMNS]."""
    missing = -len(scales) % COLUMNS
    padded = torch.cat((scales, scales.new_zeros(missing, *scales.shape[1:])))
    return padded.view(-1, COLUMNS, *scales.shape[1:]).movedim(1, -1).contiguous()


def quantize(model: nn.Module, head: Matrix, quantization: str) -> None:
    """What the linears and the head read from now on becomes integers; an embedding of its own stays as it is.

    The head has eight bits with int4 too, since it decides the result directly. With fp8 it stays as it is.
    """
    for part in model.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            part.matrix.quantize(Float8() if quantization == "fp8" else QUANTIZATIONS[quantization])
    if quantization != "fp8":
        head.quantize(QUANTIZATIONS["int8"])


def expect_stored(model: nn.Module, stored: StoredFormat) -> None:
    """The checkpoint may hold linears, and a head of its own, in that format."""
    for part in model.modules():
        is_linear = isinstance(part, ColumnParallelLinear | RowParallelLinear)
        if is_linear or (isinstance(part, ParallelHead) and not part.tied):
            part.matrix.stored = stored


class Packer:
    """Gives each matrix of a quantised model the products that suit it, as soon as it is read.

    What no products multiply as it is becomes the numbers that it stands for, of which a warning tells once.
    capability: of the GPU, or None on CPU.
    """

    def __init__(self, kernels: Kernels | None, capability: tuple[int, int] | None) -> None:
        self._capability = capability
        self._plain = PackedProducts(kernels) if kernels else TorchProducts()
        self._warned = False

    def __call__(self, matrix: Matrix) -> None:
        products = self._plain
        if matrix.quantization is not None:
            products = self._on_cpu(matrix.quantization) if self._capability is None else self._on_gpu(matrix)
            if products is None:
                self._warn(matrix.quantization)
                products = self._plain
                matrix.adopt(TorchProducts())
        matrix.adopt(products)

    def _on_cpu(self, quantization: Quantization | Float8) -> Products | None:
        has_kernel = isinstance(quantization, Quantization) and (quantization.bits == 4) == (quantization.group > 0)
        return self._plain if has_kernel and isinstance(self._plain, PackedProducts) else None

    def _on_gpu(self, matrix: Matrix) -> Products | None:
        quantization = matrix.quantization
        if isinstance(quantization, Float8):
            return fp8.Fp8Products() if self._capability >= fp8.LEAST_CAPABILITY else None
        if self._capability < integers.LEAST_CAPABILITY:
            return None
        if quantization.bits == 4:
            return integers.Int4Products() if integers.Int4Products.takes(quantization.group) else None
        return integers.Int8Products() if quantization.activations else None

    def _warn(self, quantization: Quantization | Float8) -> None:
        if self._warned:
            return
        self._warned = True
        kind = "fp8" if isinstance(quantization, Float8) else f"int{quantization.bits}"
        logger.warning(
            "there is no kernel here for %s%s: such weights are kept as the numbers they stand for, "
            "neither smaller nor faster than others",
            kind,
            f" in groups of {quantization.group}" if quantization.group else "",
        )


def settle_products(model: nn.Module, kernels: Kernels) -> None:
    """Packs the model's matrices, one after another, if all in all that is faster on this machine.

    All or none: a single linear of torch would keep steps from being replayed, which brings more than it could.
    """
    began, packed = time.perf_counter(), PackedProducts(kernels)
    matrices = [part for part in model.modules() if isinstance(part, Matrix)]
    shapes = {(matrix.outputs, matrix.inputs): matrix for matrix in matrices if matrix.outputs and matrix.inputs}
    seconds = {shape: _trial_seconds(PackedProducts(kernels), matrix) for shape, matrix in shapes.items()}
    gains = {shape: _mean_ratio([times]) for shape, times in seconds.items()}
    gain = _mean_ratio([seconds[shape] for m in matrices if (shape := (m.outputs, m.inputs)) in seconds])
    if gain >= 1:
        for matrix in matrices:
            matrix.adopt(packed)
    each = ", ".join(f"{outputs}x{inputs} {shape_gain:.1f}x" for (outputs, inputs), shape_gain in gains.items())
    logger.info(
        "linears: %s in %.2f s; packed ones run at %.2f times the speed of torch's (%s)",
        "packed" if gain >= 1 else "left to torch",
        time.perf_counter() - began,
        gain,
        each,
    )


def _mean_ratio(trials: list[list[tuple[float, float]]]) -> float:
    """Torch's time through ours, of all trials together: the geometric mean over numbers of rows."""
    sums = [[sum(side) for side in zip(*of_rows, strict=True)] for of_rows in zip(*trials, strict=True)]
    return math.exp(sum(math.log(plain / ours) for plain, ours in sums) / len(sums)) if sums else 1.0


def _trial_seconds(packed: PackedProducts, matrix: Matrix) -> list[tuple[float, float]]:
    """What torch and packed products take for each number of rows."""
    outputs, dtype = min(matrix.outputs, _TRIED_OUTPUTS), matrix.weight.dtype
    plain, ours = (Matrix(outputs, matrix.inputs, dtype, torch.device("cpu")) for _ in range(2))
    for trial in (plain, ours):
        trial.fill(matrix.weight[:outputs])
    ours.adopt(packed)
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)  # whose time of computing is the same however busy the machine is
    try:
        for rows in _TRIED_ROWS:
            x, recording = torch.ones(rows, matrix.inputs, dtype=dtype), Recording()
            with recording.record():
                result = ours(x)
            ((kernel, arguments),) = recording.calls
            times.append((_seconds(lambda x=x: plain(x)), _seconds(lambda k=kernel, a=arguments: k(a, None))))
            del result
    finally:
        torch.set_num_threads(threads)
    return times


def _seconds(call: Callable[[], object]) -> float:
    """The best of some calls, as time that this thread computed."""
    call()
    times, deadline = [], time.perf_counter() + _TRIAL_SECONDS
    while len(times) < 2 or time.perf_counter() < deadline:
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return max(min(times), 1e-9)
