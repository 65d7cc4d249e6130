"""/v1/completions: prompts as text or token ids, one or many, each completed `n` times."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from driver.api_errors import json_response
from driver.front import Answer, Front, Job, ServedModel, new_id, usage_of
from driver.openai_logprobs import CompletionLogprobs, TokenNames, joined
from driver.openai_schema import CompletionBody, sampling_params
from driver.results import Increment
from driver.sse import DONE, answer_stream, answer_whole, event
from scheduler.params import InvalidRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def answer(front: Front, request: Request, body: CompletionBody) -> Response:
    """Raises InvalidRequest, Overloaded or ServiceUnavailable."""
    model = await front.model(body.model)
    call = await _Call.of(front, model, body)
    if body.stream:
        return await answer_stream(request, call.events())
    return await answer_whole(request, call.whole())


class _Call:
    """One request to complete; its choices are numbered prompt by prompt."""

    def __init__(self, front: Front, model: ServedModel, body: CompletionBody, job: Job, echoes: list[str]) -> None:
        """echoes: each prompt's text where it is to stand before its completions, else empty."""
        self._front, self._model, self._body, self._job, self._echoes = front, model, body, job, echoes
        self._n = body.n or 1
        self._names = TokenNames(model.tokenizer)
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    @classmethod
    async def of(cls, front: Front, model: ServedModel, body: CompletionBody) -> _Call:
        many = isinstance(body.prompt, list) and bool(body.prompt) and isinstance(body.prompt[0], str | list)
        prompts = body.prompt if many else [body.prompt]
        n = body.n or 1
        best_of = n if body.best_of is None else body.best_of
        if best_of < n:
            raise InvalidRequest(f"best_of {best_of} is less than n {n}")
        if body.stream and best_of > n:
            raise InvalidRequest(f"best_of {best_of} cannot be streamed: the best {n} are known at the end")
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens 0 gives nothing without echo; it must be at least 1")
        front.check_size(model, len(prompts), "n" if body.best_of is None else "best_of", best_of)
        special = body.add_special_tokens is not False
        job = Job([await front.encode(model, prompt, special) for prompt in prompts], best_of)
        for ids in job.prompts:
            job.add(sampling_params(body, **_own_fields(model, body, len(ids), best_of > n)))
        echoes = [""] * len(prompts)
        if body.echo:
            pairs = zip(prompts, job.prompts, strict=True)
            echoes = [one if isinstance(one, str) else await front.decode(model, ids) for one, ids in pairs]
        return cls(front, model, body, job, echoes)

    async def whole(self) -> Response:
        answers = await self._front.collect(self._job)
        usage = usage_of(self._job, answers, 0 if self._scores_only else None)
        choices = []
        for at, echo in enumerate(self._echoes):
            mine = answers[at * self._job.per_prompt : (at + 1) * self._job.per_prompt]
            if len(mine) > self._n:  # a stable order: of equals, the first
                mine = sorted(mine, key=_mean_logprob, reverse=True)[: self._n]
            for one in mine:
                choices.append(self._choice(len(choices), at, echo, one))
        return json_response({**self._head, "choices": choices, "usage": usage})

    def _choice(self, index: int, at: int, echo: str, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": echo + ("" if self._scores_only else answer.text),
            "logprobs": self._logprobs(self._counter(), at, answer, begins=True),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    async def events(self) -> AsyncIterator[bytes]:
        body, job = self._body, self._job
        counters = [self._counter() for _ in job.params]
        ends = [Answer() for _ in job.params]  # of their tokens only the number is kept
        made, begun = 0, [False] * len(job.params)
        async with aclosing(self._front.follow(job)) as pieces:
            async for index, piece in pieces:
                ends[index].cached_tokens = piece.cached_tokens
                made += 0 if self._scores_only else len(piece.token_ids)
                yield event(self._chunk(index, piece, counters[index], not begun[index], made, ends))
                begun[index] = True
        if body.wants_usage:
            yield event({**self._head, "choices": [], "usage": usage_of(job, ends, made)})
        yield DONE

    def _chunk(
        self, index: int, piece: Increment, counter: CompletionLogprobs, begins: bool, made: int, ends: list[Answer]
    ) -> dict[str, Any]:
        at = index // self._job.per_prompt
        choice = {
            "index": index,
            "text": (self._echoes[at] if begins else "") + ("" if self._scores_only else piece.text),
            "logprobs": self._logprobs(counter, at, piece, begins),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        chunk = {**self._head, "choices": [choice]}
        if self._body.wants_usage:
            running = self._body.wants_running_usage
            chunk["usage"] = usage_of(self._job, ends, made) if running else None
        return chunk

    # ---- pieces

    @property
    def _scores_only(self) -> bool:
        """Whether nothing is to be made; the engine makes one token all the same, which is left out."""
        return self._body.max_tokens == 0

    def _counter(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._names, self._body.logprobs or 0)

    def _logprobs(
        self, counter: CompletionLogprobs, at: int, piece: Answer | Increment, begins: bool
    ) -> dict[str, Any] | None:
        """begins: whether this is a sequence's first piece, or all of it."""
        if self._body.logprobs is None:
            return None
        parts = []
        if self._body.echo and begins:
            parts.append(counter.prompt(self._job.prompts[at], piece.prompt_logprobs or ()))
        if not self._scores_only:
            parts.append(counter.output(piece.logprobs or ()))
        return joined(parts)


def _own_fields(model: ServedModel, body: CompletionBody, num_prompt: int, ranked: bool) -> dict[str, Any]:
    """Sampling fields that completions have in a way of their own. ranked: whether the best are chosen at the end."""
    most = body.max_tokens if body.max_tokens is not None else model.default_max_tokens(num_prompt, DEFAULT_MAX_TOKENS)
    fields: dict[str, Any] = {"max_tokens": max(1, most)}
    if body.logprobs is not None or ranked:
        fields["logprobs"] = body.logprobs or 0
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = body.logprobs
    return fields


def _mean_logprob(answer: Answer) -> float:
    return sum(one.logprob for one in answer.logprobs) / max(1, len(answer.logprobs))
