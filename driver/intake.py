"""From what a caller asks to a request that the engine takes: every check on prompt and parameters, in one place."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from driver.results import Prompt
from driver.setup import Model
from driver.text import TextStream
from driver.tokenizer import Tokenizer
from scheduler.params import DEFAULT_MAX_TOKENS, InvalidRequest, SamplingParams
from scheduler.request import Request
from workers.grammar import GuideError, GuideMaker

BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but no token ids


class Intake:
    """Checks requests against a model. kv_tokens: what the KV cache holds, None while it is not there yet."""

    def __init__(self, model: Model, kv_tokens: int | None = None) -> None:
        self.model = model
        self.kv_tokens = kv_tokens
        self._guide_fault = functools.lru_cache(maxsize=128)(self._try_guide)
        self._guides = GuideMaker(lambda: model.folder, model.arch.vocab_size, model.end_token_ids)

    def tokenizer(self, what: str) -> Tokenizer:
        if self.model.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer, and {self.model.folder} has none; send token ids")
        return self.model.tokenizer

    def text_stream(self, request: Request) -> TextStream:
        decode = self.model.tokenizer.decode if self.model.tokenizer else None
        return TextStream(decode, request.params.stop, request.params.min_tokens)

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams, produced: Sequence[int] = ()) -> Request:
        """Makes a request. Raises InvalidRequest, naming value and limit.

        produced: output tokens that an earlier run of the same request has yielded already; it goes on behind them.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        vocab_size = self.model.arch.vocab_size
        token_ids = checked_ids(ids, vocab_size)
        room = self._room(token_ids, params)
        if params.stop and self.model.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this model folder has none")
        _check_ids(params, vocab_size)
        default = max(DEFAULT_MAX_TOKENS, params.min_tokens)
        max_tokens = params.max_tokens or min(room, self._cache_room(len(token_ids)), default)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens {params.min_tokens} is more than the {max_tokens} tokens that there is room for"
            )
        earlier = checked_ids(produced, vocab_size)
        if len(earlier) > max_tokens:
            raise InvalidRequest(f"{len(earlier)} tokens have been produced already, more than max_tokens {max_tokens}")
        # A guide's output ends where nothing more fits it; going on would add nothing but end tokens.
        end = frozenset() if params.ignore_eos and params.guide is None else self.model.end_token_ids
        self._check_guide(params)
        return Request(
            id=request_id,
            tokens=token_ids + earlier,
            params=params,
            max_tokens=max_tokens,
            stop_ids=end | frozenset(params.stop_token_ids),
            seed=(secrets.randbits(64) if params.seed is None else params.seed) % 2**64,
            num_prompt=len(token_ids),
        )

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation. Raises InvalidRequest when the model has no tokenizer or template."""
        return self.tokenizer("a chat").encode_chat(messages, self.model.max_model_len)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer("a text prompt").encode(text, most_tokens=self.model.max_model_len)

    def _check_guide(self, params: SamplingParams) -> None:
        if params.guide is None:
            return
        self.tokenizer("a guide")
        reason = self._guide_fault(params.guide.kind, params.guide.text)
        if reason is not None:
            raise InvalidRequest(f"guide's {params.guide.kind} cannot be used: {reason}")

    def _try_guide(self, kind: str, text: str) -> str | None:
        """What is wrong with a guide, or None."""
        try:
            self._guides.check(kind, text)
        except GuideError as error:
            return str(error)
        return None

    def _room(self, token_ids: list[int], params: SamplingParams) -> int:
        """New tokens that the context length leaves."""
        max_model_len = self.model.max_model_len
        room = max_model_len - len(token_ids)
        if not token_ids:
            raise InvalidRequest("the prompt is empty: 0 tokens, at least 1 is needed")
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; with at least one new token that is more than the "
                f"context length of {max_model_len}"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} is more than the {room} tokens left after a prompt of "
                f"{len(token_ids)} in a context length of {max_model_len}"
            )
        return room

    def _cache_room(self, num_prompt: int) -> int:
        """New tokens that the KV cache could hold after a prompt; at least 1, and unlimited before it exists."""
        return self.model.max_model_len if self.kv_tokens is None else max(1, self.kv_tokens + 1 - num_prompt)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for what, ids in (
        ("logit_bias token id", params.logit_bias or ()),
        ("stop_token_ids entry", params.stop_token_ids),
    ):
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequest(f"{what} {token_id} is outside the vocabulary of {vocab_size}")


def checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Token ids as a list of int. Raises InvalidRequest for anything else."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
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


def is_prompt(value: Any) -> bool:
    """A string, or a non-empty sequence of integers."""
    if isinstance(value, str):
        return True
    return (
        isinstance(value, Sequence)
        and not isinstance(value, BYTES)
        and len(value) > 0
        and all(isinstance(item, Integral) for item in value)
    )


def paired(prompts: Any, params: Any) -> tuple[list[Prompt], list[SamplingParams], bool]:
    """One prompt or many with one set of parameters or as many, as two lists, and whether it was one prompt.

    Raises InvalidRequest when they do not go together.
    """
    if is_prompt(prompts):
        if isinstance(params, Sequence):
            if len(params) != 1:
                raise InvalidRequest(f"1 prompt came with {len(params)} sampling parameters")
            params = params[0]
        return [prompts], [params or SamplingParams()], True
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise InvalidRequest(f"prompts must be a string, token ids, or a list of those, got {prompts!r}")
    many = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
    if len(many) != len(prompts):
        raise InvalidRequest(f"{len(prompts)} prompts came with {len(many)} sampling parameters")
    return list(prompts), many, False
