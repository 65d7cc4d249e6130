"""/v1/chat/completions: the next message of a conversation, `n` times, with calls of tools where there are any."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from driver.api_errors import json_response
from driver.chat_messages import read_messages
from driver.front import Answer, Front, Job, ServedModel, new_id, usage_of
from driver.openai_logprobs import TokenNames, chat_logprobs
from driver.openai_schema import ChatBody, guide_of, sampling_params
from driver.results import Increment
from driver.sse import DONE, answer_stream, answer_whole, event
from driver.tool_calls import ToolCall, ToolCallParser, ToolUse, parse_calls, read_tool_use
from scheduler.params import InvalidRequest

RESERVED = frozenset({"messages", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"})


async def answer(front: Front, request: Request, body: ChatBody) -> Response:
    """Raises InvalidRequest, Overloaded or ServiceUnavailable."""
    model = await front.model(body.model)
    tools = read_tool_use(body.tools, body.tool_choice, model.tokenizer and model.tokenizer.chat_template)
    call = _Call(front, model, body, tools, await _job(front, model, body, tools))
    if body.stream:
        return await answer_stream(request, call.events())
    return await answer_whole(request, call.whole())


async def encode(front: Front, model: ServedModel, body: Any, tools: list[dict[str, Any]] | None) -> list[int]:
    """Token ids of a body's messages. Raises InvalidRequest."""
    variables = dict(body.chat_template_kwargs or {})
    reserved = sorted(RESERVED & set(variables))
    if reserved:
        raise InvalidRequest(f"chat_template_kwargs must not hold {reserved[0]}")
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return await front.encode_chat(model, read_messages(body.messages), **variables, tools=tools or None)


async def _job(front: Front, model: ServedModel, body: ChatBody, tools: ToolUse) -> Job:
    n = body.n or 1
    front.check_size(model, 1, "n", n)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(f"top_logprobs {body.top_logprobs} needs logprobs true")
    if tools.forced is not None and guide_of(body) is not None:
        raise InvalidRequest("tool_choice says what the text must look like, so that nothing else can")
    ids = await encode(front, model, body, tools.tools)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted == 0:
        raise InvalidRequest("max_tokens must be at least 1, got 0")
    fields: dict[str, Any] = {"max_tokens": model.default_max_tokens(len(ids)) if wanted is None else wanted}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    if tools.forced is not None:
        fields["guide"] = tools.forced
    job = Job([ids], n)
    job.add(sampling_params(body, **fields))
    return job


class _Call:
    """One request to answer."""

    def __init__(self, front: Front, model: ServedModel, body: ChatBody, tools: ToolUse, job: Job) -> None:
        self._front, self._body, self._tools, self._job = front, body, tools, job
        self._names = TokenNames(model.tokenizer)
        self._id, self._created, self._model = new_id("chatcmpl"), int(time.time()), model.name

    async def whole(self) -> Response:
        answers = await self._front.collect(self._job)
        choices = [self._choice(index, one) for index, one in enumerate(answers)]
        return json_response(
            {**self._head("chat.completion"), "choices": choices, "usage": usage_of(self._job, answers)}
        )

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = _Message(self._tools, self._body.parallel_tool_calls is not False)
        said = [*message.push(answer.text), *message.finish()]
        calls = [one for one in said if isinstance(one, ToolCall)]
        content = "".join(one for one in said if isinstance(one, str))
        written: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            written["tool_calls"] = [one.written() for one in calls]
        return {
            "index": index,
            "message": written,
            "logprobs": self._logprobs(answer),
            "finish_reason": message.finish_reason(answer.finish_reason),
            "stop_reason": answer.stop_reason,
        }

    async def events(self) -> AsyncIterator[bytes]:
        job, parallel = self._job, self._body.parallel_tool_calls is not False
        messages = [_Message(self._tools, parallel) for _ in job.params]
        ends = [Answer() for _ in job.params]  # of their tokens only the number is kept
        made, begun = 0, [False] * len(job.params)
        async with aclosing(self._front.follow(job)) as pieces:
            async for index, piece in pieces:
                ends[index].cached_tokens = piece.cached_tokens
                made += len(piece.token_ids)
                usage = usage_of(job, ends, made) if self._body.wants_running_usage else None
                if not begun[index]:
                    begun[index] = True
                    yield self._chunk(index, {"role": "assistant", "content": ""}, usage)
                deltas = messages[index].deltas(piece)
                # One chunk for each piece at least, so that readers see every token come.
                for at, delta in enumerate(deltas or [{}]):
                    last = at == max(0, len(deltas) - 1)
                    yield self._chunk(index, delta, usage, piece if last else None, messages[index])
        if self._body.wants_usage:
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage_of(job, ends, made)})
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        usage: dict[str, Any] | None,
        piece: Increment | None = None,
        message: _Message | None = None,
    ) -> bytes:
        """piece: whose end and log probabilities go with it."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None:
            choice["logprobs"] = self._logprobs(piece)
            choice["finish_reason"] = message.finish_reason(piece.finish_reason)
            choice["stop_reason"] = piece.stop_reason
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._body.wants_usage:
            chunk["usage"] = usage
        return event(chunk)

    # ---- pieces

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, piece: Answer | Increment) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._names, piece.logprobs or (), self._body.top_logprobs or 0)


class _Message:
    """One message's text on its way out, told from its calls of tools.

    A model that was made to call one function says its arguments alone; one that must call any says a list of calls.
    """

    def __init__(self, tools: ToolUse, parallel: bool) -> None:
        """parallel: whether more than the first call goes out."""
        self._tools, self._parallel = tools, parallel
        self._parser = ToolCallParser() if tools.tools and tools.forced is None else None
        self._calls = 0
        self._forced_text = ""

    def push(self, text: str) -> list[str | ToolCall]:
        if self._tools.forced is not None:
            self._forced_text += text
            return []
        return self._counted(self._parser.push(text) if self._parser else [text] if text else [])

    def finish(self) -> list[str | ToolCall]:
        if self._tools.only is not None:
            return self._counted([ToolCall(self._tools.only, self._forced_text)])
        if self._tools.forced is not None:
            calls = parse_calls(self._forced_text)
            # Cut short by max_tokens, say: what there is, as text.
            return self._counted([self._forced_text] if calls is None else calls)
        return self._counted(self._parser.finish() if self._parser else [])

    def deltas(self, piece: Increment) -> list[dict[str, Any]]:
        """What a stream's reader is told of this piece."""
        said = self.push(piece.text)
        if piece.finish_reason is not None:
            said += self.finish()
        first = self._calls - sum(isinstance(one, ToolCall) for one in said)
        deltas = []
        for one in said:
            if isinstance(one, str):
                deltas.append({"content": one})
            else:
                deltas.append({"tool_calls": [{"index": first, **one.written()}]})
                first += 1
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _counted(self, said: Sequence[str | ToolCall]) -> list[str | ToolCall]:
        kept: list[str | ToolCall] = []
        for one in said:
            if isinstance(one, ToolCall):
                if self._calls and not self._parallel:
                    continue
                self._calls += 1
            kept.append(one)
        return kept
