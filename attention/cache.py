"""The paged KV cache of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one rank's cache is made of; num_kv_heads are the rank's own."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def scatter(
    key: torch.Tensor, value: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """Stores keys and values, [tokens, num_kv_heads, head_dim], at `slots` [tokens] of one layer's cache."""
    for tensor, pages in zip((key, value), cache, strict=True):
        pages.view(-1, *pages.shape[2:])[slots] = tensor


class KVCache:
    """Keys and values of every layer: each [num_blocks, block_size, num_kv_heads, head_dim].

    On CPU the memory is only reserved here and becomes resident block by block as blocks are first written.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device) -> None:
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.num_blocks = num_blocks
        self.layers = [
            (
                torch.empty(size, dtype=shape.dtype, device=device),
                torch.empty(size, dtype=shape.dtype, device=device),
            )
            for _ in range(shape.num_layers)
        ]
