"""The Python API: a model in hand, prompts in, completions out."""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from tqdm import tqdm

from driver.config import EngineConfig
from driver.engine import Engine, EngineDead, Update
from driver.setup import Model, Phases, read_model, start_engine
from driver.text import TextStream
from scheduler.params import DEFAULT_MAX_TOKENS, InvalidRequest, SamplingParams
from scheduler.request import Request
from workers.spec import WorkerReady

logger = logging.getLogger("quadriga")

Prompt = str | Sequence[int]
_BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but no token ids


@dataclass(slots=True)
class Completion:
    """One request's result.

    finish_reason: "stop" (end token or stop string, named by stop_reason), "length", "abort", or "error".
    cached_tokens: prompt tokens that the prefix cache had.
    error: why the request failed; None otherwise.
    ttft_s: seconds from submission to the first token. mean_tbt_s: mean seconds between tokens. None without tokens.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: Exception | None = None
    submitted: float = 0.0
    token_times: list[float] = field(default_factory=list, repr=False)

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.submitted if self.token_times else None

    @property
    def mean_tbt_s(self) -> float | None:
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def take(self, update: Update) -> None:
        self.text += update.text
        self.output_token_ids += update.token_ids
        self.token_times += [update.at] * len(update.token_ids)
        self.finish_reason, self.stop_reason, self.error = update.finish_reason, update.stop_reason, update.error
        self.cached_tokens = update.cached_tokens

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error


@dataclass(frozen=True, slots=True)
class Increment:
    """A piece of a stream; finish_reason is set in the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None


class Stream:
    """An iterator over the increments of one request."""

    def __init__(
        self, request_id: str, updates: queue.SimpleQueue[Update], abort: Callable[[Sequence[str]], None]
    ) -> None:
        self._request_id, self._updates, self._abort = request_id, updates, abort
        self._ended = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Increment:
        if self._ended:
            raise StopIteration
        update = self._updates.get()
        self._ended = update.finish_reason is not None
        if update.error is not None:
            raise update.error
        return Increment(update.text, update.token_ids, update.finish_reason, update.stop_reason)

    def close(self) -> None:
        """Aborts the request if it is still running. May be called twice."""
        if not self._ended:
            self._ended = True
            self._abort([self._request_id])

    def __del__(self) -> None:
        self.close()


