"""What backends over FlashAttention kernels share: a step's parts as rows of ragged queries over paged keys.

    two calls    | chunk of A (3) | chunk of B (2) |      query_start_loc [0, 3, 5]
                                                   | C | D |              [0, 1, 2]
    one call     | chunk of A (3) | chunk of B (2) | C | D |   [0, 3, 5, 6, 7]

Row r's queries are the last of its context: query i of q sees keys up to position context_lens[r] - q + i, which is
the kernels' causal mask "aligned to the bottom right corner". Entries of the block table past the context are not read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attention.cache import Scales, scatter
from attention.capabilities import Capabilities, HeadLayout
from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata, RaggedMetadata

NEEDED_CAPABILITY = (8, 0)  # Ampere: what FlashAttention 2 and later run on
FLASH2_PAGES = 256
FLASH2_REASON = "FlashAttention 2 reads keys in pages of a multiple of 256 tokens"


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """One call's rows. All tensors int32: query_start_loc, key_start_loc [R + 1], context_lens [R], block_table [R, n].

    tokens: which of the step's tokens they are. decode: each row has exactly one query token.
    """

    tokens: slice
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    decode: bool


class RaggedBackend(ABC):
    """A backend whose kernels attend to ragged queries over paged keys.

    calls: "one" serves a mixed step in one call, "two" (and "auto") prefill and decode each in its own: decode rows
    alone let the kernels pack the query heads of a group into one tile and read each key once for all of them.
    """

    name: str

    def __init__(self, layout: HeadLayout, scale: float, calls: str, capabilities: Capabilities) -> None:
        self.layout, self.scale = layout, scale
        self.capabilities = capabilities
        self.one_call = calls == "one"
        self._seen: AttentionMetadata | None = None
        self._rows: list[RaggedRows] = []

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
        if metadata is not self._seen:  # the first layer of a step derives what all layers use
            self._seen, self._rows = metadata, ragged_rows(metadata, self.one_call)
        parts = [self._call(query[rows.tokens], cache, rows, window, scales) for rows in self._rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def _call(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: RaggedRows,
        window: int | None,
        scales: Scales | None,
    ) -> torch.Tensor:
        """query: [tokens of rows, num_q_heads, head_dim] -> the same shape. window: keys seen, the query's own too."""


def ragged_rows(metadata: AttentionMetadata, one_call: bool) -> list[RaggedRows]:
    """The calls of a step, in the order of its tokens."""
    split, stop = metadata.num_prefill_tokens, metadata.num_prefill_tokens + metadata.num_decode_tokens
    if metadata.ragged is not None:
        return [_rows(metadata.ragged, slice(0, metadata.ragged.num_tokens), metadata.ragged.query_start_loc)]
    rows = []
    if metadata.prefill:
        rows.append(_rows(metadata.prefill, slice(0, split), metadata.prefill.query_start_loc))
    if metadata.decode:
        count = metadata.decode.num_tokens
        starts = torch.arange(count + 1, dtype=torch.int32, device=metadata.slot_mapping.device)
        rows.append(_rows(metadata.decode, slice(split, stop), starts))
    return [_join(*rows)] if one_call and len(rows) == 2 else rows


def _rows(
    part: PrefillMetadata | DecodeMetadata | RaggedMetadata, tokens: slice, query_start_loc: torch.Tensor
) -> RaggedRows:
    decode = isinstance(part, DecodeMetadata)
    return RaggedRows(
        tokens=tokens,
        query_start_loc=query_start_loc,
        key_start_loc=F.pad(part.context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        context_lens=part.context_lens,
        block_table=part.block_table,
        max_query_len=1 if decode else part.max_query_len,
        max_seq_len=part.max_seq_len,
        decode=decode,
    )


def _join(first: RaggedRows, second: RaggedRows) -> RaggedRows:
    width = max(first.block_table.shape[1], second.block_table.shape[1])
    tables = [F.pad(rows.block_table, (0, width - rows.block_table.shape[1])) for rows in (first, second)]
    return RaggedRows(
        tokens=slice(first.tokens.start, second.tokens.stop),
        query_start_loc=torch.cat((first.query_start_loc, second.query_start_loc[1:] + first.tokens.stop)),
        key_start_loc=torch.cat((first.key_start_loc, second.key_start_loc[1:] + first.key_start_loc[-1])),
        context_lens=torch.cat((first.context_lens, second.context_lens)),
        block_table=torch.cat(tables),
        max_query_len=max(first.max_query_len, second.max_query_len),
        max_seq_len=max(first.max_seq_len, second.max_seq_len),
        decode=False,
    )


def unusable_device(device: torch.device) -> str | None:
    """Why FlashAttention kernels cannot run on this device, or None when they can."""
    if device.type != "cuda":
        return f"its kernels run on CUDA devices, not on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"it needs compute capability 8.0 (Ampere) or newer, {name} has {capability[0]}.{capability[1]}"
    return None
