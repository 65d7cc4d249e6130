"""Attention in plain torch, in fp32: the backend that every other one is tested against."""

from __future__ import annotations

import torch

from attention.cache import Scales, scatter
from attention.capabilities import Capabilities, HeadLayout
from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata

QUERY_TILE = 256  # query tokens whose scores are held at once, which bounds the memory of a long chunk


class ReferenceBackend:
    """Exact and readable. Prefill goes chunk by chunk; decodes go together, padded to the longest context."""

    name = "reference"

    def __init__(self, layout: HeadLayout, scale: float) -> None:
        self.layout = layout
        self.scale = scale
        self.capabilities = self.on(torch.device("cpu"))

    @classmethod
    def on(cls, device: torch.device) -> Capabilities:
        # A captured step would always gather the longest context there may be, so it is better not captured.
        return Capabilities(soft_cap=True, alibi=True, cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2))

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        scales: Scales | None = None,
    ) -> None:
        scatter(key, value, cache, slots, scales)

    def attend(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        window: int | None,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        scales = scales or Scales()
        out = torch.empty_like(query)
        split = metadata.num_prefill_tokens
        if metadata.prefill:
            self._prefill(query[:split], cache, metadata.prefill, window, scales, out[:split])
        if metadata.decode:
            self._decode(query[split:], cache, metadata.decode, window, scales, out[split:])
        return out

    def _prefill(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        part: PrefillMetadata,
        window: int | None,
        scales: Scales,
        out: torch.Tensor,
    ) -> None:
        start = 0
        for row, (query_len, seq_len) in enumerate(zip(part.query_lens, part.seq_lens, strict=True)):
            keys, values = _gather(cache, part.block_table[row : row + 1], seq_len, scales)
            positions = torch.arange(seq_len - query_len, seq_len, device=query.device).unsqueeze(0)
            for first in range(0, query_len, QUERY_TILE):
                tile = slice(start + first, start + min(first + QUERY_TILE, query_len))
                distance = _distance(positions[:, first : first + QUERY_TILE], seq_len)
                out[tile] = self._softmax_attention(query[tile].unsqueeze(0), keys, values, distance, window)[0]
            start += query_len

    def _decode(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        part: DecodeMetadata,
        window: int | None,
        scales: Scales,
        out: torch.Tensor,
    ) -> None:
        keys, values = _gather(cache, part.block_table, part.max_seq_len, scales)
        positions = (part.context_lens - 1).unsqueeze(1)
        distance = _distance(positions, part.max_seq_len)
        out.copy_(self._softmax_attention(query.unsqueeze(1), keys, values, distance, window)[:, 0])

    def _softmax_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        distance: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """query [B, Q, heads, D], keys and values [B, K, kv_heads, D], distance [B, Q, K] -> [B, Q, heads, D]."""
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        batch, query_len, _, head_dim = query.shape
        kv_heads, group = self.layout.num_kv_heads, self.layout.group_size
        # Query heads of a group stand side by side as rows of one product with their key/value head.
        q = query.float().view(batch, query_len, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, kv_heads, group * query_len, head_dim)
        k, v = (x.transpose(1, 2) for x in (keys, values))
        scores = (q @ k.transpose(2, 3)).mul_(self.scale).view(batch, kv_heads, group, query_len, -1)
        if self.layout.soft_cap is not None:
            scores.div_(self.layout.soft_cap).tanh_().mul_(self.layout.soft_cap)
        if self.layout.alibi_slopes is not None:
            slopes = scores.new_tensor(self.layout.alibi_slopes).view(kv_heads, group, 1, 1)
            scores -= slopes * distance[:, None, None]
        scores.masked_fill_(~visible[:, None, None], float("-inf"))
        weights = scores.softmax(dim=-1).view(batch, kv_heads, group * query_len, -1)
        # Unwritten cache memory may hold NaN, and 0 * NaN is NaN: keys that no query sees must not reach the product.
        v = v.masked_fill(~visible.any(dim=1)[:, None, :, None], 0)
        attended = (weights @ v).view(batch, kv_heads, group, query_len, head_dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


def _gather(
    cache: tuple[torch.Tensor, torch.Tensor], block_table: torch.Tensor, length: int, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [blocks, block_size, kv_heads, D], block_table [B, n] -> keys and values [B, length, kv_heads, D], fp32."""
    needed = -(-length // cache[0].shape[1])
    blocks = block_table[:, :needed].long()
    found = []
    for pages, scale in zip(cache, (scales.key, scales.value), strict=True):
        taken = pages[blocks].flatten(1, 2)[:, :length].float()
        found.append(taken if scale == 1 else taken * scale)
    return tuple(found)


def _distance(positions: torch.Tensor, length: int) -> torch.Tensor:
    """positions [B, Q] of the queries -> [B, Q, length]: how far back each key lies, in absolute positions."""
    return positions.unsqueeze(-1) - torch.arange(length, device=positions.device)
