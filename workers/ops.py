"""The small operations of a decoder: as plain torch, compiled (ops.cpp), and in Triton (triton_ops.py).

The model sees one table of functions and does not know which.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.nn.functional as F

from attention.backend import Backend
from attention.cache import Scales
from attention.native import FORMATS, call, empty, float_bits
from parallel.layers import ColumnParallelLinear
from workers.kernels import Kernels
from workers.noise import gumbel_noise
from workers.products import PackedProducts
from workers.rope import rotate

logger = logging.getLogger("quadriga.worker")

Rotary = tuple[torch.Tensor, torch.Tensor]
Pages = tuple[torch.Tensor, torch.Tensor]


class Ops(Protocol):
    """Tensors are [tokens, features] or [tokens, heads, head_dim]; normalisation is over the last dimension."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, that normalised). May write to x."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[n, 2 size] -> [n, size]: SiLU of the first half times the second."""

    def gated(self, linear: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """gate(linear(x))."""

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """table[rows]."""

    def noise(self, high: torch.Tensor, low: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As workers.noise.gumbel_noise."""

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        pages: Pages,
        slots: torch.Tensor,
        backend: Backend,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Rotates queries and keys, where there is an angle, and stores keys and values. Returns the queries.

        scales: of pages in fp8.
        """


class TorchOps:
    """Plain torch, on any device."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if delta is None else x + delta
        return x, self.norm(x, weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gated(self, linear: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        return self.gate(linear(x))

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return table[rows]

    def noise(self, high: torch.Tensor, low: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return gumbel_noise(high, low, ids)

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        pages: Pages,
        slots: torch.Tensor,
        backend: Backend,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        backend.write(key, value, pages, slots, scales)
        return query


class CompiledOps(TorchOps):
    """One kernel each, but for noise. Numbers are fp32 between loading and storing."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, inner = len(x), x.shape[1] if x.dim() == 3 else 1
        return self._norm(x, rows, inner, None, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self._norm(x, len(x), 1, delta, weight, eps)

    def _norm(
        self, x: torch.Tensor, rows: int, inner: int, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = empty(x.shape, x.dtype)
        call(
            self.kernels.norm,
            *(FORMATS[x.dtype], torch.get_num_threads(), rows, inner, x.shape[-1], x.data_ptr(), x.stride(0)),
            *(0 if delta is None else delta.data_ptr(), weight.data_ptr(), float_bits(eps), out.data_ptr()),
        )
        return out

    def gated(self, linear: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        matrix = linear.matrix
        if isinstance(matrix.products, PackedProducts) and matrix.products.can_gate(matrix):
            return matrix.products.multiply_gated(matrix, x, linear.bias)
        return super().gated(linear, x)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = empty((rows, size), gate_up.dtype)
        arguments = (FORMATS[out.dtype], torch.get_num_threads(), rows, size, gate_up.data_ptr(), out.data_ptr())
        call(self.kernels.gate, *arguments)
        return out

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = empty((len(rows), *table.shape[1:]), table.dtype)
        row_bytes = table.stride(0) * table.element_size()
        call(self.kernels.gather, table.data_ptr(), row_bytes, rows.data_ptr(), len(rows), out.data_ptr())
        return out

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        pages: Pages,
        slots: torch.Tensor,
        backend: Backend,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        if rotary is None or scales is not None:
            return super().store(query, key, value, rotary, pages, slots, backend, scales)
        cos, sin = rotary
        call(
            self.kernels.rotate,
            *(FORMATS[query.dtype], torch.get_num_threads(), len(query), query.shape[2]),
            *(cos.data_ptr(), sin.data_ptr(), cos.stride(0)),
            *(query.data_ptr(), query.stride(0), query.shape[1], key.data_ptr(), key.stride(0)),
            *(value.data_ptr(), value.stride(0), key.shape[1]),
            *(slots.data_ptr(), pages[0].data_ptr(), pages[1].data_ptr()),
        )
        return query


def make_ops(device: torch.device, kernels: Kernels | None, fused: bool | None) -> Ops:
    """fused: compute with Triton's kernels; None does so on CUDA where Triton is installed.

    Raises ImportError where they are asked for and Triton is missing.
    """
    if fused or (fused is None and device.type == "cuda"):
        try:
            from workers.triton_ops import TritonOps
        except ImportError as error:
            if fused:
                raise
            logger.info("no fused kernels: %s", error)
        else:
            return TritonOps()
    return CompiledOps(kernels) if kernels else TorchOps()
