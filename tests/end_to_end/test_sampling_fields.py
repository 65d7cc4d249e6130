"""Penalties, bias and fewest tokens give what a plain computation gives: in company, in chunks, on any ranks."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator

import pytest

from driver.cluster import Cluster
from driver.engine import Update
from driver.llm import LLM
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.running import BUDGETS, Ranks, outputs
from tests.models import VOCAB_SIZE
from tests.reference import answer

LENGTH = 14
PROMPTS = [random.Random(seed).choices(range(40), k=length) for seed, length in ((1, 19), (2, 5), (3, 26))]
ENDS = tuple(range(0, VOCAB_SIZE, 2))
WAYS = {
    "none": {},
    "frequency": {"frequency_penalty": 2.0},
    "frequency_below_0": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 2.0},
    "repetition_below_1": {"repetition_penalty": 0.4},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 1.1, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {7: 9.0, "200": 8.0, 300: -100, 5: 8.5}},
    "stop": {"stop_token_ids": ENDS},
    "min_tokens": {"stop_token_ids": ENDS, "min_tokens": 6},
    "all": {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 5.0, 250: 6.0, 30: 6.0},
        "stop_token_ids": ENDS,
        "min_tokens": 4,
    },
}
CASES = [(way, prompt) for way in WAYS for prompt in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, tiny: TinyModels, ray_cluster: Cluster) -> Iterator[Ranks]:
    ranks = Ranks(tiny.folder("llama"), request.param)
    yield ranks
    ranks.close()


def params(way: str, length: int = LENGTH, **fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": length, "ignore_eos": True, **WAYS[way], **fields})


@pytest.fixture(scope="module")
def expected(tiny: TinyModels) -> list[list[int]]:
    return [answer(tiny.folder("llama"), PROMPTS[prompt], params(way), LENGTH) for way, prompt in CASES]


def test_the_cases_tell_the_fields_apart(expected: list[list[int]]) -> None:
    by_way = {way: [out for (name, _), out in zip(CASES, expected, strict=True) if name == way] for way in WAYS}
    for way in set(WAYS) - {"none"}:
        assert by_way[way] != by_way["none"], way
    assert all(len(out) > 6 for out in by_way["min_tokens"])
    assert any(len(out) < 6 for out in by_way["stop"])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_plain_computation_gives_the_same(ranks: Ranks, expected: list[list[int]], budget: int, depth: int) -> None:
    """All at once, so that every step mixes rows that ask for different things."""
    with ranks.llm(budget, depth) as llm:
        got = outputs(llm, [PROMPTS[prompt] for _, prompt in CASES], [params(way) for way, _ in CASES])
    assert got == expected


def test_preemption_and_cached_prefixes_change_nothing(ranks: Ranks, expected: list[list[int]]) -> None:
    prompts, asked = [PROMPTS[prompt] for _, prompt in CASES], [params(way) for way, _ in CASES]
    with ranks.llm(budget=24, num_blocks=26, prefix_caching=True) as llm:
        first, again = outputs(llm, prompts, asked), outputs(llm, prompts, asked)
        stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["cached_tokens"] > 0
    assert first == expected
    assert again == expected


@pytest.mark.parametrize("way", ["penalties", "bias", "min_tokens"])
def test_random_rows_are_adjusted_alike_alone_and_in_company(ranks: Ranks, tiny: TinyModels, way: str) -> None:
    fields = [{"temperature": 1.2, "seed": 5}, {"temperature": 0.9, "seed": 6, "top_k": 30, "top_p": 0.95}]
    asked = [params(way, **field) for field in fields]
    with ranks.llm(depth=0) as llm:
        alone = [outputs(llm, [PROMPTS[0]], one)[0] for one in asked]
    with ranks.llm(budget=9) as llm:
        crowd = [params("none", temperature=1.0, seed=9), params("all"), *asked]
        assert outputs(llm, [PROMPTS[1], PROMPTS[2], PROMPTS[0], PROMPTS[0]], crowd, staggered=True)[2:] == alone


def test_what_was_produced_before_counts_as_output(ranks: Ranks, tiny: TinyModels, expected: list[list[int]]) -> None:
    """As after a driver's restart: the prompt comes again with the tokens that its first run gave."""
    with ranks.llm() as llm:
        for (way, prompt), whole in zip(CASES, expected, strict=True):
            if len(whole) > 5:
                assert continued(llm, PROMPTS[prompt], params(way), whole[:5]) == whole[5:], way


def continued(llm: LLM, prompt: list[int], one: SamplingParams, produced: list[int]) -> list[int]:
    request = llm.prepare(prompt, one, produced)
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
    llm.submit(request, updates.put)
    tokens, ended = [], False
    while not ended:
        update = updates.get(timeout=60)
        tokens += update.token_ids
        ended = update.finish_reason is not None
    return tokens


def test_a_bias_outside_the_vocabulary_is_refused_and_others_go_on(ranks: Ranks, tiny: TinyModels) -> None:
    good, bad = params("none"), params("none", logit_bias={VOCAB_SIZE: 1})
    with ranks.llm() as llm:
        answers = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], [good, bad, good], use_tqdm=False)
    assert answers[0].output_token_ids == answers[2].output_token_ids
    assert len(answers[0].output_token_ids) == LENGTH
    assert "301 is outside the vocabulary of 301" in str(answers[1].error)
