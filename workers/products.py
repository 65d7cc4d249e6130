"""Linears over packed weights (linear.cpp), where they are measured to be faster than torch's."""

from __future__ import annotations

import logging
import math
import time

import torch
from torch import nn

from attention.native import FORMATS, call, empty
from parallel.layers import Matrix
from workers.kernels import Kernels

logger = logging.getLogger("quadriga.worker")

_TRIED_ROWS = (1, 16, 128)  # single stream, a few streams, prefill
_TRIED_OUTPUTS = 4096  # of a larger weight so many are tried
_TRIAL_SECONDS = 0.004


class PackedProducts:
    """One copy of the weight, in panels, serves any number of rows and lookups. A row's result depends on no other."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        outputs, inputs = weight.shape
        packed = torch.empty(-(-outputs // 32) * 32 * (inputs + inputs % 2), dtype=weight.dtype)
        arguments = (FORMATS[weight.dtype], torch.get_num_threads(), weight.data_ptr(), outputs, inputs)
        call(self.kernels.pack, *arguments, packed.data_ptr())
        return packed

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        x = x.contiguous()
        out = empty((*x.shape[:-1], matrix.outputs), torch.float32 if wide else x.dtype)
        call(
            self.kernels.multiply,
            *(FORMATS[x.dtype], torch.get_num_threads(), x.data_ptr(), math.prod(x.shape[:-1]), matrix.inputs),
            *(matrix.weight.data_ptr(), matrix.outputs, 0 if bias is None else bias.data_ptr()),
            *(out.data_ptr(), int(wide)),
        )
        return out

    def lookup(self, matrix: Matrix, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        out = empty((len(ids), matrix.inputs), matrix.weight.dtype)
        call(
            self.kernels.lookup,
            *(FORMATS[out.dtype], torch.get_num_threads(), matrix.weight.data_ptr(), first_id, matrix.outputs),
            *(matrix.inputs, ids.data_ptr(), len(ids), out.data_ptr()),
        )
        return out


def settle_products(model: nn.Module, kernels: Kernels) -> None:
    """Gives every matrix of the model the products that are faster for its shape, one after another."""
    began = time.perf_counter()
    packed, choices = PackedProducts(kernels), {}
    for matrix in model.modules():
        if isinstance(matrix, Matrix):
            shape = (matrix.outputs, matrix.inputs)
            if shape not in choices:
                choices[shape] = _is_faster(packed, matrix)
            if choices[shape]:
                matrix.adopt(packed)
    named = ", ".join(
        f"{outputs}x{inputs} {'packed' if is_packed else 'torch'}" for (outputs, inputs), is_packed in choices.items()
    )
    logger.info("linears settled in %.2f s: %s", time.perf_counter() - began, named)


def _is_faster(packed: PackedProducts, matrix: Matrix) -> bool:
    """Whether packed products win over torch's on the geometric mean over numbers of rows."""
    if 0 in (matrix.outputs, matrix.inputs):
        return False
    outputs, dtype = min(matrix.outputs, _TRIED_OUTPUTS), matrix.weight.dtype
    trials = [Matrix(outputs, matrix.inputs, dtype, torch.device("cpu")) for _ in range(2)]
    for trial in trials:
        trial.weight.copy_(matrix.weight[:outputs])
    trials[1].adopt(packed)
    gain = 0.0
    for rows in _TRIED_ROWS:
        x = torch.ones(rows, matrix.inputs, dtype=dtype)
        plain, ours = (_seconds(trial, x) for trial in trials)
        gain += math.log(plain / ours)
    return gain > 0


def _seconds(trial: Matrix, x: torch.Tensor) -> float:
    """The best of some calls: on a busy machine the others tell about the neighbours."""
    trial(x)
    best, deadline = math.inf, time.perf_counter() + _TRIAL_SECONDS
    while (began := time.perf_counter()) < deadline:
        trial(x)
        best = min(best, time.perf_counter() - began)
    return best
