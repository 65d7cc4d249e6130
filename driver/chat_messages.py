"""A chat's messages as a client sends them, made what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from scheduler.params import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What clients send back with an assistant's message, and templates do not show.
_IGNORED = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"})
_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Role and content as text, and calls of tools with their arguments as mappings. Raises InvalidRequest."""
    return [_message(at, message) for at, message in enumerate(messages)]


def _message(at: int, message: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(message) - _KNOWN - _IGNORED)
    if unknown:
        raise InvalidRequest(f"messages: message {at} has an unknown field {unknown[0]!r:.100}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"messages: the role of message {at} must be one of {', '.join(ROLES)}, got {role!r:.100}")
    calls = message.get("tool_calls")
    content = _content(at, message.get("content"), may_lack=role == "assistant" and bool(calls))
    read = {"role": ROLES[role], "content": content}
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidRequest(f"messages: {name} of message {at} must be a string, got {value!r:.100}")
            read[name] = value
    if calls:
        if not isinstance(calls, list):
            raise InvalidRequest(f"messages: tool_calls of message {at} must be a list, got {calls!r:.100}")
        read["tool_calls"] = [_call(at, call) for call in calls]
    return read


def _content(at: int, content: Any, may_lack: bool) -> str:
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"messages: the content of message {at} must be text or text parts, got {content!r:.100}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"messages: message {at} has a part that is no text, of type {kind!r:.100}")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(at: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"messages: message {at} has a tool call without a function's name, {call!r:.100}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            message = f"messages: the arguments of a tool call in message {at} are not JSON: {error}"
            raise InvalidRequest(message) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"messages: the arguments of a tool call in message {at} must be a JSON object")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
