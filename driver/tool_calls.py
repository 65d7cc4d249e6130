"""Calls of tools in a model's text, in the form of Hermes and Qwen: <tool_call>{"name", "arguments"}</tool_call>."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.params import InvalidRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: a JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def written(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    tools: as the template takes them; none where the model is not to call any. names: of their functions.
    forced: the guide that makes the model call, where it must. only: the one function it must call, if it is told.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: dict[str, Any] | None = None
    only: str | None = None


def read_tool_use(tools: Any, choice: Any, template: str | None) -> ToolUse:
    """Raises InvalidRequest for tools that are none, or that the model's chat template cannot take."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice {choice!r:.100} needs tools")
        return ToolUse()
    functions = [_function(at, tool) for at, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    only = _only(choice, names)
    if choice == "none":
        return ToolUse()
    if template is None or "tools" not in template:
        raise InvalidRequest("tools: this model's chat template knows no tools")
    if only is not None:
        return ToolUse(tools, {"json_schema": _parameters(functions[names.index(only)])}, only)
    if choice == "required":
        return ToolUse(tools, {"json_schema": _any_call(functions)})
    if OPEN not in template:
        raise InvalidRequest(
            f"tools: this model's chat template has the calls written in another form than {OPEN}, which is the only "
            'one that is understood; tool_choice "required" or a function works all the same'
        )
    return ToolUse(tools)


def parse_call(text: str) -> ToolCall | None:
    """The call that a JSON text says, if it says one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else _dumped(arguments))


def parse_calls(text: str) -> list[ToolCall] | None:
    """The calls of a JSON list, as `required` has them written; None if it is no such list."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = [parse_call(_dumped(entry)) for entry in entries] if isinstance(entries, list) else [None]
    return None if None in calls else calls


class ToolCallParser:
    """Tells calls from text, piece by piece; what comes out does not depend on how the text was cut into pieces.

    White space around calls is dropped. A block that is no call stays text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._said_call = False

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain now, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._inside:
                self._end_block(found, before, CLOSE)
            else:
                self._spaces_before_call(found, before)
            self._inside = not self._inside
        if not self._inside:
            keep = len(self._held) - _uncertain(self._held)
            self._say(found, self._held[:keep])
            self._held = self._held[keep:]
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest, at the end of the text."""
        found: list[str | ToolCall] = []
        held, self._held = self._held, ""
        if self._inside:
            self._end_block(found, held, "")
        elif held.strip() or not self._said_call:
            self._say(found, held)
        return found

    def _end_block(self, found: list[str | ToolCall], block: str, close: str) -> None:
        call = parse_call(block)
        if call is None:
            self._say(found, OPEN + block + close)
        else:
            self._said_call = True
            found.append(call)

    def _spaces_before_call(self, found: list[str | ToolCall], text: str) -> None:
        self._say(found, text.rstrip())

    def _say(self, found: list[str | ToolCall], text: str) -> None:
        if self._said_call and not text.strip():
            return
        if text:
            found.append(text)


def _uncertain(text: str) -> int:
    """Length of the end of `text` that is white space or may become the mark of a call, or both."""
    for length in range(min(len(text), len(OPEN) - 1), 0, -1):
        if OPEN.startswith(text[-length:]):
            text = text[:-length]
            break
    else:
        length = 0
    return length + len(text) - len(text.rstrip())


def _function(at: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f'tools: entry {at} must be {{"type": "function", "function": {{…}}}}, got {tool!r:.100}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"tools: entry {at} has no name for its function")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"tools: the parameters of {function['name']!r} must be a JSON schema")
    return function


def _only(choice: Any, names: Sequence[str]) -> str | None:
    if choice in (None, "none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or one of the functions {', '.join(names)}, got {choice!r:.100}"
        )
    return name


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}


def _any_call(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A schema of lists of calls of these functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "arguments": _parameters(one)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
