"""Calls of tools in a model's text, and what a request may say of tools."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.tool_calls import ToolCall, ToolCallParser, parse_calls, read_tool_use
from scheduler.params import InvalidRequest

HERMES = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def block(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def parsed(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of all pieces, with names and arguments."""
    parser = ToolCallParser()
    said = [one for piece in pieces for one in parser.push(piece)] + parser.finish()
    calls = [(one.name, one.arguments) for one in said if isinstance(one, ToolCall)]
    return "".join(one for one in said if isinstance(one, str)), calls


@pytest.mark.parametrize(
    ("text", "expected", "calls"),
    [
        ("Just words < here.", "Just words < here.", []),
        (block("clock"), "", [("clock", "{}")]),
        (f"Let me see.\n{block('weather', town='Köln')}", "Let me see.", [("weather", '{"town": "Köln"}')]),
        (f"{block('clock')}\n{block('clock')}\n", "", [("clock", "{}")] * 2),
        (f"{block('clock')} and then", " and then", [("clock", "{}")]),
        ('<tool_call>{"name": "clock"}', "", [("clock", "{}")]),  # the end mark left out
        ('<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', "", [("a", '{"b": 1}')]),
        ("<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
        ('<tool_call>{"name": "cut', '<tool_call>{"name": "cut', []),
        ("ends in <tool_ca", "ends in <tool_ca", []),
        ("  \n", "  \n", []),
    ],
)
def test_calls_are_told_from_text_however_it_is_cut(text: str, expected: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(text) == (expected, calls)
    assert parsed(*text) == (expected, calls)
    for size in (2, 3, 7):
        assert parsed(*(text[at : at + size] for at in range(0, len(text), size))) == (expected, calls)


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"}', " ", "\n", "<", "a", "<tool"])),
    st.data(),
)
def test_any_cut_of_any_text_gives_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    edges = [0, *cuts, len(text)]
    assert parsed(*(text[a:b] for a, b in itertools.pairwise(edges))) == parsed(text)


def test_plain_text_is_not_held_back() -> None:
    parser = ToolCallParser()
    assert parser.push("The sea") == ["The sea"]
    assert parser.push(" is ") == [" is"]  # a blank may stand before a call
    assert parser.push("<tool") == []
    assert parser.push("box>") == [" <toolbox>"]


def test_a_list_of_calls_is_read_whole_or_not_at_all() -> None:
    calls = parse_calls('[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"town": "Ulm"}}]')
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("clock", {}), ("weather", {"town": "Ulm"})]
    assert len({one.id for one in calls}) == 2
    assert parse_calls('[{"name": "clock"}, {"no": 1}]') is None
    assert parse_calls('[{"name": "clo') is None
    assert parse_calls("{}") is None


def test_tools_need_a_template_that_takes_them() -> None:
    assert read_tool_use([CLOCK], None, HERMES).tools == [CLOCK]
    assert read_tool_use([CLOCK], "none", "plain").tools == []
    assert read_tool_use(None, "auto", "plain").tools == []
    with pytest.raises(InvalidRequest, match="template knows no tools"):
        read_tool_use([CLOCK], None, "{{ messages }}")
    with pytest.raises(InvalidRequest, match="template knows no tools"):
        read_tool_use([CLOCK], None, None)
    with pytest.raises(InvalidRequest, match="another form than <tool_call>"):
        read_tool_use([CLOCK], "auto", "{{ tools }}[TOOL_CALLS]")


def test_a_choice_of_tools_becomes_a_guide() -> None:
    use = read_tool_use([CLOCK, WEATHER], {"type": "function", "function": {"name": "weather"}}, HERMES)
    assert use.only == "weather"
    assert use.forced == {"json_schema": WEATHER["function"]["parameters"]}
    items = read_tool_use([CLOCK, WEATHER], "required", HERMES).forced["json_schema"]["items"]["anyOf"]
    assert [one["properties"]["name"] for one in items] == [{"const": "clock"}, {"const": "weather"}]
    assert items[1]["properties"]["arguments"] == WEATHER["function"]["parameters"]


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([CLOCK], {"type": "function", "function": {"name": "other"}}, "tool_choice must be none, auto, required or"),
        ([CLOCK], "sometimes", "tool_choice must be"),
        (None, "required", "needs tools"),
        ([{"type": "web"}], None, "entry 0 must be"),
        ([CLOCK, {"type": "function", "function": {}}], None, "entry 1 has no name"),
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], None, "must be a JSON schema"),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any, choice: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read_tool_use(tools, choice, HERMES)
