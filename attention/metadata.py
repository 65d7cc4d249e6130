"""What a backend must know about one mixed batch.

The tokens of a step lie flat, prefill chunks first and decodes after them:

    query     | chunk of A (3) | chunk of B (2) | C | D |      7 tokens
    prefill   query_start_loc  [0, 3, 5]   context_lens [3, 9]   (B's first 7 tokens were computed before)
    decode    context_lens     [14, 6]                           (one query token each)

A context length counts the step's own tokens of that request. Which part a request belongs to is decided by its
state: a last chunk of one token is prefill still.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class MetadataError(RuntimeError):
    """Numbers of a batch that contradict each other."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise MetadataError(message)


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """The prefill part: P ragged chunks.

    query_start_loc: [P + 1] int32, where each chunk's query tokens start; ends with their total.
    context_lens: [P] int32, tokens of each request whose keys are visible to its last query token.
    block_table: [P, blocks] int32, each request's block ids; entries past its context are not read.
    query_lens, seq_lens: the same lengths as Python integers, for code that loops on the host.
    """

    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]

    def __post_init__(self) -> None:
        count = len(self.query_lens)
        _require(count > 0, "a prefill part needs at least one chunk; leave it out when there is none")
        _require(
            len(self.seq_lens) == count
            and self.query_start_loc.shape == (count + 1,)
            and self.context_lens.shape == (count,)
            and self.block_table.dim() == 2
            and self.block_table.shape[0] == count,
            f"{count} chunks, but {len(self.seq_lens)} lengths, query_start_loc {tuple(self.query_start_loc.shape)}, "
            f"context_lens {tuple(self.context_lens.shape)}, block_table {tuple(self.block_table.shape)}",
        )
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            _require(1 <= query_len <= seq_len, f"a chunk of {query_len} tokens in a context of {seq_len}")

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens)


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """The decode part: D requests with one query token each.

    context_lens: [D] int32, tokens visible to the query token, itself included.
    block_table: [D, blocks] int32.
    max_seq_len: the largest context length.
    """

    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int

    def __post_init__(self) -> None:
        _require(self.context_lens.dim() == 1, f"context_lens must be [rows], got {tuple(self.context_lens.shape)}")
        count = self.context_lens.shape[0]
        _require(count > 0, "a decode part needs at least one row; leave it out when there is none")
        _require(
            self.block_table.dim() == 2 and self.block_table.shape[0] == count,
            f"{count} decodes, but block_table {tuple(self.block_table.shape)}",
        )
        _require(self.max_seq_len >= 1, f"the largest decode context must be at least 1, got {self.max_seq_len}")

    @property
    def num_tokens(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class RaggedMetadata:
    """Rows of both kinds as one ragged batch whose lengths only the device knows, as a captured graph needs it.

    query_start_loc: [R + 1] int32; a row may have no query tokens, and those past the last row's end are padding.
    context_lens: [R] int32. block_table: [R, blocks] int32.
    num_tokens: query tokens, padding included. max_query_len, max_seq_len: what no row ever exceeds.
    """

    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    def __post_init__(self) -> None:
        _require(self.context_lens.dim() == 1, f"context_lens must be [rows], got {tuple(self.context_lens.shape)}")
        count = self.context_lens.shape[0]
        _require(
            count > 0
            and self.query_start_loc.shape == (count + 1,)
            and self.block_table.dim() == 2
            and self.block_table.shape[0] == count,
            f"{count} rows, but query_start_loc {tuple(self.query_start_loc.shape)}, "
            f"block_table {tuple(self.block_table.shape)}",
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch.

    slot_mapping: [tokens] int64, where each token's key and value go: block * block_size + offset.
    ragged: stands in place of prefill and decode when a graph is captured, for backends that allow it.

    Raises MetadataError when the parts do not add up, naming the numbers.
    """

    slot_mapping: torch.Tensor
    block_size: int
    prefill: PrefillMetadata | None = None
    decode: DecodeMetadata | None = None
    ragged: RaggedMetadata | None = None

    def __post_init__(self) -> None:
        if self.ragged is not None:
            self._check_ragged(self.ragged)
            return
        total = self.num_prefill_tokens + self.num_decode_tokens
        _require(total > 0, "a batch needs at least one token")
        _require(
            self.slot_mapping.shape == (total,),
            f"{self.num_prefill_tokens} prefill and {self.num_decode_tokens} decode tokens, "
            f"but slot_mapping {tuple(self.slot_mapping.shape)}",
        )
        for part in (self.prefill, self.decode):
            if part is not None:
                self._check_reach(part)

    def _check_ragged(self, part: RaggedMetadata) -> None:
        _require(self.prefill is None and self.decode is None, "a ragged batch has no other parts")
        _require(
            self.slot_mapping.shape == (part.num_tokens,),
            f"{part.num_tokens} tokens, but slot_mapping {tuple(self.slot_mapping.shape)}",
        )
        self._check_reach(part)

    def _check_reach(self, part: PrefillMetadata | DecodeMetadata | RaggedMetadata) -> None:
        reach = part.block_table.shape[1] * self.block_size
        _require(
            part.max_seq_len <= reach,
            f"a context of {part.max_seq_len} tokens does not fit a block table of "
            f"{part.block_table.shape[1]} blocks of {self.block_size}",
        )

    @property
    def num_prefill_tokens(self) -> int:
        return self.prefill.num_tokens if self.prefill else 0

    @property
    def num_decode_tokens(self) -> int:
        return self.decode.num_tokens if self.decode else 0
