"""The small operations of a decoder by Triton kernels, on CUDA; imported only where Triton is."""

from __future__ import annotations

import torch

from attention.backend import Backend
from attention.cache import Scales
from workers import triton_kernels
from workers.ops import Pages, Rotary, TorchOps


class TritonOps(TorchOps):
    """Fused where a fusion saves reading or writing activations; plain torch elsewhere.

    The backend's pages must be as `attention.cache.scatter` fills them.
    """

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return triton_kernels.rms_norm(x, weight, eps)[0]

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = triton_kernels.rms_norm(x, weight, eps, delta)
        return total, normed

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return triton_kernels.silu_multiply(gate_up)

    def noise(self, high: torch.Tensor, low: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return triton_kernels.gumbel_noise(high, low, ids)

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
        # Triton 3.7's interpreter rounds to fp8 wrongly, so a kernel for that could not be tested.
        if rotary is None or scales is not None:
            return super().store(query, key, value, rotary, pages, slots, backend, scales)
        return triton_kernels.rotate_and_store(query, key, value, rotary, pages, slots)
