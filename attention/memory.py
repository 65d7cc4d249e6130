"""Memory in large pages, where the system has them to give.

Weights are read from end to end in every step, and the KV cache in pieces from all over it. With small pages the
processor spends a good part of that time on finding where they lie.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_RESERVED = 64 << 20  # bytes that are reserved together
_ALIGNMENT = 64  # of a cache line


class LargePages:
    """Hands out host memory, which lasts as long as there are tensors of it.

    It becomes resident as it is first written, by pages of 2 MiB where the system grants them (transparent huge pages,
    `madvise` or `always`).
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, aligned to a cache line."""
        if num_bytes > len(self._memory) - self._used:
            self._memory, self._used = _reserve(max(num_bytes, _RESERVED)), 0
        piece = self._memory[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def _reserve(num_bytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
