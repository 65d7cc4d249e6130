"""Guided outputs match their guides, and are what the model likes best among what matches, in any company."""

from __future__ import annotations

import itertools
import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from driver.cluster import Cluster
from driver.llm import LLM
from driver.results import Completion
from scheduler.params import InvalidRequest, SamplingParams
from tests.end_to_end.running import BUDGETS, Ranks, outputs
from tests.models import END, END_ID, make_byte_tokenizer, make_tiny_model
from tests.reference import all_logits

LENGTH = 60
PROMPT, OTHER = list(b"The sea is wide"), list(b"Name three rivers, and be quick about it.")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "yesterday", "no", 'a "b"\\\n', "nö"]
# Guides with few outputs, all of which are listed.
LISTED = {
    "choice": ({"choice": CHOICES}, CHOICES),
    "regex": ({"regex": "[a-c]{2}(x|yz)?"}, [a + b + c for a in "abc" for b in "abc" for c in ("", "x", "yz")]),
    "grammar": (
        {"grammar": 'start: "(" start ")" | /[uvw]/ "-"'},
        ["(" * n + x + "-" + ")" * n for n in range(40) for x in "uvw"],
    ),
}
GUIDES = {
    **{name: guide for name, (guide, _) in LISTED.items()},
    "schema": {"json_schema": SCHEMA},
    "object": {"json_object": True},
}
TOO_COMPLEX = {"regex": "(a?){3000}a{3000}"}  # behind the first token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), eos_token_id=END_ID)
    return make_byte_tokenizer(folder, END)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, folder: Path, ray_cluster: Cluster) -> Iterator[Ranks]:
    ranks = Ranks(folder, request.param)
    yield ranks
    ranks.close()


def params(name: str | None, **fields: object) -> SamplingParams:
    defaults = {"temperature": 0, "max_tokens": LENGTH, "guide": GUIDES[name] if name else None}
    return SamplingParams(**{**defaults, **fields})


def likeliest(folder: Path, prompt: list[int], listed: list[str], fewest: int = 0) -> list[int]:
    """The greedy output among the listed texts, byte by byte. Before `fewest` tokens it ends only if it must."""
    texts, output = [text.encode() for text in listed], b""
    while True:
        scores = all_logits(folder, prompt + list(output))[-1]
        allowed = {text[len(output)] for text in texts if text.startswith(output) and len(text) > len(output)}
        if output in texts and (len(output) >= fewest or not allowed):
            allowed.add(END_ID)
        best = max(allowed, key=lambda token: float(scores[token]))
        if best == END_ID:
            return [*output, END_ID]
        output += bytes([best])


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return {name: likeliest(folder, PROMPT, listed) for name, (_, listed) in LISTED.items()}


def check(name: str, completion: Completion) -> None:
    text, done = completion.text, completion.finish_reason == "stop"
    assert completion.error is None
    if done:
        assert completion.stop_reason == END_ID
        assert completion.output_token_ids[-1] == END_ID
    if name in LISTED:
        assert done
        assert text in LISTED[name][1]
    elif done:
        jsonschema.validate(json.loads(text), SCHEMA if name == "schema" else {"type": "object"})
    else:
        assert text.startswith("{")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("depth", [0, 2])
def test_the_likeliest_output_that_fits(ranks: Ranks, expected: dict[str, list[int]], budget: int, depth: int) -> None:
    names = [*GUIDES, None]
    with ranks.llm(budget, depth) as llm:
        alone = llm.generate(PROMPT, params(None))
        together = llm.generate([PROMPT] * len(names), [params(name) for name in names], use_tqdm=False)
    for name, completion in zip(names[:-1], together, strict=False):
        check(name, completion)
        if name in expected:
            assert completion.output_token_ids == expected[name], name
    assert together[-1].output_token_ids == alone.output_token_ids


def test_sampled_outputs_fit_and_do_not_depend_on_company(ranks: Ranks) -> None:
    ways = [{"temperature": 1.0, "seed": 3}, {"temperature": 1.5, "seed": 4, "top_k": 20}]
    asked = [(name, params(name, **way)) for name, way in itertools.product(GUIDES, ways)]
    with ranks.llm(depth=0) as llm:
        alone = [llm.generate(PROMPT, one) for _, one in asked]
    with ranks.llm(budget=9) as llm:
        crowd = outputs(llm, [OTHER, *[PROMPT] * len(asked)], [params(None), *(one for _, one in asked)], True)
    for (name, _), completion, tokens in zip(asked, alone, crowd[1:], strict=True):
        check(name, completion)
        assert tokens == completion.output_token_ids
    assert len({tuple(completion.output_token_ids) for completion in alone}) > len(GUIDES)


