"""Weights on their way to a device, through two buffers, where copies are late: what nobody waited for shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel import upload
from parallel.loader import SINGLE_FILE, Checkpoint
from parallel.upload import Upload

PIECE = 256


class LateCopy:
    """Happens only when somebody waits for it, or for a later one: copies are in order."""

    def __init__(self, lane: LateLane, staged: torch.Tensor, target: torch.Tensor) -> None:
        self.lane, self.staged, self.target, self.is_done = lane, staged, target, False

    def synchronize(self) -> None:
        while not self.is_done:
            self.lane.next()


class LateLane:
    """most: copies that were on their way at once."""

    def __init__(self) -> None:
        self.buffers = [torch.empty(PIECE, dtype=torch.uint8) for _ in range(2)]
        self.queue: list[LateCopy] = []
        self.most = 0

    def start(self, staged: torch.Tensor, target: torch.Tensor) -> LateCopy:
        assert staged.untyped_storage().data_ptr() in {buffer.data_ptr() for buffer in self.buffers}
        copy = LateCopy(self, staged, target)
        self.queue.append(copy)
        self.most = max(self.most, len(self.queue))
        return copy

    def next(self) -> None:
        copy = self.queue.pop(0)
        copy.target.copy_(copy.staged)
        copy.is_done = True


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE_BYTES", PIECE)


SOURCES = {
    "many pieces": torch.randn(100, 12, generator=torch.Generator().manual_seed(0)),
    "one piece": torch.randn(2, 12, generator=torch.Generator().manual_seed(1)),
    "columns": torch.randn(40, 30, generator=torch.Generator().manual_seed(2))[:, 7:20],
    "vector": torch.arange(300, dtype=torch.int32),
    "bf16": torch.randn(90, 16, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "no rows": torch.empty(0, 12),
    "no columns": torch.empty(9, 0),
}


def test_everything_arrives_and_two_pieces_are_on_their_way_at_once() -> None:
    lane = LateLane()
    uploads = Upload(lane)
    targets = {name: torch.full(source.shape, -1.0).to(source.dtype) for name, source in SOURCES.items()}
    for name, source in SOURCES.items():
        uploads.copy(source, targets[name])
    assert lane.most == 2
    uploads.finish()
    assert not lane.queue
    for name, source in SOURCES.items():
        assert torch.equal(targets[name], source), name


def test_without_the_wait_it_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCopy, "synchronize", lambda copy: None)
    lane = LateLane()
    source, target = SOURCES["many pieces"], torch.zeros(100, 12)
    Upload(lane).copy(source, target)
    while lane.queue:
        lane.next()
    assert not torch.equal(target, source)


def test_another_dtype_is_made_on_the_way() -> None:
    target = torch.zeros(100, 12, dtype=torch.bfloat16)
    uploads = Upload(LateLane())
    uploads.copy(SOURCES["many pieces"], target)
    uploads.finish()
    assert torch.equal(target, SOURCES["many pieces"].bfloat16())


def test_a_checkpoint_is_finished_only_when_all_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the CPU it copies at once, and does not bother the lane."""
    save_file({"a": SOURCES["many pieces"]}, tmp_path / SINGLE_FILE)
    lane = LateLane()
    with Checkpoint(tmp_path, Upload(lane)) as checkpoint:
        here = torch.zeros(50, 12)
        checkpoint.copy(checkpoint.read("a", (100, 12), {0: range(50, 100)}), here)
        assert lane.most == 0
        assert torch.equal(here, SOURCES["many pieces"][50:])
        monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: torch.device("cuda")))
        there = torch.zeros(50, 12)
        checkpoint.copy(checkpoint.read("a", (100, 12), {0: range(50)}), there)
        assert len(lane.queue) == 2
        checkpoint.finish()
        monkeypatch.undo()
    assert torch.equal(there, SOURCES["many pieces"][:50])
