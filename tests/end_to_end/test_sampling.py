"""The same seed gives the same tokens: alone, in a crowd, at any chunk size, depth, TP size, and after preemption."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from driver.cluster import Cluster
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.running import BUDGETS, Ranks, outputs
from tests.models import load_reference

PROMPT = random.Random(3).choices(range(300), k=19)
CROWD = [random.Random(length).choices(range(300), k=length) for length in (3, 11, 26)]
WAYS = {
    "plain": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 12},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, tiny: TinyModels, ray_cluster: Cluster) -> Iterator[Ranks]:
    ranks = Ranks(tiny.folder("llama"), request.param)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alone(tiny: TinyModels) -> dict[str, list[int]]:
    """What each way of sampling gives one request alone, on one rank, in one chunk."""
    ranks = Ranks(tiny.folder("llama"))
    try:
        with ranks.llm(depth=0) as llm:
            return {way: outputs(llm, [PROMPT], params(way))[0] for way in WAYS}
    finally:
        ranks.close()


def params(way: str, seed: int = 11) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=seed, ignore_eos=True, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_neighbours_chunks_and_ranks_change_nothing(
    ranks: Ranks, alone: dict[str, list[int]], way: str, budget: int
) -> None:
    others = [SamplingParams(temperature=0, max_tokens=9), params("plain", 5), params("top_p", 6)]
    for depth, staggered in ((0, False), (2, True)):
        with ranks.llm(budget, depth) as llm:
            got = outputs(llm, [*CROWD, PROMPT], [*others, params(way)], staggered)
        assert got[-1] == alone[way]


@pytest.mark.parametrize("way", WAYS)
def test_preemption_changes_nothing(ranks: Ranks, alone: dict[str, list[int]], way: str) -> None:
    with ranks.llm(budget=16, num_blocks=13) as llm:
        got = outputs(llm, [CROWD[0], CROWD[2], PROMPT], [params("plain", 5), params("top_p", 6), params(way)])
        assert llm.stats()["preemptions"] > 0
    assert got[-1] == alone[way]


def test_other_seeds_give_other_tokens(ranks: Ranks, alone: dict[str, list[int]]) -> None:
    with ranks.llm() as llm:
        got = outputs(llm, [PROMPT] * 4, [params("plain", seed) for seed in (1, 2, 3, 11)])
        fresh = [SamplingParams(temperature=1.3, max_tokens=12)] * 3
        unseeded = outputs(llm, [PROMPT] * 3, fresh)
    assert len({tuple(tokens) for tokens in got}) == 4
    assert got[3] == alone["plain"]
    assert len({tuple(tokens) for tokens in unseeded}) == 3


def test_sampled_tokens_follow_the_model_and_truncation_is_kept(tiny: TinyModels) -> None:
    """First tokens of many seeds against the probabilities that transformers gives."""
    draws = 1500
    with torch.inference_mode():
        logits = load_reference(tiny.folder("llama"))(torch.tensor([PROMPT])).logits[0, -1].double()
    probabilities = (logits / 2.0).softmax(-1)
    allowed = set(logits.topk(5).indices.tolist())
    ranks = Ranks(tiny.folder("llama"))
    try:
        with ranks.llm() as llm:
            plain = [SamplingParams(temperature=2.0, max_tokens=1, seed=seed) for seed in range(draws)]
            first = [tokens[0] for tokens in outputs(llm, [PROMPT] * draws, plain)]
            cut = [SamplingParams(temperature=2.0, max_tokens=1, seed=seed, top_k=5) for seed in range(200)]
            few = [tokens[0] for tokens in outputs(llm, [PROMPT] * 200, cut)]
    finally:
        ranks.close()
    for token in probabilities.topk(4).indices.tolist():
        expected = float(probabilities[token]) * draws
        assert abs(first.count(token) - expected) < 4 * expected**0.5  # four standard deviations
    assert set(few) <= allowed
    assert len(set(few)) > 1
