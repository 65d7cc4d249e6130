"""A worker's start: what ranks must agree on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel.group import TensorParallelGroup
from tests.models import make_tiny_model
from tests.workers.recording import Recorder
from tests.workers.test_graphs import spec
from workers.architecture import read_architecture
from workers.runner import ModelRunner
from workers.worker import BlocksDiffer, CacheTooSmall, Worker


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


class Gpu:
    """Memory in bytes: what torch holds, what its largest step took besides, and what others hold."""

    def __init__(self, total: int, held: int, step: int, others: int) -> None:
        self.total, self.held, self.step, self.others = total, held, step, others

    def take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "reset_peak_memory_stats": None,
            "synchronize": None,
            "empty_cache": None,
            "memory_allocated": self.held,
            "memory_reserved": self.held,
            "max_memory_allocated": self.held + self.step,
            "mem_get_info": (self.total - self.held - self.others, self.total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    folder = make_tiny_model("llama", tmp_path)
    worker = Worker(spec(folder, num_kv_blocks=None, max_num_batched_tokens=40, gpu_memory_utilization=0.8))
    worker.runner = ModelRunner(read_architecture(folder), worker.spec, TensorParallelGroup(), worker.device)
    worker.runner.load(folder)
    return worker


@pytest.mark.parametrize("captured", [False, True])
def test_the_cache_gets_what_weights_activations_graphs_and_others_leave(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    Gpu(total=10_000_000, held=1_000_000, step=400_000, others=250_000).take(monkeypatch)
    worker.runner.graph_maker = Recorder() if captured else None
    worker.runner.graph_sizes = SimpleNamespace(most_tokens=10)
    left = 8_000_000 - 1_000_000 - 400_000 - 250_000
    if captured:  # a quarter of the largest step, and a block for padding
        left -= 100_000 + worker.runner.cache_shape.bytes_per_block
    assert worker._free_gpu_bytes() == left
    assert worker._activation_bytes == 400_000
    worker.spec = SimpleNamespace(**{name: getattr(worker.spec, name) for name in worker.spec.__slots__})
    worker.spec.device, worker.spec.num_rows = "cuda", 10_000
    assert worker._affordable_blocks() == left // worker.runner.cache_shape.bytes_per_block


def test_a_gpu_without_room_for_a_block_is_refused(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(total=10_000_000, held=7_500_000, step=400_000, others=250_000).take(monkeypatch)
    worker.spec = SimpleNamespace(**{name: getattr(worker.spec, name) for name in worker.spec.__slots__})
    worker.spec.device = "cuda"
    with pytest.raises(CacheTooSmall, match="-150000 bytes are left for the KV cache"):
        worker._affordable_blocks()
