"""Every covered architecture against transformers, token for token, at any chunk size, TP size, depth and timing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from driver.cluster import Cluster
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.running import BUDGETS, UNLIMITED, Ranks, outputs
from tests.models import KINDS

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = [random.Random(length).choices(range(300), k=length) for length in (1, 6, 21, 40)]
ON_RAY = {2: ("llama", "qwen2"), 3: ("qwen3", "smollm3")}


def expected(tiny: TinyModels, kind: str) -> list[list[int]]:
    return [tiny.greedy(kind, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=KINDS)
def one_rank(request: pytest.FixtureRequest, tiny: TinyModels) -> Iterator[tuple[str, Ranks]]:
    ranks = Ranks(tiny.folder(request.param))
    yield request.param, ranks
    ranks.close()


@pytest.fixture(scope="module", params=[(size, kind) for size, kinds in ON_RAY.items() for kind in kinds])
def several_ranks(
    request: pytest.FixtureRequest, tiny: TinyModels, ray_cluster: Cluster
) -> Iterator[tuple[str, Ranks]]:
    size, kind = request.param
    ranks = Ranks(tiny.folder(kind), size)
    assert {ready.transport for ready in ranks.ready} == {"shared memory"}
    yield kind, ranks
    ranks.close()


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("budget", BUDGETS)
class TestGreedy:
    def test_one_rank(
        self, one_rank: tuple[str, Ranks], tiny: TinyModels, budget: int, depth: int, staggered: bool
    ) -> None:
        kind, ranks = one_rank
        with ranks.llm(budget, depth) as llm:
            assert outputs(llm, PROMPTS, GREEDY, staggered) == expected(tiny, kind)
            check_chunking(llm.stats(), budget)

    def test_several_ranks(
        self, several_ranks: tuple[str, Ranks], tiny: TinyModels, budget: int, depth: int, staggered: bool
    ) -> None:
        kind, ranks = several_ranks
        with ranks.llm(budget, depth) as llm:
            assert outputs(llm, PROMPTS, GREEDY, staggered) == expected(tiny, kind)
            check_chunking(llm.stats(), budget)


def check_chunking(stats: dict, budget: int) -> None:
    """The prompts really were cut, or really were not."""
    assert stats["prefill_tokens"] == sum(map(len, PROMPTS))
    if budget < UNLIMITED:
        assert stats["prefill_frames"] >= stats["prefill_tokens"] / budget
    else:
        assert stats["prefill_frames"] <= len(PROMPTS)


@pytest.mark.parametrize("depth", [0, 2])
def test_preemption_changes_nothing(one_rank: tuple[str, Ranks], tiny: TinyModels, depth: int) -> None:
    kind, ranks = one_rank
    prompts = [PROMPTS[2], PROMPTS[2][:9], PROMPTS[2][:13], PROMPTS[1]]
    with ranks.llm(budget=16, depth=depth, num_blocks=12) as llm:
        got = outputs(llm, prompts, GREEDY)
        assert llm.stats()["preemptions"] > 0
        assert llm.stats()["kv_blocks_free"] == 12
    assert got == [tiny.greedy(kind, prompt, MAX_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("budget", BUDGETS)
def test_cached_prefixes_change_nothing(one_rank: tuple[str, Ranks], tiny: TinyModels, budget: int) -> None:
    kind, ranks = one_rank
    prompts = [PROMPTS[3][:length] for length in (40, 32, 33, 9, 40)]
    with ranks.llm(budget, prefix_caching=True) as llm:
        cold = llm.generate(prompts[0], GREEDY)
        warm = llm.generate(prompts, GREEDY)
    assert cold.cached_tokens == 0
    assert [completion.cached_tokens for completion in warm] == [36, 28, 32, 8, 36]
    assert cold.output_token_ids == warm[0].output_token_ids
    assert [c.output_token_ids for c in warm] == [tiny.greedy(kind, prompt, MAX_TOKENS) for prompt in prompts]


def test_prompts_computed_whole_and_first_give_the_same(one_rank: tuple[str, Ranks], tiny: TinyModels) -> None:
    kind, ranks = one_rank
    with ranks.llm(chunked_prefill=False) as llm:
        assert outputs(llm, PROMPTS, GREEDY, staggered=True) == expected(tiny, kind)
