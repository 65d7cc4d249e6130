"""What the HTTP routes share: the service behind them, its model, and the way from text to token ids."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from driver.api_errors import ApiError
from driver.config import ConfigError
from driver.handle import Client
from driver.results import Increment
from driver.tokenizer import Tokenizer
from driver.wire import ServiceUnavailable
from scheduler.logprobs import TokenLogprobs
from scheduler.params import InvalidRequest, SamplingParams

SHORT_TEXT = 2000  # characters that are encoded in less time than it takes to hand them to a thread
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one HTTP request may ask for. Raises ConfigError.

    max_body_bytes: of its body. max_prompts: prompts in it. max_choices: `n` and `best_of`. max_prompt_tokens: of each
    prompt; None for what the model's context leaves.
    """

    max_body_bytes: int = 16 << 20
    max_prompts: int = 256
    max_choices: int = 64
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service says of its model: see Service.about_model."""

    name: str
    max_model_len: int
    kv_tokens: int
    vocab_size: int
    capacity: int
    tokenizer: Tokenizer | None

    def default_max_tokens(self, num_prompt: int, most: int | None = None) -> int:
        """New tokens for a request that names no number: what context and KV cache leave, or `most` if that is less."""
        room = min(self.max_model_len - num_prompt, max(1, self.kv_tokens + 1 - num_prompt))
        return room if most is None else min(room, most)


@dataclass(slots=True)
class Job:
    """The sequences that one HTTP request asks for: `per_prompt` for each prompt, in the prompts' order."""

    prompts: list[list[int]]
    per_prompt: int
    params: list[SamplingParams] = field(default_factory=list)

    def add(self, params: SamplingParams) -> None:
        """The next prompt's parameters. Its sequences differ by their seeds, if one is given."""
        for at in range(self.per_prompt):
            seed = params.seed if params.seed is None or at == 0 else (params.seed + at) % 2**64
            self.params.append(replace(params, seed=seed) if at else params)


@dataclass(slots=True)
class Answer:
    """One sequence as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0

    def add(self, piece: Increment) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        self.cached_tokens = piece.cached_tokens


class Front:
    """The service as the routes see it."""

    def __init__(self, client: Client, limits: HttpLimits | None = None) -> None:
        self.client = client
        self.limits = limits or HttpLimits()
        self.began = int(time.time())
        self._model: ServedModel | None = None
        self._reading = asyncio.Lock()

    async def model(self, name: str | None = None) -> ServedModel:
        """The model, if it is the one that a caller names. Raises ServiceUnavailable, or ApiError 404."""
        if not self.client.connected:
            raise ServiceUnavailable("the service is not ready")
        async with self._reading:
            if self._model is None:
                self._model = await asyncio.to_thread(_read_model, await self.client.amodel())
        if name is not None and name != self._model.name:
            message = f"the model {name!r:.200} does not exist; this service has {self._model.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self._model

    # ---- from text to token ids

    async def encode(self, model: ServedModel, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids, its length judged. Raises InvalidRequest."""
        if isinstance(prompt, list):
            return self.checked_length(model, prompt)
        tokenizer = _tokenizer(model)
        self._check_characters(model, tokenizer, len(prompt))
        ids = await _aside(len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens))
        return self.checked_length(model, ids)

    async def encode_chat(self, model: ServedModel, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        """A conversation's token ids, its length judged. Raises InvalidRequest."""
        tokenizer = _tokenizer(model)
        size = sum(len(message.get("content") or "") for message in messages)
        self._check_characters(model, tokenizer, size)
        ids = await _aside(size, lambda: tokenizer.encode_chat(messages, **variables))
        return self.checked_length(model, ids)

    async def decode(self, model: ServedModel, token_ids: list[int]) -> str:
        tokenizer = _tokenizer(model)
        return await _aside(len(token_ids), lambda: tokenizer.decode(token_ids))

    def most_prompt_tokens(self, model: ServedModel) -> int:
        return min(model.max_model_len - 1, self.limits.max_prompt_tokens or model.max_model_len)

    def checked_length(self, model: ServedModel, ids: list[int]) -> list[int]:
        most = self.most_prompt_tokens(model)
        if len(ids) > most:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens, more than the {most} that may be; the context length, with new "
                f"tokens, is {model.max_model_len}"
            )
        return ids

    def _check_characters(self, model: ServedModel, tokenizer: Tokenizer, characters: int) -> None:
        """Refuses what is too long by far, before the work of encoding it."""
        most = self.most_prompt_tokens(model)
        if characters > tokenizer.most_characters(most):
            raise InvalidRequest(f"the prompt has {characters} characters, which cannot be {most} tokens")

    # ---- to the engine

    def check_size(self, model: ServedModel, num_prompts: int, name: str, choices: int) -> None:
        """Raises InvalidRequest for a request for more sequences than may be. name: the field that says how many."""
        limits = self.limits
        if num_prompts > limits.max_prompts:
            raise InvalidRequest(f"prompt holds {num_prompts} prompts, more than the {limits.max_prompts} that may be")
        if choices > limits.max_choices:
            raise InvalidRequest(f"{name} {choices} is more than the {limits.max_choices} that may be")
        if num_prompts * choices > model.capacity:
            raise InvalidRequest(
                f"{num_prompts} prompts with {name} {choices} are {num_prompts * choices} sequences, more than the "
                f"{model.capacity} that the service holds at once"
            )

    async def follow(self, job: Job) -> AsyncIterator[tuple[int, Increment]]:
        """Pieces of a job's sequences as they come. Raises what is wrong, Overloaded or ServiceUnavailable."""
        prompts = [prompt for prompt in job.prompts for _ in range(job.per_prompt)]
        async with aclosing(self.client.amerge(prompts, job.params, wait=False)) as pieces:
            async for at, piece in pieces:
                if piece.finish_reason == "abort":
                    raise ServiceUnavailable("the service is shutting down and has ended this request")
                yield at, piece

    async def collect(self, job: Job) -> list[Answer]:
        """All sequences to their end."""
        answers = [Answer() for _ in job.params]
        async with aclosing(self.follow(job)) as pieces:
            async for at, piece in pieces:
                answers[at].add(piece)
        return answers


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def usage_of(job: Job, answers: Sequence[Answer], completion_tokens: int | None = None) -> dict[str, Any]:
    """Tokens of a job so far; a prompt counts once, however many sequences it has."""
    prompt = sum(map(len, job.prompts))
    made = sum(len(answer.token_ids) for answer in answers) if completion_tokens is None else completion_tokens
    cached = sum(answer.cached_tokens for answer in answers[:: job.per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _read_model(about: dict[str, Any]) -> ServedModel:
    parts = about["tokenizer"]
    tokenizer = None if parts is None else Tokenizer.from_parts(parts)
    if tokenizer is not None:
        _ = tokenizer.longest_token  # takes tens of milliseconds, here in a thread
    limits = {name: about[name] for name in ("max_model_len", "kv_tokens", "vocab_size", "capacity")}
    return ServedModel(name=about["model"], tokenizer=tokenizer, **limits)


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer, so that no text can be taken; send token ids")
    return model.tokenizer


async def _aside(size: int, work: Callable[[], Result]) -> Result:
    """The result of work on `size` characters or tokens; long work is done in a thread."""
    return work() if size <= SHORT_TEXT else await asyncio.to_thread(work)
