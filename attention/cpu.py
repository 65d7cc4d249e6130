"""Attention on CPU in C++ (cpu.cpp): one call for the whole mixed batch."""

from __future__ import annotations

from pathlib import Path

import torch

from attention.backend import BackendError
from attention.cache import Scales
from attention.capabilities import Capabilities, HeadLayout
from attention.metadata import AttentionMetadata
from attention.native import FORMATS, NativeError, call, empty, float_bits, function, load_library

SOURCE = Path(__file__).with_name("cpu.cpp")


class CpuBackend:
    """Keys and values are read once for their group of heads, contexts are split when there are fewer rows than cores.

    A row's result depends on nothing but its own queries and context. Raises NativeError when it cannot be compiled.
    """

    name = "cpu"

    @classmethod
    def on(cls, device: torch.device) -> Capabilities:
        """Raises BackendError where it cannot be had."""
        if device.type != "cpu":
            raise BackendError(f"attention backend cpu cannot serve {device.type}")
        try:
            load_library(SOURCE)
        except NativeError as error:
            raise BackendError(f"attention backend cpu cannot be had: {error}") from error
        return Capabilities()

    def __init__(self, layout: HeadLayout, scale: float) -> None:
        self.capabilities = Capabilities()
        library = load_library(SOURCE)
        self._attend, self._write = function(library, "quadriga_attend"), function(library, "quadriga_write")
        self.layout = layout
        self._scale = float_bits(scale)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        scales: Scales | None = None,
    ) -> None:
        key, value = _dense_heads(key), _dense_heads(value)
        size = key.element_size()
        arguments = (
            *(len(slots), slots.data_ptr(), key.shape[1] * key.shape[2] * size),
            *(key.data_ptr(), key.stride(0) * size, value.data_ptr(), value.stride(0) * size),
            *(cache[0].data_ptr(), cache[1].data_ptr()),
        )
        call(self._write, *arguments)

    def attend(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        window: int | None,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        query = _dense_heads(query)
        out = empty(query.shape, query.dtype)
        keys, values = cache
        chunks, decodes = metadata.prefill, metadata.decode
        arguments = (
            *(FORMATS[query.dtype], torch.get_num_threads(), query.data_ptr(), query.stride(0), out.data_ptr()),
            *(keys.data_ptr(), values.data_ptr(), metadata.block_size),
            *(self.layout.num_kv_heads, self.layout.group_size, self.layout.head_dim, self._scale, window or 0),
            len(chunks.query_lens) if chunks else 0,
            chunks.query_start_loc.data_ptr() if chunks else 0,
            *(_contexts(chunks) if chunks else (0, 0, 0)),
            decodes.num_tokens if decodes else 0,
            *(_contexts(decodes) if decodes else (0, 0, 0)),
        )
        call(self._attend, *arguments)
        return out


def _contexts(part) -> tuple[int, int, int]:
    return part.context_lens.data_ptr(), part.block_table.data_ptr(), part.block_table.stride(0)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, D] whose heads lie side by side; tokens may lie apart, as slices of a fused projection do."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
