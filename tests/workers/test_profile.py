"""No step takes more memory than the one that a worker runs before it gives the rest of a GPU to the KV cache.

Counted are the tensors of the device "meta", which have sizes and no contents, so that a real vocabulary costs nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention.torch_flash import TorchFlashBackend, TorchKernel
from parallel.group import TensorParallelGroup
from scheduler.plan import Extras
from tests.attention import contracts
from tests.models import make_tiny_model
from tests.workers.test_graphs import NUM_BLOCKS, Story, spec
from workers.architecture import read_architecture
from workers.pieces import PIECE_ELEMENTS
from workers.runner import ModelRunner

DEVICE = torch.device("meta")
VOCAB, ROWS = 131_072, 256


class Memory(TorchDispatchMode):
    """most: bytes of the device's tensors that were there at the same time, of those that were made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in known:
                self._see(storage)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(tree)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device == DEVICE]


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    arch = replace(read_architecture(folder), vocab_size=VOCAB)
    return ModelRunner(arch, spec(folder, **changes), TensorParallelGroup(), DEVICE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is nothing to pin it for here
    return make_tiny_model("llama", tmp_path)


def profiled(runner: ModelRunner, num_tokens: int, num_rows: int) -> int:
    with Memory() as memory:
        runner.profile(num_tokens, num_rows)
    return memory.most


def test_what_is_made_and_dropped_counts_at_its_highest() -> None:
    with Memory() as memory:
        kept = torch.zeros(1000, device=DEVICE)
        for _ in range(3):
            again = (kept + 1)[3:].exp()
        assert (memory.now, memory.most) == (4000 + 3988, 4000 + 2 * 4000 + 2 * 3988 - 4000)
        del again
        assert memory.now == 4000


LIMITED = {"temperature": 0.7, "min_p": 0.01, "top_p": 0.9}
ASKED = {
    "sampled": {"temperature": 0.7},
    "top-k": {**LIMITED, "top_k": 1024},
    "large top-k": {**LIMITED, "top_k": 5000},
    "top-p": LIMITED,
}


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_no_step_takes_more_than_the_profiled_one(folder: Path, asked: dict[str, Any], scored: bool) -> None:
    """Steps of chunks, of decodes and of both, all rows of which ask for the same."""
    rows = 6
    runner = make_runner(folder)
    runner.backend = TorchFlashBackend(
        runner.backend.layout, runner.backend.scale, kernel=TorchKernel(contracts.varlen_attn)
    )
    runner.make_cache(NUM_BLOCKS)
    most = profiled(runner, 40, rows)
    story, samples = Story(rows), []
    for budget in (11, 40, 40, 7, 40, 7):
        plan = story.plan(budget)
        extras = lambda tokens: Extras(len(tokens), logprobs=20, prompt_logprobs=20) if scored else None  # noqa: E731
        plan.admissions = [replace(a, **asked, extras=extras(a.tokens)) for a in plan.admissions]
        with Memory() as memory:
            step = runner.launch(plan, 0.0)
        assert memory.most <= most
        samples.append((len(step._tokens), memory.most))
    sampled, taken = max(samples)
    assert sampled == rows
    assert taken > rows * VOCAB * 4  # the logits are among it


def test_a_large_batch_takes_its_logits_a_copy_and_a_piece_more(folder: Path) -> None:
    """256 rows of 131,072 tokens, which would be 256 MiB in fp64 each time."""
    runner = make_runner(folder, num_rows=ROWS, max_num_batched_tokens=2 * ROWS)
    few, many = profiled(runner, 2 * ROWS, 16), profiled(runner, 2 * ROWS, ROWS)
    logits = ROWS * VOCAB * 4
    assert 2 * logits < many < 2 * logits + 8 * PIECE_ELEMENTS * 8
    assert many - few < 2 * (ROWS - 16) * (VOCAB * 4 + 1024 * 8 * 8)
