"""Log probabilities as clients of the OpenAI interface read them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from driver.api_errors import to_json
from driver.openai_logprobs import LOWEST, CompletionLogprobs, TokenNames, chat_logprobs, joined
from driver.tokenizer import Tokenizer
from scheduler.logprobs import TokenLogprobs
from tests.models import END_ID

E_ACUTE = list("é".encode())


@pytest.fixture(scope="module")
def names(folder: Path) -> TokenNames:
    return TokenNames(Tokenizer(folder))


def found(*ids: int) -> list[TokenLogprobs]:
    """Tokens that were chosen second to `a`."""
    return [TokenLogprobs(one, -0.5 * one, [(ord("a"), -0.25), (one, -0.5 * one)]) for one in ids]


def test_tokens_have_names_of_their_own(names: TokenNames) -> None:
    assert [names.text(one) for one in (ord("h"), E_ACUTE[0], END_ID, 300)] == [
        "h",
        "bytes:\\xc3",
        "<|end|>",
        "token_id:300",
    ]
    assert [names.width(one) for one in (ord("h"), *E_ACUTE, END_ID, 300)] == [1, 1, 0, 0, 0]
    assert TokenNames(None).text(5) == "token_id:5"


def test_completions_count_their_offsets_on(names: TokenNames) -> None:
    pieces = CompletionLogprobs(names, top=2)
    first, second = pieces.output(found(ord("h"), *E_ACUTE)), pieces.output(found(ord("l")))
    assert first == {
        "text_offset": [0, 1, 2],
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-52.0, -97.5, -84.5],
        "top_logprobs": [
            {"a": -0.25, "h": -52.0},
            {"a": -0.25, "bytes:\\xc3": -97.5},
            {"a": -0.25, "bytes:\\xa9": -84.5},
        ],
    }
    assert second["text_offset"] == [2]
    whole = CompletionLogprobs(names, top=2).output(found(ord("h"), *E_ACUTE, ord("l")))
    assert joined([first, second]) == whole


def test_an_echoed_prompt_has_no_value_for_its_first_token(names: TokenNames) -> None:
    prompt = [ord("h"), ord("i")]
    for known in (found(ord("i")), [None, *found(ord("i"))]):
        written = CompletionLogprobs(names, top=1)
        both = joined([written.prompt(prompt, known), written.output(found(ord("!")))])
        assert both["tokens"] == ["h", "i", "!"]
        assert both["text_offset"] == [0, 1, 2]
        assert both["token_logprobs"] == [None, -52.5, -16.5]
        assert both["top_logprobs"] == [None, {"a": -0.25, "i": -52.5}, {"a": -0.25, "!": -16.5}]


def test_without_alternatives_there_are_none(names: TokenNames) -> None:
    written = CompletionLogprobs(names, top=0).output(found(ord("h")))
    assert written["top_logprobs"] is None
    assert written["token_logprobs"] == [-52.0]


def test_chats_name_bytes_and_alternatives(names: TokenNames) -> None:
    written = chat_logprobs(names, found(E_ACUTE[0]), top=1)
    assert written == {
        "content": [
            {
                "token": "bytes:\\xc3",
                "logprob": -97.5,
                "bytes": [0xC3],
                "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
            }
        ],
        "refusal": None,
    }
    assert chat_logprobs(names, found(300), top=0)["content"][0]["bytes"] is None


def test_what_cannot_be_is_a_number_all_the_same(names: TokenNames) -> None:
    impossible = [TokenLogprobs(ord("h"), -math.inf, [(ord("h"), -math.inf)])]
    written = json.loads(to_json(chat_logprobs(names, impossible, top=1)))
    assert written["content"][0]["logprob"] == LOWEST
    assert written["content"][0]["top_logprobs"][0]["logprob"] == LOWEST
