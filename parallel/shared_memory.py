"""Collectives between CPU ranks on one host through shared memory: no sockets, and a rank that is missing is named.

    memfd    | one line per rank: arrivals, has left | buffer 0: one slot per rank | buffer 1: one slot per rank |

Exchange k uses buffer k mod 2. A rank writes its slot, raises its counter to k + 1, waits until every counter is that
high, and reads all slots in rank order, so that every rank gets the same bits. Two buffers suffice: a rank that writes
in exchange k has seen every rank arrive in k - 1, and so has every rank finished reading k - 2.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

COUNTER_BYTES = 64  # a cache line each
SLOT_BYTES = 1 << 20
_SPINS = 200  # polls before other processes are let in; ranks may share cores


class RankMissingError(RuntimeError):
    """A rank did not come to a collective in time, or this one left before it came."""


class SharedMemory:
    """One rank's view of the segment. All ranks must make the same calls in the same order with equal shapes."""

    def __init__(self, descriptor: int, rank: int, size: int, timeout_seconds: float) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self._descriptor = descriptor
        # A faster all-reduce of one tensor by the same protocol: returns 0, or 1 + the rank that is missing.
        self.reduce: Callable[[torch.Tensor], int] | None = None
        header = size * COUNTER_BYTES
        self._memory = mmap.mmap(descriptor, _segment_bytes(size))
        self._arrivals = memoryview(self._memory)[:header].cast("q")
        slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=header)
        self._slots = slots.view(2, size, SLOT_BYTES)

    @property
    def _count(self) -> int:
        """Exchanges so far; the counter in the segment is the only one."""
        return self._arrivals[self.rank * (COUNTER_BYTES // 8)]

    def addresses(self) -> tuple[int, int]:
        """Where counters and slots lie in this process."""
        return self._slots.data_ptr() - self.size * COUNTER_BYTES, self._slots.data_ptr()

    def leave(self) -> None:
        """Lets this rank wait for no other any more. May be called from any thread, and for good."""
        self._arrivals[self.rank * (COUNTER_BYTES // 8) + 1] = 1

    @property
    def _has_left(self) -> bool:
        return self._arrivals[self.rank * (COUNTER_BYTES // 8) + 1] != 0

    def missing(self, rank: int) -> RankMissingError:
        if self._has_left:
            return RankMissingError(f"rank {self.rank} left while it waited for rank {rank} in exchange {self._count}")
        return RankMissingError(
            f"rank {self.rank} waited {self.timeout_seconds:g} s for rank {rank} in exchange {self._count}"
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a contiguous floating-point tensor over all ranks in place, accumulating in fp32."""
        if self.reduce is not None:
            if status := self.reduce(tensor):
                raise self.missing(status - 1)
            return tensor
        for piece in tensor.view(-1).split(SLOT_BYTES // tensor.element_size()):
            piece.copy_(self._exchange(piece).sum(dim=0, dtype=torch.float32))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor`, stacked: [size, *shape]."""
        pieces = tensor.contiguous().view(-1).split(SLOT_BYTES // tensor.element_size())
        parts = [self._exchange(piece).clone() for piece in pieces]
        return torch.cat(parts, dim=1).view(self.size, *tensor.shape)

    def close(self) -> None:
        """Gives up the descriptor. The memory itself goes with the last tensor over it."""
        os.close(self._descriptor)

    def _exchange(self, piece: torch.Tensor) -> torch.Tensor:
        """All ranks' pieces, [size, n]; to be read before the next exchange."""
        count = self._count
        buffer = self._slots[count % 2, :, : piece.numel() * piece.element_size()].view(piece.dtype)
        buffer[self.rank].copy_(piece)
        self._arrivals[self.rank * (COUNTER_BYTES // 8)] = count + 1
        for rank in range(self.size):
            self._wait_for(rank)
        return buffer

    def _wait_for(self, rank: int) -> None:
        arrivals, place, count = self._arrivals, rank * (COUNTER_BYTES // 8), self._count
        spins, deadline = 0, None
        while arrivals[place] < count:
            spins += 1
            if spins % _SPINS == 0:
                time.sleep(0)
                now = time.monotonic()
                deadline = deadline or now + self.timeout_seconds
                if now > deadline or self._has_left:
                    raise self.missing(rank)


def open_shared_memory(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> SharedMemory | None:
    """Maps the segment that rank 0 makes, or returns None where this rank cannot see it: another host or container.

    The segment is anonymous: it has no name that a killed process could leave behind. The caller must make sure that
    all ranks use it or none does.
    """
    if not _is_supported():
        return None
    if rank == 0:
        name = f"quadriga-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, _segment_bytes(size))
        store.set("shared-memory", f"{os.getpid()} {descriptor} {name}")
    else:
        pid, number, name = store.get("shared-memory").decode().split()
        path = f"/proc/{pid}/fd/{number}"
        try:
            # The same numbers may mean another file elsewhere; the name is one of a kind.
            if name not in os.readlink(path):
                return None
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
    return SharedMemory(descriptor, rank, size, timeout_seconds)


def _is_supported() -> bool:
    """Plain loads and stores must be ordered as the protocol needs, which x86 does and others need not."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def _segment_bytes(size: int) -> int:
    return size * COUNTER_BYTES + 2 * size * SLOT_BYTES
