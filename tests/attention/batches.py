"""Ragged mixed batches over a shuffled paged cache, for the tests of attention backends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from attention.backend import Backend, HeadLayout
from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from attention.reference import ReferenceBackend

HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Chunks as (query tokens, tokens in all) and the context lengths of the decodes."""

    chunks: list[tuple[int, int]]
    decodes: list[int]
    block_size: int = 4
    kv_heads: int = 2
    group: int = 2
    window: int | None = None
    seed: int = 0
    head_dim: int = HEAD_DIM


class Batch:
    """Random keys and values of every request, what of them is in the cache already, and the step's own tokens."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.case = case
        self.scale, head_dim = case.head_dim**-0.5, case.head_dim
        generator = torch.Generator().manual_seed(case.seed)
        random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        lengths = [(query, total) for query, total in case.chunks] + [(1, total) for total in case.decodes]
        blocks_each = [-(-total // case.block_size) for _, total in lengths]
        num_blocks = sum(blocks_each) + 3
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks_each]
        shape = (num_blocks, case.block_size, case.kv_heads, head_dim)
        self.cache = (torch.full(shape, NAN, dtype=dtype), torch.full(shape, NAN, dtype=dtype))
        self.requests, self.new_keys, self.new_values, self.queries, self.slots = [], [], [], [], []
        for (query_len, total), table in zip(lengths, self.tables, strict=True):
            keys, values = random(total, case.kv_heads, head_dim), random(total, case.kv_heads, head_dim)
            queries = random(query_len, case.kv_heads * case.group, head_dim)
            place = [(table[p // case.block_size], p % case.block_size) for p in range(total)]
            for position in range(total - query_len):
                self.cache[0][place[position]] = keys[position]
                self.cache[1][place[position]] = values[position]
            self.slots += [block * case.block_size + offset for block, offset in place[total - query_len :]]
            self.new_keys.append(keys[total - query_len :])
            self.new_values.append(values[total - query_len :])
            self.queries.append(queries)
            self.requests.append((queries, keys, values))

    def metadata(self) -> AttentionMetadata:
        split, prefill, decode = len(self.case.chunks), None, None
        if self.case.chunks:
            query_lens, seq_lens = (list(x) for x in zip(*self.case.chunks, strict=True))
            starts = torch.tensor([0, *query_lens]).cumsum(0).int()
            prefill = PrefillMetadata(
                starts, torch.tensor(seq_lens).int(), padded(self.tables[:split]), query_lens, seq_lens
            )
        if self.case.decodes:
            contexts = torch.tensor(self.case.decodes).int()
            decode = DecodeMetadata(contexts, padded(self.tables[split:]), max(self.case.decodes))
        return AttentionMetadata(torch.tensor(self.slots), self.case.block_size, prefill, decode)

    def run(self, kind: Callable[[HeadLayout, float], Backend] = ReferenceBackend) -> torch.Tensor:
        """Writes the step's keys and values, then attends."""
        heads = self.case.kv_heads * self.case.group
        backend = kind(HeadLayout(heads, self.case.kv_heads, self.case.head_dim), self.scale)
        metadata = self.metadata()
        backend.write(torch.cat(self.new_keys), torch.cat(self.new_values), self.cache, metadata.slot_mapping)
        return backend.attend(torch.cat(self.queries), self.cache, metadata, self.case.window)

    def only(self, request: int) -> Batch:
        """One request of the batch, over the same cache."""
        split, alone = len(self.case.chunks), copy.copy(self)
        is_chunk = request < split
        chunks, decodes = self.case.chunks[request : request + 1], self.case.decodes[request - split :][:1]
        alone.case = replace(self.case, chunks=chunks if is_chunk else [], decodes=[] if is_chunk else decodes)
        for name in ("tables", "requests", "new_keys", "new_values", "queries"):
            setattr(alone, name, getattr(self, name)[request : request + 1])
        before = sum(map(len, self.queries[:request]))
        alone.slots = self.slots[before : before + len(self.queries[request])]
        return alone

    def part(self, first: int, length: int) -> Batch:
        """Tokens of the only request, a chunk, as a chunk of their own or, where it is one, as a decode."""
        ((query_len, total),) = self.case.chunks
        context, taken, part = total - query_len + first + length, slice(first, first + length), copy.copy(self)
        is_decode = length == 1
        chunks, decodes = ([], [context]) if is_decode else ([(length, context)], [])
        part.case = replace(self.case, chunks=chunks, decodes=decodes)
        part.slots = self.slots[taken]
        for name in ("new_keys", "new_values", "queries"):
            setattr(part, name, [tensor[taken] for tensor in getattr(self, name)])
        return part

    def expected(self) -> torch.Tensor:
        return torch.cat([self._naive(*request) for request in self.requests])

    def _naive(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention as its definition reads: for each token and head, a softmax over the keys it may see."""
        total, out = len(keys), torch.empty(queries.shape, dtype=torch.float64)
        for i, query in enumerate(queries.double()):
            position = total - len(queries) + i
            first = 0 if self.case.window is None else max(0, position - self.case.window + 1)
            for head, q in enumerate(query):
                kv = head // self.case.group
                scores = [float(q @ keys[j, kv].double()) * self.scale for j in range(first, position + 1)]
                weights = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(
                    w * values[j, kv].double() for w, j in zip(weights, range(first, position + 1), strict=True)
                )
                out[i, head] = mixed / sum(weights)
        return out


def padded(tables: list[list[int]]) -> torch.Tensor:
    """Block tables of one width; the padding points at block 0, which may belong to anybody."""
    width = max(map(len, tables))
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    totals = st.integers(1, 18)
    chunks = [(draw(st.integers(1, total)), total) for total in draw(st.lists(totals, max_size=3))]
    decodes = draw(st.lists(totals, min_size=0 if chunks else 1, max_size=3))
    return Case(
        chunks,
        decodes,
        block_size=draw(st.sampled_from([1, 4, 16])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 4)),
        window=draw(st.sampled_from([None, 1, 5])),
        seed=draw(st.integers(0, 1000)),
    )
