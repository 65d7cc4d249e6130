"""Logits of the last position against transformers in fp32, however the prompt was cut and split over ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from parallel.group import TensorParallelGroup
from tests.end_to_end.chunked import NUM_BLOCKS, last_logits_of
from tests.end_to_end.conftest import TinyModels
from tests.models import KINDS, VOCAB_SIZE, last_logits
from tests.ranks import run_ranks
from workers.architecture import read_architecture
from workers.runner import ModelRunner
from workers.spec import WorkerSpec

BLOCK = 4
PROMPT = random.Random(9).choices(range(300), k=37)


def logits_in_chunks(folder: Path, prompt: list[int], chunk_size: int, group: TensorParallelGroup) -> torch.Tensor:
    """[vocabulary] logits after the prompt, computed chunk by chunk, every rank's part put together."""
    spec = WorkerSpec(
        model=str(folder),
        rank=group.rank,
        size=group.size,
        device="cpu",
        dtype="float32",
        attention_backend="auto",
        block_size=BLOCK,
        num_rows=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        kv_cache_bytes=None,
        num_kv_blocks=NUM_BLOCKS,
        gpu_memory_utilization=0.9,
        start_timeout_seconds=10,
        step_timeout_seconds=10,
    )
    runner = ModelRunner(read_architecture(folder), spec, group, torch.device("cpu"))
    return last_logits_of(runner, folder, prompt, chunk_size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_transformers(tiny: TinyModels, kind: str, size: int) -> None:
    folder = tiny.folder(kind)
    expected = last_logits(folder, PROMPT)
    for chunk_size in (1, 7, 64):
        for logits in run_ranks(size, lambda group, cut=chunk_size: logits_in_chunks(folder, PROMPT, cut, group)):
            assert logits.shape == (VOCAB_SIZE,)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_logits_of_the_real_model_match_transformers(
    smollm2: Path, smollm2_expected: list[tuple[list[int], list[int]]], size: int
) -> None:
    for prompt, _ in smollm2_expected[1:4]:
        expected = last_logits(smollm2, prompt)
        for logits in run_ranks(size, lambda group, ids=prompt: logits_in_chunks(smollm2, ids, 5, group)):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
