"""SamplingParams: what is refused says why, and what is allowed passes."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from scheduler.guide import MAX_CHOICES, MAX_GUIDE_CHARACTERS, Guide
from scheduler.params import (
    MAX_BIASED_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SEED_MAX,
    SEED_MIN,
    InvalidRequest,
    SamplingParams,
)

# Field, refused value, and what the message must contain: the field, the value and the limit or the kind wanted.
REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("temperature", -1.0, ("-1.0", "[0, 1000]")),
    ("temperature", -1e-9, ("-1e-09", "[0, 1000]")),
    ("temperature", math.nan, ("nan", "[0, 1000]")),
    ("temperature", math.inf, ("inf", "[0, 1000]")),
    ("temperature", -math.inf, ("-inf", "[0, 1000]")),
    ("temperature", 10**400, ("[0, 1000]",)),
    ("temperature", "0.5", ("'0.5'", "a number")),
    ("temperature", True, ("True", "a number")),
    ("temperature", None, ("None", "a number")),
    ("top_p", 0, ("got 0", "(0, 1]")),
    ("top_p", 0.0, ("0.0", "(0, 1]")),
    ("top_p", -0.1, ("-0.1", "(0, 1]")),
    ("top_p", 1.5, ("1.5", "(0, 1]")),
    ("top_p", math.nan, ("nan", "(0, 1]")),
    ("top_p", math.inf, ("inf", "(0, 1]")),
    ("top_p", 10**400, ("(0, 1]",)),
    ("top_p", False, ("False", "a number")),
    ("top_k", -1, ("-1", "between 0 and")),
    ("top_k", 5.0, ("5.0", "an integer")),
    ("top_k", True, ("True", "an integer")),
    ("top_k", "5", ("'5'", "an integer")),
    ("top_k", None, ("None", "an integer")),
    ("min_p", -0.01, ("-0.01", "[0, 1]")),
    ("min_p", 1.01, ("1.01", "[0, 1]")),
    ("min_p", math.nan, ("nan", "[0, 1]")),
    ("min_p", [0.5], ("[0.5]", "a number")),
    ("seed", SEED_MIN - 1, (str(SEED_MIN - 1), str(SEED_MIN), str(SEED_MAX))),
    ("seed", SEED_MAX + 1, (str(SEED_MAX + 1), str(SEED_MIN), str(SEED_MAX))),
    ("seed", 1.0, ("1.0", "an integer")),
    ("seed", True, ("True", "an integer")),
    ("seed", "7", ("'7'", "an integer")),
    ("max_tokens", 0, ("got 0", "between 1 and")),
    ("max_tokens", -3, ("-3", "between 1 and")),
    ("max_tokens", True, ("True", "an integer")),
    ("max_tokens", 3.0, ("3.0", "an integer")),
    ("max_tokens", math.nan, ("nan", "an integer")),
    ("stop", "", ("''", "empty string")),
    ("stop", ["a", ""], ("['a', '']", "empty string")),
    ("stop", ["a", 7], ("['a', 7]", "list of strings")),
    ("stop", 7, ("got 7", "list of strings")),
    ("stop", {"a": 1}, ("{'a': 1}", "list of strings")),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), (str(MAX_STOP_STRINGS), str(MAX_STOP_STRINGS + 1))),
    ("stop_token_ids", [-1], ("-1", "between 0 and")),
    ("stop_token_ids", [1, True], ("True", "an integer")),
    ("stop_token_ids", [1.0], ("1.0", "an integer")),
    ("stop_token_ids", [5] * (MAX_STOP_TOKENS + 1), (str(MAX_STOP_TOKENS), str(MAX_STOP_TOKENS + 1))),
    ("stop_token_ids", 5, ("got 5", "list of token ids")),
    ("stop_token_ids", "5", ("'5'", "list of token ids")),
    ("ignore_eos", 1, ("got 1", "true or false")),
    ("ignore_eos", "yes", ("'yes'", "true or false")),
    ("ignore_eos", None, ("None", "true or false")),
    ("priority", 101, ("got 101", "between -100 and 100")),
    ("priority", 0.5, ("got 0.5", "an integer")),
    ("cache_salt", 5, ("got 5", "a string")),
    ("frequency_penalty", 2.01, ("2.01", "[-2, 2]")),
    ("frequency_penalty", math.nan, ("nan", "[-2, 2]")),
    ("frequency_penalty", None, ("None", "a number")),
    ("presence_penalty", -2.01, ("-2.01", "[-2, 2]")),
    ("presence_penalty", "1", ("'1'", "a number")),
    ("repetition_penalty", 0.0, ("0.0", "(0, 2]")),
    ("repetition_penalty", -1, ("-1", "(0, 2]")),
    ("repetition_penalty", 2.5, ("2.5", "(0, 2]")),
    ("logit_bias", {5: 100.1}, ("100.1", "token 5", "[-100, 100]")),
    ("logit_bias", {5: math.nan}, ("nan", "[-100, 100]")),
    ("logit_bias", {5: "1"}, ("'1'", "a number")),
    ("logit_bias", {-1: 1}, ("-1", "between 0 and")),
    ("logit_bias", {"x": 1}, ("'x'", "an integer")),
    ("logit_bias", {"\u0663": 1}, ("\u0663", "an integer")),
    ("logit_bias", {"9" * 5000: 1}, ("an integer",)),
    ("logit_bias", {True: 1}, ("True", "an integer")),
    ("logit_bias", {1.5: 1}, ("1.5", "an integer")),
    ("logit_bias", {7: 1, "7": 2}, ("7", "twice")),
    ("logit_bias", [1], ("[1]", "a mapping")),
    ("logit_bias", dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1), ("300", "301")),
    ("logprobs", 21, ("got 21", "between 0 and 20")),
    ("logprobs", -1, ("-1", "between 0 and 20")),
    ("logprobs", True, ("True", "an integer")),
    ("prompt_logprobs", 21, ("got 21", "between 0 and 20")),
    ("prompt_logprobs", 1.0, ("1.0", "an integer")),
    ("min_tokens", -1, ("-1", "between 0 and")),
    ("min_tokens", None, ("None", "an integer")),
    ("guide", "json", ("'json'", "a mapping")),
    ("guide", {}, ("exactly one of", "none")),
    ("guide", {"regex": "a", "choice": ["a"]}, ("exactly one of", "regex, choice")),
    ("guide", {"xml": "a"}, ("'xml'", "json_schema")),
    ("guide", {"regex": 5}, ("regex", "got 5")),
    ("guide", {"regex": ""}, ("regex", "non-empty")),
    ("guide", {"json_object": "yes"}, ("json_object", "'yes'")),
    ("guide", {"json_object": False}, ("exactly one of", "none")),
    ("guide", {"json_schema": "{"}, ("json_schema", "not JSON")),
    ("guide", {"json_schema": "[]"}, ("json_schema", "JSON object")),
    ("guide", {"json_schema": {"a": {1, 2}}}, ("json_schema", "not JSON")),
    ("guide", {"json_schema": 5}, ("json_schema", "got 5")),
    ("guide", {"choice": "ab"}, ("choice", "'ab'")),
    ("guide", {"choice": ["a", ""]}, ("choice", "non-empty")),
    ("guide", {"choice": ["a"] * (MAX_CHOICES + 1)}, (str(MAX_CHOICES), str(MAX_CHOICES + 1))),
    ("guide", {"regex": "a" * (MAX_GUIDE_CHARACTERS + 1)}, (str(MAX_GUIDE_CHARACTERS), str(MAX_GUIDE_CHARACTERS + 1))),
]

ALLOWED: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 0.0),
    ("temperature", 1),
    ("temperature", 1000.0),
    ("top_p", 1),
    ("top_p", 1.0),
    ("top_p", 1e-9),
    ("top_k", 0),
    ("top_k", 1),
    ("top_k", 10**6),
    ("min_p", 0),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("seed", None),
    ("seed", 0),
    ("seed", SEED_MIN),
    ("seed", SEED_MAX),
    ("max_tokens", None),
    ("max_tokens", 1),
    ("max_tokens", 10**9),
    ("stop", ("\n", "###")),
    ("stop", ("x",) * MAX_STOP_STRINGS),
    ("stop_token_ids", (0, 5)),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKENS))),
    ("ignore_eos", True),
    ("priority", -100),
    ("cache_salt", "tenant"),
    ("frequency_penalty", -2),
    ("presence_penalty", 2.0),
    ("repetition_penalty", 1e-9),
    ("repetition_penalty", 2),
    ("logit_bias", {0: -100.0, 5: 100.0}),
    ("logit_bias", dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0)),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 0),
    ("min_tokens", 7),
    ("guide", Guide(choice=("a",) * MAX_CHOICES)),
]


@pytest.mark.parametrize(("name", "value", "parts"), REFUSED, ids=lambda value: repr(value)[:24])
def test_bad_value_is_refused_by_name_value_and_limit(name: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}\b") as caught:
        SamplingParams(**{name: value})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("name", "value"), ALLOWED, ids=lambda value: repr(value)[:24])
def test_good_value_is_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "parts"), REFUSED[::7], ids=lambda value: repr(value)[:24])
def test_mapping_is_checked_alike(name: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}\b"):
        SamplingParams.from_mapping({name: value})


def test_every_field_has_a_refused_value() -> None:
    assert {name for name, _, _ in REFUSED} == set(SamplingParams.__dataclass_fields__)


def test_unknown_fields_are_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({"max_tokens": 4, "temprature": 0, "best_of": 2})
    message = str(caught.value)
    assert "'best_of', 'temprature'" in message
    for name in SamplingParams.__dataclass_fields__:
        assert name in message


def test_mapping_gives_the_same_parameters_as_keywords() -> None:
    values = {"max_tokens": 4, "temperature": 0.5, "stop": ["a", "b"], "stop_token_ids": [1, 2], "seed": -1}
    assert SamplingParams.from_mapping(values) == SamplingParams(
        max_tokens=4, temperature=0.5, stop=("a", "b"), stop_token_ids=(1, 2), seed=-1
    )
    assert SamplingParams.from_mapping({}) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "kept"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), (None, ()), ([], ())]
)
def test_stop_is_one_string_or_a_list(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


def test_a_list_changed_later_does_not_change_the_parameters() -> None:
    stops, ids = ["a"], [1]
    params = SamplingParams(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


def test_parameters_cannot_be_changed_unchecked() -> None:
    with pytest.raises(AttributeError, match=re.escape("temperature")):
        SamplingParams().temperature = -1.0


@pytest.mark.parametrize("top_k", [2**31, 2**64])
def test_a_top_k_beyond_what_a_frame_carries_is_refused_or_travels(top_k: int) -> None:
    from scheduler.frame import decode_plan, encode_plan
    from scheduler.plan import Admission, StepPlan

    try:
        params = SamplingParams(top_k=top_k)
    except InvalidRequest:
        return
    admission = Admission(0, [1], 0, 1.0, params.top_k, 1.0, 0.0)
    assert decode_plan(encode_plan(StepPlan(0, 0, [admission]))).admissions[0].top_k > 301


def test_biases_have_integer_ids_however_they_come() -> None:
    assert SamplingParams(logit_bias={"7": 1, 3: -2.5}).logit_bias == {7: 1.0, 3: -2.5}
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_fewest_tokens_are_no_more_than_the_most() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    with pytest.raises(InvalidRequest, match="min_tokens 4 is more than max_tokens 3"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"json_object": True}, "json_object", ""),
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json_schema": '{"type": "string"}'}, "json_schema", '{"type": "string"}'),
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"choice": ["yes", "nö"]}, "choice", '["yes", "nö"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_guide_says_one_thing(asked: dict[str, Any], kind: str, text: str) -> None:
    guide = SamplingParams(guide=asked).guide
    assert (guide.kind, guide.text) == (kind, text)
    assert SamplingParams(guide=dataclasses.asdict(guide)).guide == guide  # as it crosses the wire
    assert hash(SamplingParams(guide=Guide(**asked))) == hash(SamplingParams(guide=asked))
