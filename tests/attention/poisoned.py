"""Ragged mixed batches in a shuffled, poisoned cache, for backends that are held against `reference`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from attention.backend import Backend
from attention.cache import Scales, quantise, scatter
from attention.capabilities import HeadLayout
from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata, RaggedMetadata
from attention.reference import ReferenceBackend

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Chunks as (query tokens, tokens in all) and the context lengths of the decodes.

    filler: what the block tables hold past each context.
    """

    chunks: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    block_size: int = 256
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    window: int | None = None
    filler: int = -1
    soft_cap: float | None = None
    alibi: bool = False
    seed: int = 0

    @property
    def layout(self) -> HeadLayout:
        heads = self.kv_heads * self.group
        slopes = tuple(2.0 ** -(head + 1) for head in range(heads)) if self.alibi else None
        return HeadLayout(heads, self.kv_heads, self.head_dim, self.soft_cap, slopes)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Batch:
    """Keys and values of earlier steps lie in the cache, the step's own are to be written; all other slots hold NaN."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, scales: Scales | None = None) -> None:
        """scales: keeps keys and values in fp8 with these; queries are then numbers that fp8 has with theirs."""
        self.case, self.scales = case, scales
        generator = torch.Generator().manual_seed(case.seed)
        self.lengths = [*case.chunks, *((1, total) for total in case.decodes)]
        counts = [-(-total // case.block_size) for _, total in self.lengths]
        num_blocks = sum(counts) + 2
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
        self.cache = tuple(torch.full(shape, NAN).to(torch.float8_e4m3fn if scales else dtype) for _ in range(2))
        slots, new = [], ([], [])
        for (query_len, total), table in zip(self.lengths, self.tables, strict=True):
            place = torch.tensor(
                [table[p // case.block_size] * case.block_size + p % case.block_size for p in range(total)]
            )
            slots.append(place[total - query_len :])
            drawn = [torch.randn(total, case.kv_heads, case.head_dim, generator=generator).to(dtype) for _ in range(2)]
            scatter(*(rows[: total - query_len] for rows in drawn), self.cache, place[: total - query_len], scales)
            for rows, fresh in zip(drawn, new, strict=True):
                fresh.append(rows[total - query_len :])
        self.slots = torch.cat(slots)
        self.new_keys, self.new_values = (torch.cat(fresh) for fresh in new)
        tokens = len(self.slots)
        self.query = torch.randn(tokens, case.kv_heads * case.group, case.head_dim, generator=generator).to(dtype)
        if scales:
            self.query = (quantise(self.query, scales.query, torch.float8_e4m3fn).float() * scales.query).to(dtype)

    def _int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.slots.device)

    def _padded(self, tables: list[list[int]]) -> torch.Tensor:
        width = max(map(len, tables)) + 1
        return self._int32([table + [self.case.filler] * (width - len(table)) for table in tables])

    def metadata(self) -> AttentionMetadata:
        case, split = self.case, len(self.case.chunks)
        prefill = decode = None
        if case.chunks:
            query_lens, seq_lens = (list(x) for x in zip(*case.chunks, strict=True))
            starts, contexts = self._int32([0, *accumulate(query_lens)]), self._int32(seq_lens)
            prefill = PrefillMetadata(starts, contexts, self._padded(self.tables[:split]), query_lens, seq_lens)
        if case.decodes:
            contexts = self._int32(list(case.decodes))
            decode = DecodeMetadata(contexts, self._padded(self.tables[split:]), max(case.decodes))
        return AttentionMetadata(self.slots, case.block_size, prefill, decode)

    def ragged_metadata(self, padding_rows: int, padding_tokens: int) -> AttentionMetadata:
        """The same rows as a captured graph sees them, padded; the slots of the padding are the caller's to fill."""
        query_lens = [query for query, _ in self.lengths]
        starts = self._int32([0, *accumulate([*query_lens, *[0] * padding_rows])])
        contexts = self._int32([total for _, total in self.lengths] + [0] * padding_rows)
        tables = self._padded([*self.tables, *[[]] * padding_rows])
        tokens = len(self.slots) + padding_tokens
        reach = tables.shape[1] * self.case.block_size
        ragged = RaggedMetadata(starts, contexts, tables, tokens, tokens, reach)
        return AttentionMetadata(torch.zeros(tokens, dtype=torch.int64), self.case.block_size, ragged=ragged)

    def to(self, device: torch.device) -> Batch:
        """Moves it, cache and all; returns itself."""
        self.cache = tuple(pages.to(device) for pages in self.cache)
        for name in ("slots", "new_keys", "new_values", "query"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def run(self, backend: Backend) -> torch.Tensor:
        """Writes the step's keys and values, then attends."""
        metadata = self.metadata()
        backend.write(self.new_keys, self.new_values, self.cache, metadata.slot_mapping, self.scales)
        return backend.attend(self.query, self.cache, metadata, self.case.window, self.scales)

    def expected(self) -> torch.Tensor:
        """By `reference`, for which garbage past a context is replaced by block 0."""
        clean = Batch(replace(self.case, filler=0), self.query.dtype, self.scales).to(self.query.device)
        return clean.run(ReferenceBackend(self.case.layout, self.case.scale))
