"""Requests that cannot be served: told why, alone, and without harm to anything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quadriga import LLM, InvalidRequest, SamplingParams
from tests.models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"executor": "inline", "device": "cpu", "block_size": 4, "num_kv_blocks": 16, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, max_model_len=32) as llm:
        yield llm


# Prompt, sampling fields, and what the message must name: the value and the limit.
REFUSED: list[tuple[str, Any, dict[str, Any], tuple[str, ...]]] = [
    ("empty text", "", {}, ("0 tokens", "at least 1")),
    ("empty ids", (), {}, ("0 tokens", "at least 1")),
    ("id beyond", [5, 301], {}, ("301", "position 1", "vocabulary of 301")),
    ("id far beyond", [2**70], {}, (str(2**70), "position 0", "vocabulary of 301")),
    ("stop id beyond", [5], {"stop_token_ids": [2**31 - 1]}, (str(2**31 - 1), "vocabulary of 301")),
    ("negative id", [5, 6, -1], {}, ("-1", "position 2", "vocabulary of 301")),
    ("bool", [5, True], {}, ("True", "position 1", "integer")),
    ("numpy bool", [5, np.True_], {}, ("position 1", "integer")),
    ("float", [5, 6.0], {}, ("6.0", "position 1", "integer")),
    ("text among ids", [5, "a"], {}, ("'a'", "position 1", "integer")),
    ("too long", [1] * 33, {}, ("33 tokens", "context length of 32")),
    ("no room for one more", [1] * 32, {}, ("32 tokens", "context length of 32")),
    ("long text", "x" * 50, {}, ("50 tokens", "context length of 32")),
    ("max_tokens beyond", [1] * 10, {"max_tokens": 23}, ("max_tokens 23", "22 tokens left", "of 10", "of 32")),
    ("half a character", "a\ud800", {}, ()),
    ("no prompt", None, {}, ("None",)),
]
NAMES = [name for name, *_ in REFUSED]
MANY_PROMPTS = ("empty ids", "numpy bool", "float", "text among ids")  # generate takes these for lists of prompts


@pytest.mark.parametrize(("prompt", "fields", "parts"), [case[1:] for case in REFUSED], ids=NAMES)
def test_a_bad_prompt_in_a_list_fails_alone(
    llm: LLM, prompt: Any, fields: dict[str, Any], parts: tuple[str, ...]
) -> None:
    alone = [llm.generate(good, GREEDY).output_token_ids for good in ("first", "last")]
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, **fields})
    first, bad, last = llm.generate(["first", prompt, "last"], [GREEDY, params, GREEDY], use_tqdm=False)
    assert [first.output_token_ids, last.output_token_ids] == alone
    assert isinstance(bad.error, InvalidRequest)
    for part in parts:
        assert part in str(bad.error)
    assert (bad.finish_reason, bad.output_token_ids, bad.text) == ("error", [], "")


@pytest.mark.parametrize("name", NAMES)
def test_a_single_bad_prompt_raises_and_the_next_request_is_served(llm: LLM, name: str) -> None:
    _, prompt, fields, parts = REFUSED[NAMES.index(name)]
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, **fields})
    for call in (llm.stream,) if name in MANY_PROMPTS else (llm.stream, llm.generate):
        with pytest.raises(InvalidRequest) as caught:
            call(prompt, params)
        for part in parts:
            assert part in str(caught.value)
    assert len(llm.generate("good", GREEDY).output_token_ids) == 6
    assert llm.stats()["kv_blocks_free"] == 16


def test_what_just_fits_is_served(llm: LLM) -> None:
    assert len(llm.generate([1] * 31, SamplingParams(temperature=0, max_tokens=1)).output_token_ids) == 1
    assert len(llm.generate([1] * 10, SamplingParams(temperature=0, max_tokens=22)).output_token_ids) == 22


def test_an_array_among_the_prompts_is_served_or_refused(llm: LLM) -> None:
    try:
        (completion,) = llm.generate([np.array([5, 6])], GREEDY)
    except InvalidRequest:
        return
    assert completion.prompt_token_ids == [5, 6] or isinstance(completion.error, InvalidRequest)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b"], [GREEDY], "2 prompts came with 1 sampling parameters"),
        ("a", [GREEDY, GREEDY], "1 prompt came with 2 sampling parameters"),
        ("a", {"max_tokens": 1}, "must be SamplingParams, got dict"),
        (7, GREEDY, "got 7"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params)


# ---- the KV cache


def test_a_request_that_the_cache_can_never_hold_is_refused_with_both_numbers(folder: Path) -> None:
    with open_llm(folder, num_kv_blocks=2) as small:
        params = SamplingParams(temperature=0, max_tokens=5)  # 5 + 5 - 1 tokens need 3 blocks of 4
        for call in (lambda: small.generate([1] * 5, params), lambda: list(small.stream([1] * 5, params))):
            with pytest.raises(InvalidRequest, match=r"5 tokens and max_tokens 5 need 3 KV blocks.*KV cache has 2"):
                call()
        # One token less just fits, and is served behind the refused one.
        bad, good = small.generate(
            [[1] * 5, [1] * 5], [params, SamplingParams(temperature=0, max_tokens=4)], use_tqdm=False
        )
        assert isinstance(bad.error, InvalidRequest)
        assert len(good.output_token_ids) == 4
        assert small.stats()["kv_blocks_free"] == 2


def test_a_prompt_longer_than_the_cache_is_refused(folder: Path) -> None:
    with open_llm(folder, num_kv_blocks=2) as small:
        with pytest.raises(InvalidRequest, match=r"a prompt of 50 tokens.*KV cache has 2"):
            small.generate([1] * 50, SamplingParams(temperature=0))
        assert len(small.generate([1] * 5, SamplingParams(temperature=0)).output_token_ids) == 4


# ---- sampling fields


@pytest.mark.parametrize("top_k", [301, 2**31 - 1, 2**31, 2**64])
def test_no_top_k_harms_the_engine(folder: Path, top_k: int) -> None:
    with open_llm(folder) as llm:
        beside = llm.stream("beside", SamplingParams(temperature=0, max_tokens=20))
        next(beside)
        try:
            params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, top_k=top_k)
            everything = SamplingParams(temperature=1.0, seed=3, max_tokens=4)
            assert llm.generate("a", params).output_token_ids == llm.generate("a", everything).output_token_ids
        except InvalidRequest:
            pass
        assert len(list(beside)) == 19


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-300},
        {"temperature": 1000.0},
        {"temperature": 1e-40},
        {"top_p": 1e-300},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": ["\ud800"]},
        {"stop": ["x" * 10_000]},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_extreme_sampling_fields_harm_nobody(llm: LLM, fields: dict[str, Any]) -> None:
    alone = llm.generate("good", GREEDY).output_token_ids
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **fields})
    extreme, good = llm.generate(["extreme", "good"], [params, GREEDY], use_tqdm=False)
    assert good.output_token_ids == alone
    assert len(extreme.output_token_ids) == 8


# ---- without a tokenizer


def test_without_a_tokenizer_only_ids_are_served(tmp_path: Path) -> None:
    folder = make_tiny_model("mha", tmp_path)
    with open_llm(folder) as llm:
        completion = llm.generate([1, 2], GREEDY)
        assert (len(completion.output_token_ids), completion.text) == (6, "")
        with pytest.raises(InvalidRequest, match="a text prompt needs a tokenizer"):
            llm.generate("text", GREEDY)
        with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
            llm.generate([1, 2], SamplingParams(stop="x"))
        with pytest.raises(InvalidRequest, match="a chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])
        assert llm.generate([1, 2], GREEDY).output_token_ids == completion.output_token_ids


@pytest.mark.parametrize(
    "prompt", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes")], ids=lambda p: type(p).__name__
)
def test_bytes_are_no_token_ids(llm: LLM, prompt: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match="must be a string"):
            call(prompt, GREEDY)
    bad, good = llm.generate([prompt, "good"], GREEDY, use_tqdm=False)
    assert isinstance(bad.error, InvalidRequest)
    assert good.error is None
