"""A worker's start: what ranks must agree on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.workers.test_graphs import spec
from workers.worker import BlocksDiffer, Worker


class Ranks:
    """A group whose other rank chose blocks of another size."""

    def __init__(self, other: int) -> None:
        self.other = other

    def smallest(self, value: int, device: object) -> int:
        return min(value, self.other if value > 0 else -self.other)


@pytest.mark.parametrize("other", [16, 256, 512])
def test_ranks_whose_backends_chose_other_blocks_are_refused(tmp_path, other: int) -> None:
    worker = Worker(spec(tmp_path))
    worker.group = Ranks(other)
    worker.runner = SimpleNamespace(rows=SimpleNamespace(block_size=256), backend=SimpleNamespace(name="flash_attn"))
    if other == 256:
        worker._agree_on_blocks()
        return
    low, high = sorted((256, other))
    with pytest.raises(
        BlocksDiffer, match=f"flash_attn takes blocks of 256 tokens, but the ranks' range from {low} to {high}"
    ):
        worker._agree_on_blocks()
