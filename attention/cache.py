"""The paged KV cache of one rank, in the model's dtype or in fp8 with a scale for each layer's keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention.memory import LargePages


@dataclass(frozen=True, slots=True)
class Scales:
    """Of one layer: what stored fp8 numbers are multiplied with to be the true ones. query: for kernels whose queries
    are fp8 too."""

    key: float = 1.0
    value: float = 1.0
    query: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one rank's cache is made of; num_kv_heads are the rank's own. dtype: of what is stored."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Stores keys and values, [tokens, num_kv_heads, head_dim], at `slots` [tokens] of one layer's cache.

    scales: of a cache in fp8; None where it has the dtype of keys and values.
    """
    if scales is None:
        for tensor, pages in zip((key, value), cache, strict=True):
            pages.view(-1, *pages.shape[2:])[slots] = tensor
        return
    for tensor, pages, scale in zip((key, value), cache, (scales.key, scales.value), strict=True):
        # As bytes: not every operation on every device knows fp8.
        pages.view(torch.uint8).view(-1, *pages.shape[2:])[slots] = quantise(tensor, scale, pages.dtype).view(
            torch.uint8
        )


def quantise(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x / scale in fp8, saturating; NaN stays NaN."""
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-most, most).to(dtype)


class KVCache:
    """Keys and values of every layer: each [num_blocks, block_size, num_kv_heads, head_dim].

    scales: one of each layer, for a cache in fp8; None otherwise.
    On CPU the memory is only reserved here and becomes resident as blocks are first written, large page by large page.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, device: torch.device, scales: Sequence[Scales] | None = None
    ) -> None:
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.num_blocks = num_blocks
        self.scales = scales or [None] * shape.num_layers
        pages = LargePages()

        def tensor() -> torch.Tensor:
            if device.type != "cpu":
                return torch.empty(size, dtype=shape.dtype, device=device)
            return pages.allocate(math.prod(size) * shape.dtype.itemsize).view(shape.dtype).view(size)

        self.layers = [(tensor(), tensor()) for _ in range(shape.num_layers)]
