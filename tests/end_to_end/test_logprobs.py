"""Log probabilities against transformers', for outputs and prompts, however the prompt was computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.cluster import Cluster
from driver.llm import LLM
from driver.results import Completion, TokenLogprobs
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.running import BUDGETS, Ranks
from tests.reference import all_logits

LENGTHS = (1, 7, 8, 9, 16, 17, 21)
PROMPTS = [random.Random(length).choices(range(300), k=length) for length in LENGTHS]
WIDTHS = (0, 3, 20)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, tiny: TinyModels, ray_cluster: Cluster) -> Iterator[Ranks]:
    ranks = Ranks(tiny.folder("llama"), request.param)
    yield ranks
    ranks.close()


def params(width: int | None = 3, prompt_width: int | None = 3, **fields: object) -> SamplingParams:
    defaults = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return SamplingParams(**{**defaults, **fields}, logprobs=width, prompt_logprobs=prompt_width)


def generate(llm: LLM, prompts: list[list[int]], asked: list[SamplingParams]) -> list[Completion]:
    return llm.generate(prompts, asked, use_tqdm=False)


def check(folder: Path, completion: Completion, asked: SamplingParams) -> None:
    """Every entry against the reference; nothing is missing, and nothing comes twice."""
    prompt, output = completion.prompt_token_ids, completion.output_token_ids
    assert (completion.logprobs is None) == (asked.logprobs is None)
    assert (completion.prompt_logprobs is None) == (asked.prompt_logprobs is None)
    if asked.logprobs is not None:
        check_entries(folder, prompt + output, len(prompt), completion.logprobs, asked.logprobs)
        assert len(completion.logprobs) == len(output)
    if asked.prompt_logprobs is not None:
        assert completion.prompt_logprobs[0] is None
        assert len(completion.prompt_logprobs) == len(prompt)
        check_entries(folder, prompt, 1, completion.prompt_logprobs[1:], asked.prompt_logprobs)


def check_entries(folder: Path, ids: list[int], first: int, entries: list[TokenLogprobs], width: int) -> None:
    expected = all_logits(folder, ids).log_softmax(-1)
    for at, entry in enumerate(entries, first):
        assert entry.token_id == ids[at]
        assert entry.logprob == pytest.approx(float(expected[at - 1, ids[at]]), abs=2e-3)
        values, top_ids = expected[at - 1].topk(width)
        assert [token_id for token_id, _ in entry.top] == top_ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=2e-3)


@pytest.mark.parametrize("budget", [8, *BUDGETS])
@pytest.mark.parametrize("depth", [0, 2])
def test_they_are_those_of_transformers(ranks: Ranks, tiny: TinyModels, budget: int, depth: int) -> None:
    """Rows that ask for more, fewer and no log probabilities share all steps, and sampled ones are told of too."""
    asked = [params(WIDTHS[at % 3], WIDTHS[(at + 1) % 3]) for at in range(len(PROMPTS))]
    asked[3] = params(None, 2)
    asked[4] = params(2, None, temperature=1.2, seed=3, repetition_penalty=1.4, top_k=50)
    asked[5] = params(None, None)
    with ranks.llm(budget, depth) as llm:
        got = generate(llm, PROMPTS, asked)
    for completion, one in zip(got, asked, strict=True):
        check(tiny.folder("llama"), completion, one)


def test_preemption_loses_and_doubles_none(ranks: Ranks, tiny: TinyModels) -> None:
    asked = [params(2, 1, max_tokens=14)] * len(PROMPTS)
    with ranks.llm(budget=8, num_blocks=14) as llm:
        got = generate(llm, PROMPTS, asked)
        assert llm.stats()["preemptions"] > 0
    for completion, one in zip(got, asked, strict=True):
        check(tiny.folder("llama"), completion, one)


def test_a_cached_prompt_is_computed_again_only_for_those_who_ask(ranks: Ranks, tiny: TinyModels) -> None:
    prompt = PROMPTS[-1]
    with ranks.llm(budget=8, prefix_caching=True) as llm:
        for one, cached in ((params(2, None), 0), (params(2, None), 20), (params(2, 2), 0), (params(None, None), 20)):
            (completion,) = generate(llm, [prompt], [one])
            assert completion.cached_tokens == cached
            check(tiny.folder("llama"), completion, one)


def test_the_schedule_is_the_same_with_and_without(ranks: Ranks) -> None:
    steps = []
    for one in (params(None, None), params(20, 20)):
        with ranks.llm(budget=8) as llm:
            generate(llm, PROMPTS[-1:], [one])
            stats = llm.stats()
            steps.append((stats["steps"], stats["prefill_tokens"], stats["decode_tokens"]))
    assert steps[0] == steps[1]
    assert steps[0] == (3 + 7, 21, 7)


def test_a_stream_carries_them_with_their_tokens(ranks: Ranks, tiny: TinyModels) -> None:
    one = params(2, 1)
    with ranks.llm(budget=8) as llm:
        pieces = list(llm.stream(PROMPTS[-1], one))
    told = [piece for piece in pieces if piece.prompt_logprobs is not None]
    assert told == pieces[:1]
    assert len(pieces) == one.max_tokens  # a chunk that ends inside the prompt says nothing
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    whole = Completion(None, PROMPTS[-1], [token for piece in pieces for token in piece.token_ids])
    whole.logprobs = [entry for piece in pieces for entry in piece.logprobs]
    whole.prompt_logprobs = told[0].prompt_logprobs
    check(tiny.folder("llama"), whole, one)


def test_a_request_may_end_at_any_token(ranks: Ranks, tiny: TinyModels) -> None:
    """Cut off while its log probabilities are under way; a neighbour gets all of its own."""
    with ranks.llm(budget=8) as llm:
        for count in range(5):
            stream, neighbour = llm.stream(PROMPTS[-1], params(5, 5, max_tokens=40)), llm.stream(PROMPTS[4], params())
            for _ in range(count):
                next(stream)
            stream.close()
            pieces = list(neighbour)
            whole = Completion(None, PROMPTS[4], [token for piece in pieces for token in piece.token_ids])
            whole.logprobs = [entry for piece in pieces for entry in piece.logprobs]
            whole.prompt_logprobs = pieces[0].prompt_logprobs
            check(tiny.folder("llama"), whole, params())
        scheduler = llm._engine.scheduler
        generate(llm, PROMPTS[:1], [params()])
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
