"""Weights on their way to a device: pages of a mapped file -> one of two pinned buffers -> the device.

    host     | read piece 1 into A | read piece 2 into B | wait for A | read piece 3 into A | ...
    device   |                     | copy A              | copy B     |                     | ...

So the file is read while the device copies, nothing but this rank's slices is touched, and pinned memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

PIECE_BYTES = 64 << 20


class Copy(Protocol):
    """A copy that the device may still be busy with."""

    def synchronize(self) -> None:
        """Returns once it is done."""


class Lane(Protocol):
    """The way to a device. buffers: two, [PIECE_BYTES] uint8."""

    buffers: Sequence[torch.Tensor]

    def start(self, staged: torch.Tensor, target: torch.Tensor) -> Copy:
        """Begins to copy from a buffer to a tensor on the device, of the same shape but maybe another dtype."""


class CudaLane:
    """On the current stream, so that whoever uses the weights next comes after them."""

    def __init__(self) -> None:
        self.buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def start(self, staged: torch.Tensor, target: torch.Tensor) -> Copy:
        # Another dtype is made on the device: made on the way there, it would cost a copy that waits.
        same = staged.dtype == target.dtype
        target.copy_(staged if same else staged.to(target.device, non_blocking=True), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done


class Upload:
    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._flying: list[Copy | None] = [None] * len(lane.buffers)
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """source: on the host, its rows (first dimension) smaller than a buffer. Returns before it is done."""
        rows = max(1, PIECE_BYTES // max(1, source[:1].nbytes))
        for piece, part in zip(source.split(rows), target.split(rows), strict=True):
            self._wait(self._turn)
            staged = self._lane.buffers[self._turn][: piece.nbytes].view(piece.dtype).view(piece.shape)
            staged.copy_(piece)
            self._flying[self._turn] = self._lane.start(staged, part)
            self._turn = (self._turn + 1) % len(self._flying)

    def finish(self) -> None:
        """Returns once all is on the device."""
        for turn in range(len(self._flying)):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        if self._flying[turn] is not None:
            self._flying[turn].synchronize()
            self._flying[turn] = None