def test_preemption_and_a_new_start_change_nothing(ranks: Ranks) -> None:
    names = list(GUIDES)
    with ranks.llm() as llm:
        whole = outputs(llm, [PROMPT] * len(names), [params(name) for name in names])
        for name, tokens in zip(names, whole, strict=True):
            for cut in (1, len(tokens) // 2, len(tokens) - 1):
                updates, got, ended = queue.SimpleQueue(), [], False
                llm.submit(llm.prepare(PROMPT, params(name), tokens[:cut]), updates.put)
                while not ended:
                    update = updates.get(timeout=60)
                    ended, got = update.finish_reason is not None, got + update.token_ids
                assert tokens[:cut] + got == tokens
    with ranks.llm(budget=16, num_blocks=20) as llm:
        assert outputs(llm, [PROMPT] * 2 * len(names), [params(name) for name in names] * 2) == whole * 2
        assert llm.stats()["preemptions"] > 0


def test_penalties_come_before_the_guide_and_fewest_tokens_within_it(ranks: Ranks, folder: Path) -> None:
    pushed = {"logit_bias": {ord("n"): 100, END_ID: 50}}
    with ranks.llm() as llm:
        assert llm.generate(PROMPT, params("choice", **pushed)).text in ("no", "nö")
        short = llm.generate(PROMPT, params("choice", logit_bias={ord("y"): 100, END_ID: 100}))
        longer = llm.generate(PROMPT, params("choice", logit_bias={ord("y"): 100, END_ID: 100}, min_tokens=5))
        impossible = llm.generate(PROMPT, params("choice", logit_bias={ord("y"): 100, END_ID: 100}, min_tokens=20))
    assert short.text == "yes"
    assert longer.text == impossible.text == "yesterday"


def test_a_guides_end_is_the_end(ranks: Ranks, expected: dict[str, list[int]]) -> None:
    with ranks.llm() as llm:
        completion = llm.generate(PROMPT, params("choice", ignore_eos=True, logprobs=1))
    assert completion.output_token_ids == expected["choice"]
    assert (completion.finish_reason, len(completion.logprobs)) == ("stop", len(expected["choice"]))


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        ({"regex": "[a-c{3}"}, "unclosed character class"),
        ({"json_schema": {"type": "objekt"}}, "objekt"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater than maximum"),
        ({"json_schema": {"type": "object", "not": {"required": ["a"]}}}, "not"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ],
)
def test_a_bad_guide_is_refused_with_its_reason_before_anything_runs(
    folder: Path, guide: dict[str, object], reason: str
) -> None:
    llm = LLM(str(folder), start=False, executor="inline", device="cpu")
    with pytest.raises(InvalidRequest, match=f"guide's {next(iter(guide))} cannot be used: (.|\n)*{reason}"):
        llm.check(PROMPT, params(None, guide=guide))


def test_models_that_cannot_be_guided_say_why(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    with pytest.raises(InvalidRequest, match="a guide needs a tokenizer"):
        LLM(str(folder), start=False, executor="inline", device="cpu").check(PROMPT, params("regex"))
    make_byte_tokenizer(folder)
    with pytest.raises(InvalidRequest, match="names no end token"):
        LLM(str(folder), start=False, executor="inline", device="cpu").check(PROMPT, params("regex"))


def test_a_guide_that_grows_too_complex_ends_its_own_request_alone(ranks: Ranks) -> None:
    with ranks.llm() as llm:
        alone = llm.generate(OTHER, params(None))
        good, bad, guided = llm.generate(
            [OTHER, PROMPT, PROMPT],
            [params(None), params(None, guide=TOO_COMPLEX, temperature=1.0, seed=1), params("choice")],
            use_tqdm=False,
        )
        assert re.search("the guide cannot be followed any further: .*too", str(bad.error))
        assert good.output_token_ids == alone.output_token_ids
        check("choice", guided)
        assert llm.generate(OTHER, params(None)).output_token_ids == alone.output_token_ids
        scheduler = llm._engine.scheduler
        assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_json_has_no_endless_blanks(ranks: Ranks) -> None:
    """The likeliest bytes by far are blanks and line breaks, of which only so many may stand together."""
    with ranks.llm() as llm:
        pushed = {ord(" "): 100, ord("\n"): 100, ord("}"): 60, END_ID: 40}
        completion = llm.generate(PROMPT, params("object", logit_bias=pushed, max_tokens=200))
    check("object", completion)
    assert completion.finish_reason == "stop"
    assert len(completion.output_token_ids) < 100