class LLM:
    """A model served in this process's name. A context manager; `close` leaves no process behind.

    with LLM("smollm2", tensor_parallel_size=3) as llm:
        print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=20)).text)

    Options are those of EngineConfig. Raises its ConfigError, or an error that names what is wrong with the model.
    """

    def __init__(self, model: str, *, start: bool = True, **options: Any) -> None:
        """start: bring up the workers now; otherwise `start` or the first request does."""
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; known: {sorted(EngineConfig.__dataclass_fields__)}")
        self.config = EngineConfig(model=model, **options)
        self.phases = Phases()
        self.workers: list[WorkerReady] = []
        self._ids = itertools.count()
        self._engine: Engine | None = None
        self._shut_down: Callable[[], object] | None = None
        self._closed = False
        with self.phases.phase("model files"):
            self.model: Model = read_model(self.config)
        if start:
            self.start()

    # ---- life

    def start(self) -> LLM:
        """Brings up workers and engine if they are not up. Raises EngineDead after `close`."""
        if self._closed:
            raise EngineDead("this LLM is closed")
        if self._engine is None:
            self._engine, self.workers = start_engine(self.config, self.model, self.phases)
            # Also runs when the LLM is dropped or the interpreter ends without `close`.
            self._shut_down = weakref.finalize(self, _shut_down, self._engine)
        return self

    def close(self) -> None:
        """Ends engine, workers and a Ray cluster that was started for them. May be called twice."""
        self._closed = True
        if self._shut_down is not None:
            self._shut_down()

    def __enter__(self) -> LLM:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> Completion | list[Completion]:
        """Completes one prompt or many; a prompt is a string or a list of token ids.

        params: one for all prompts, or one for each. One prompt gives one Completion, a list gives a list in its
        order. Raises InvalidRequest for a single bad prompt; in a list, the bad one's Completion carries the error
        and the others are unaffected. Raises WorkerFailed or EngineDead when the engine fails.
        """
        if _is_prompt(prompts):
            completion = self._run([prompts], [_single(params)], use_tqdm=False)[0]
            if completion.error is not None:
                raise completion.error
            return completion
        if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
            raise InvalidRequest(f"prompts must be a string, token ids, or a list of those, got {prompts!r}")
        many = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(many) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts came with {len(many)} sampling parameters")
        return self._run(prompts, many, use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Iterates over a completion piece by piece. Closing the stream early, or dropping it, aborts the request.

        Raises InvalidRequest at once for a bad prompt; WorkerFailed or EngineDead when the engine fails.
        """
        self.start()
        completion, request = self._prepare(prompt, params or SamplingParams())
        return Stream(request.id, self._submit([(completion, request)]), self._abort)

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Completes a conversation of {"role", "content"} messages, laid out by the model's chat template."""
        return self.generate(self.encode_chat(messages), params)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation. Raises InvalidRequest when the model has no tokenizer or template."""
        return self._tokenizer("a chat").encode_chat(messages)

    def stats(self) -> dict[str, Any]:
        """Totals since the start: steps, tokens by kind, preemptions, and frame counts and sizes in bytes."""
        engine = self.start()._engine
        counters = engine.scheduler.counters
        return {
            **{name: getattr(counters, name) for name in counters.__dataclass_fields__},
            **{name: getattr(engine.frames, name) for name in engine.frames.__dataclass_fields__},
            "kv_blocks": engine.scheduler.pool.num_blocks,
            "kv_blocks_free": engine.scheduler.pool.num_free,
        }

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises InvalidRequest when this request could not be served, without starting anything."""
        self._prepare(prompt, params)

    # ---- pieces

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool) -> list[Completion]:
        self.start()
        completions: list[Completion] = []
        accepted: list[tuple[Completion, Request]] = []
        for prompt, one in zip(prompts, params, strict=True):
            try:
                completion, request = self._prepare(prompt, one)
                accepted.append((completion, request))
            except InvalidRequest as error:
                completion = Completion(prompt if isinstance(prompt, str) else None)
                completion.fail(error)
            completions.append(completion)
        updates = self._submit(accepted)
        by_id = {request.id: completion for completion, request in accepted}
        try:
            with tqdm(total=len(by_id), unit="request", disable=not use_tqdm or len(by_id) < 2) as bar:
                left = len(by_id)
                while left:
                    update = updates.get()
                    by_id[update.request_id].take(update)
                    if update.finish_reason is not None:
                        left -= 1
                        bar.update()
        except BaseException:  # an interrupt, say: nobody will read these any more
            self._abort(by_id)
            raise
        for completion in completions:
            if completion.error is not None and not isinstance(completion.error, InvalidRequest):
                raise completion.error
        return completions

    def _submit(self, accepted: Sequence[tuple[Completion, Request]]) -> queue.SimpleQueue[Update]:
        engine = self._engine
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        decode = self.model.tokenizer.decode if self.model.tokenizer else None
        for completion, request in accepted:
            completion.submitted = time.perf_counter()
            engine.submit(request, TextStream(decode, request.params.stop), updates.put)
        return updates

    def _abort(self, request_ids: Sequence[str]) -> None:
        if self._engine is not None:
            for request_id in request_ids:
                self._engine.abort(request_id)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[Completion, Request]:
        """Checks a prompt and makes its request. Raises InvalidRequest, naming value and limit."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
        ids = self._tokenizer("a text prompt").encode(prompt) if isinstance(prompt, str) else prompt
        token_ids = _checked_ids(ids, self.model.arch.vocab_size)
        room = self.model.max_model_len - len(token_ids)
        if not token_ids:
            raise InvalidRequest("the prompt is empty: 0 tokens, at least 1 is needed")
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; with at least one new token that is more than the "
                f"context length of {self.model.max_model_len}"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} is more than the {room} tokens left after a prompt of "
                f"{len(token_ids)} in a context length of {self.model.max_model_len}"
            )
        if params.stop and self.model.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this model folder has none")
        end = frozenset() if params.ignore_eos else self.model.end_token_ids
        request = Request(
            id=f"r{next(self._ids)}",
            tokens=token_ids,
            params=params,
            max_tokens=params.max_tokens or min(room, self._cache_room(len(token_ids)), DEFAULT_MAX_TOKENS),
            stop_ids=end | frozenset(params.stop_token_ids),
            seed=(secrets.randbits(64) if params.seed is None else params.seed) % 2**64,
        )
        return Completion(prompt if isinstance(prompt, str) else None, list(token_ids)), request

    def _cache_room(self, num_prompt: int) -> int:
        """New tokens that the KV cache could hold after a prompt; at least 1, and unlimited before it exists."""
        if self._engine is None:
            return self.model.max_model_len
        pool = self._engine.scheduler.pool
        return max(1, pool.num_blocks * pool.block_size + 1 - num_prompt)

    def _tokenizer(self, what: str) -> Any:
        if self.model.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer, and {self.model.folder} has none; send token ids")
        return self.model.tokenizer


def _shut_down(engine: Engine) -> None:
    engine.close()
    engine.executor.close()


def _is_prompt(value: Any) -> bool:
    """A string, or a non-empty sequence of integers."""
    if isinstance(value, str):
        return True
    return (
        isinstance(value, Sequence)
        and not isinstance(value, _BYTES)
        and len(value) > 0
        and all(isinstance(item, Integral) for item in value)
    )


def _single(params: Any) -> SamplingParams:
    if isinstance(params, Sequence):
        if len(params) != 1:
            raise InvalidRequest(f"1 prompt came with {len(params)} sampling parameters")
        return params[0]
    return params or SamplingParams()


def _checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES):
        raise InvalidRequest(f"a prompt must be a string or a list of token ids, got {prompt!r}")
    ids = []
    for position, item in enumerate(prompt):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise InvalidRequest(f"token id at position {position} must be an integer, got {item!r}")
        token_id = int(item)
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {token_id} at position {position} is outside the vocabulary of {vocab_size}"
            )
        ids.append(token_id)
    return ids
