"""Captured forward passes: one launch replays a whole step, whose inputs lie in buffers that never move.

    step          | 5 decodes                |        bucket "decode" 8
    token_ids     | a b c d e | . . . |              stale, harmless
    slots         | 9 4 7 2 6 | s s s |              s: in the spare block, which belongs to no request
    context_lens  | 7 3 9 4 5 | 1 1 1 |              padding attends to what it just wrote there itself

    step          | chunk (3) | 2 decodes |           bucket "mixed" 8
    slots         | 9 4 7     | 2 6       | s s s |
    query_start_loc [0, 3, 4, 5, 5, 5, ..]            rows past the last have no queries; padding belongs to no row

Everything, the copies into the buffers included, runs on one stream: a buffer is overwritten only after the replay that
read it, and whoever reads the hidden states has launched that before the next replay.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata, RaggedMetadata
from workers.inputs import StepInputs

logger = logging.getLogger("quadriga.graphs")

# Beyond this, a step keeps the device busy for longer than its launches take, and padding costs more than it saves.
MOST_MIXED_TOKENS = 512

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


class Graph(Protocol):
    def replay(self) -> None:
        """Runs what was captured, on the tensors it was captured with."""


class GraphMaker(Protocol):
    def capture(self, run: Callable[[], None]) -> Graph:
        """Runs `run` once to warm it up and once to capture it, which may not wait for the device."""


class CudaGraphMaker:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # libraries choose their algorithms and allocate workspaces now rather than while capturing
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """num_rows: requests at once. max_tokens: of a step.

    kinds: "decode" captures steps of decodes alone, "mixed" all steps of at most MOST_MIXED_TOKENS tokens too.
    """

    num_rows: int
    max_tokens: int
    max_model_len: int
    block_size: int
    hidden_size: int
    kinds: str

    @property
    def decode_buckets(self) -> list[int]:
        return buckets(self.num_rows, parts=4)

    @property
    def mixed_buckets(self) -> list[int]:
        return buckets(min(self.max_tokens, MOST_MIXED_TOKENS), parts=2) if self.kinds == "mixed" else []

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest captured step."""
        return max(self.decode_buckets[-1], *self.mixed_buckets, 0)


