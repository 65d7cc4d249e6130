"""Memory in large pages: pieces that do not overlap, aligned, and as long-lived as their tensors."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from attention import memory
from attention.memory import LargePages


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    pages = LargePages()
    pieces = [pages.allocate(size) for size in (1, 63, 64, 65, 0, 1000, memory._RESERVED, 3)]
    for i, piece in enumerate(pieces):
        assert piece.dtype == torch.uint8
        assert piece.data_ptr() % 64 == 0
        piece.fill_(i)
    assert [len(piece) for piece in pieces] == [1, 63, 64, 65, 0, 1000, memory._RESERVED, 3]
    for i, piece in enumerate(pieces):
        assert (piece == i).all()


def test_small_pieces_share_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, reserve = [], memory._reserve
    monkeypatch.setattr(memory, "_reserve", lambda size: reserved.append(size) or reserve(size))
    pages = LargePages()
    for _ in range(100):
        pages.allocate(4096)
    assert reserved == [memory._RESERVED]


def test_a_piece_outlives_the_pages_it_came_from() -> None:
    piece = LargePages().allocate(4096)
    piece.fill_(7)
    gc.collect()
    assert (piece == 7).all()


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert len(LargePages().allocate(100).fill_(1)) == 100
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(LargePages().allocate(100).fill_(1)) == 100
