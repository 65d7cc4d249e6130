"""What clients of the OpenAI interface may send, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from driver.chat_messages import read_messages
from driver.openai_schema import ChatBody, CompletionBody, guide_of, sampling_params
from scheduler.guide import Guide
from scheduler.params import InvalidRequest

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "a", **fields})


def test_every_field_reaches_the_engine() -> None:
    sent = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "stop": ["x", "yz"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "priority": -2,
        "cache_salt": "salt",
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "logit_bias": {"5": -100},
    }
    params = sampling_params(completion(**sent), max_tokens=9)
    assert params.max_tokens == 9
    assert params.stop == ("x", "yz")
    assert params.stop_token_ids == (4,)
    assert params.logit_bias == {5: -100.0}
    plain = set(sent) - {"stop", "stop_token_ids", "logit_bias"}
    assert {name: getattr(params, name) for name in plain} == {name: sent[name] for name in plain}


def test_what_is_not_sent_or_null_is_the_default() -> None:
    fields = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "logit_bias")
    assert sampling_params(completion(**dict.fromkeys(fields))) == sampling_params(completion())
    assert sampling_params(completion()).temperature == 1.0
    assert sampling_params(completion(top_k=-1)).top_k == 0


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            {"json_schema": {"type": "object"}},
        ),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ],
)
def test_a_guide_may_be_said_in_several_ways(fields: dict[str, Any], guide: Any) -> None:
    expected = guide if guide is None or isinstance(guide, Guide) else Guide.of(guide)
    assert sampling_params(completion(**fields)).guide == expected


def test_a_text_has_one_guide() -> None:
    both = completion(guided_regex="a", response_format={"type": "json_object"})
    with pytest.raises(InvalidRequest, match="only one of response_format, guided_regex"):
        guide_of(both)
    with pytest.raises(InvalidRequest, match="schema is missing"):
        guide_of(completion(response_format={"type": "json_schema"}))
    with pytest.raises(InvalidRequest, match="guided_json is not JSON"):
        guide_of(completion(guided_json="{"))


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"suffix": None, "use_beam_search": False, "skip_special_tokens": True, "length_penalty": 1.0},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert sampling_params(completion(**fields)) == sampling_params(completion())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"suffix": "end"}, "suffix is not supported, got 'end'"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output is not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ({"is_prefill": True}, "unknown field 'is_prefill'"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"temperature": "1"}, "valid number"),
        ({"top_p": 0}, "greater than 0"),
        ({"min_p": 1.5}, "less than or equal to 1"),
        ({"presence_penalty": 2.5}, "less than or equal to 2"),
        ({"frequency_penalty": float("nan")}, "finite number"),
        ({"logprobs": 21}, "less than or equal to 20"),
        ({"logprobs": True}, "valid integer"),
        ({"n": 0}, "greater than or equal to 1"),
        ({"seed": 2**64}, "less than or equal to"),
        ({"max_tokens": -1}, "greater than or equal to 0"),
        ({"prompt": [[1], "a", 3]}, "prompt 2 must be a string or a list of token ids"),
        ({"prompt": [1, 2.5]}, "must hold integers alone"),
        ({"prompt": [True]}, "must hold integers alone"),
        ({"prompt": []}, "at least 1 token"),
        ({"prompt": [[1], []]}, "prompt 1 is empty"),
        ({"prompt": {"a": 1}}, "must be a string or a list"),
        ({"prompt": None}, "must be a string or a list"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        completion(**fields)


def test_chats_are_made_what_templates_take() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    read = read_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ]
    )
    assert read == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, "role of message 1 must be one of"),
        ({"role": "robot", "content": "a"}, "got 'robot'"),
        ({"role": ["user"], "content": "a"}, "role of message 1"),
        ({"role": "user"}, "content of message 1"),
        ({"role": "assistant", "content": None}, "content of message 1"),
        ({"role": "user", "content": 7}, "content of message 1"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "no text, of type 'image_url'"),
        ({"role": "user", "content": ["a"]}, "no text"),
        ({"role": "user", "content": "a", "name": 1}, "name of message 1"),
        ({"role": "user", "content": "a", "mood": "sad"}, "unknown field 'mood'"),
        ({"role": "assistant", "tool_calls": [{}]}, "without a function's name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "are not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "a JSON object"),
    ],
)
def test_messages_that_are_none_are_refused(message: dict[str, Any], reason: str) -> None:
    body = ChatBody.model_validate({"messages": [USER, message]})
    with pytest.raises(InvalidRequest, match=reason):
        read_messages(body.messages)