class StepGraphs:
    """The captured steps of one rank.

    forward: (token_ids [n] int64, positions [n] int64, metadata) -> hidden states [n, hidden].
    spare_block: the block that padding is written to; no request may have it.
    replays: how often each (kind, bucket) was replayed.
    """

    def __init__(
        self,
        forward: Forward,
        maker: GraphMaker,
        sizes: GraphSizes,
        spare_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes, self._spare_block = sizes, spare_block
        self.replays: Counter[tuple[str, int]] = Counter()
        self._forward, self._maker = forward, maker
        self._buckets = {"decode": sizes.decode_buckets, "mixed": sizes.mixed_buckets}
        self._graphs: dict[tuple[str, int], Graph] = {}
        tokens, rows = sizes.most_tokens, sizes.num_rows
        long, short = {"dtype": torch.int64, "device": device}, {"dtype": torch.int32, "device": device}
        self._spare_slot = spare_block * sizes.block_size
        self._token_ids, self._positions = torch.zeros(tokens, **long), torch.zeros(tokens, **long)
        self._slots = torch.full((tokens,), self._spare_slot, **long)
        self._query_start_loc, self._counting = torch.zeros(rows + 1, **short), torch.arange(rows + 1, **short)
        self._context_lens = torch.ones(rows, **short)
        self._block_table = torch.full((rows, -(-sizes.max_model_len // sizes.block_size)), spare_block, **short)
        self._hidden = torch.zeros(tokens, sizes.hidden_size, dtype=dtype, device=device)

    def capture(self) -> None:
        """Captures every bucket, the largest first, so that the others fit into the memory that it took."""
        began = time.perf_counter()
        every = [(kind, size) for kind, sizes in self._buckets.items() for size in sizes]
        for kind, size in sorted(every, key=lambda bucket: -bucket[1]):
            self._graphs[kind, size] = self._maker.capture(lambda kind=kind, size=size: self._run(kind, size))
        logger.info("captured %d graphs in %.1f s", len(every), time.perf_counter() - began)

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """The step's hidden states [tokens, hidden], good until the next step; None when no bucket holds it."""
        metadata, count = inputs.metadata, len(inputs.token_ids)
        kind = "mixed" if metadata.prefill else "decode"
        sizes = self._buckets[kind]
        at = bisect_left(sizes, count)
        if at == len(sizes):
            return None
        size = sizes[at]
        self._token_ids[:count].copy_(inputs.token_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[:count].copy_(metadata.slot_mapping)
        self._slots[count:size].fill_(self._spare_slot)
        if metadata.prefill:
            self._fill_ragged(metadata, count)
        else:
            self._fill_rows(0, metadata.decode)
            self._context_lens[count:size].fill_(1)
            self._block_table[count:size, 0].fill_(self._spare_block)
        self._graphs[kind, size].replay()
        self.replays[kind, size] += 1
        return self._hidden[:count]

    def _fill_ragged(self, metadata: AttentionMetadata, count: int) -> None:
        chunks = len(metadata.prefill.query_lens)
        decodes = metadata.num_decode_tokens
        starts = self._query_start_loc
        starts[: chunks + 1].copy_(metadata.prefill.query_start_loc)
        self._fill_rows(0, metadata.prefill)
        if metadata.decode:
            first = metadata.num_prefill_tokens
            torch.add(self._counting[1 : decodes + 1], first, out=starts[chunks + 1 : chunks + decodes + 1])
            self._fill_rows(chunks, metadata.decode)
        starts[chunks + decodes + 1 :].fill_(count)
        self._context_lens[chunks + decodes :].fill_(0)

    def _fill_rows(self, first: int, part: PrefillMetadata | DecodeMetadata) -> None:
        rows, width = part.block_table.shape
        self._context_lens[first : first + rows].copy_(part.context_lens)
        self._block_table[first : first + rows, :width].copy_(part.block_table)

    def _run(self, kind: str, size: int) -> None:
        # Metadata of its own at each call, as backends ask of whoever captures them.
        hidden = self._forward(self._token_ids[:size], self._positions[:size], self._metadata(kind, size))
        self._hidden[:size].copy_(hidden)

    def _metadata(self, kind: str, size: int) -> AttentionMetadata:
        sizes, slots = self.sizes, self._slots[:size]
        if kind == "decode":
            part = DecodeMetadata(self._context_lens[:size], self._block_table[:size], sizes.max_model_len)
            return AttentionMetadata(slots, sizes.block_size, decode=part)
        ragged = RaggedMetadata(
            self._query_start_loc, self._context_lens, self._block_table, size, size, sizes.max_model_len
        )
        return AttentionMetadata(slots, sizes.block_size, ragged=ragged)


def buckets(limit: int, parts: int) -> list[int]:
    """Sizes up to `limit`, of which the next larger one wastes at most 1 / parts: powers of two, and steps between.

    buckets(40, 4) -> [1, 2, 4, 8, 16, 20, 24, 28, 32, 40]
    """
    sizes, size = [], 1
    while size < limit:
        sizes.append(size)
        size += size if size < 16 else (1 << size.bit_length() - 1) // parts
    return [*sizes, limit]


def capture_refusal(device: torch.device, capability: str, transport: str, enforce_eager: bool) -> str | None:
    """Why steps are not captured, or None when they can be. capability, transport: of backend and group."""
    if enforce_eager:
        return "enforce_eager is set"
    if device.type != "cuda":
        return f"graphs are for CUDA devices, not for {device.type}"
    if capability == "none":
        return "the attention backend cannot be captured"
    if transport not in ("none", "nccl", "nccl and symmetric memory"):
        return f"collectives over {transport} cannot be captured"
    return None
