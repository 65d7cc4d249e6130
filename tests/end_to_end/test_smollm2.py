"""The real model on the real thing: SmolLM2 against transformers' greedy generate in fp32, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.cluster import Cluster
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import SMOLLM2_TOKENS
from tests.end_to_end.running import UNLIMITED, Ranks, outputs

Expected = list[tuple[list[int], list[int]]]
GREEDY = SamplingParams(temperature=0, max_tokens=SMOLLM2_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def one_rank(smollm2: Path) -> Iterator[Ranks]:
    ranks = Ranks(smollm2, block_size=16)
    yield ranks
    ranks.close()


def check(ranks: Ranks, expected: Expected, budget: int, depth: int, staggered: bool, longest: int) -> None:
    """Runs the prompts of up to `longest` tokens and compares."""
    chosen = [(prompt, tokens) for prompt, tokens in expected if len(prompt) <= longest]
    with ranks.llm(budget, depth) as llm:
        got = outputs(llm, [prompt for prompt, _ in chosen], GREEDY, staggered)
        assert llm.stats()["prefill_frames"] >= sum(len(prompt) for prompt, _ in chosen) / budget
    assert got == [tokens for _, tokens in chosen]


@pytest.mark.parametrize(
    ("budget", "depth", "staggered", "longest"),
    [(UNLIMITED, 0, False, 2000), (64, 2, True, 2000), (7, 2, False, 100), (7, 0, True, 20), (1, 2, False, 6)],
)
def test_one_rank(
    one_rank: Ranks, smollm2_expected: Expected, budget: int, depth: int, staggered: bool, longest: int
) -> None:
    check(one_rank, smollm2_expected, budget, depth, staggered, longest)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_the_model(smollm2: Path, smollm2_expected: Expected, ray_cluster: Cluster, size: int) -> None:
    ranks = Ranks(smollm2, size, block_size=16)
    try:
        check(ranks, smollm2_expected, UNLIMITED, 2, True, 100)
        check(ranks, smollm2_expected, 64, 0, False, 2000)
        check(ranks, smollm2_expected, 7, 2, False, 20)
    finally:
        ranks.close()


@pytest.mark.parametrize("size", [4, 5])
def test_more_ranks_than_kv_heads(smollm2: Path, smollm2_expected: Expected, ray_cluster: Cluster, size: int) -> None:
    ranks = Ranks(smollm2, size, block_size=16)
    try:
        check(ranks, smollm2_expected, 64, 2, False, 100)
    finally:
        ranks.close()


def test_one_rank_on_ray(smollm2: Path, smollm2_expected: Expected, ray_cluster: Cluster) -> None:
    ranks = Ranks(smollm2, 1, executor="ray", block_size=16)
    try:
        check(ranks, smollm2_expected, 64, 2, False, 20)
    finally:
        ranks.close()
