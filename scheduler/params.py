"""Sampling parameters of one request, validated where they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from scheduler.guide import Guide, InvalidGuide

DEFAULT_MAX_TOKENS = 128
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
MAX_TEMPERATURE = 1000.0
MAX_COUNT = 2**31 - 1  # counts travel to the workers in 32 bits
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_PRIORITY = 100
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 300
MAX_LOGPROBS = 20


class InvalidRequest(ValueError):
    """A request that cannot be served as asked; the message names the value and the limit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    max_tokens: new tokens at most; None means 128 or the room left in the context, whichever is smaller.
    temperature: 0 takes the most likely token (greedy); higher flattens the distribution, up to 1000.
    top_p: sample from the smallest set of tokens whose probability reaches this, in (0, 1].
    top_k: sample from the k most likely tokens; 0 means all.
    min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
    seed: the same seed gives the same tokens whatever else runs; None draws a fresh one.
    stop: strings that end the text; they are cut from it.
    stop_token_ids: further token ids that end the request, like the model's own end tokens; 1,024 at most.
    ignore_eos: go on after the model's end tokens.
    priority: lower is served first where the engine's policy is `priority`; between -100 and 100.
    cache_salt: requests share cached prefixes only with those of the same salt, so that none can probe another's.
    frequency_penalty: taken from a token's logit for each time it is in the output, in [-2, 2].
    presence_penalty: taken from the logits of the tokens that are in the output, in [-2, 2].
    repetition_penalty: divides the positive and multiplies the negative logits of the tokens in prompt or output,
        in (0, 2]; 1 is off.
    logit_bias: added to the logits of these token ids, in [-100, 100], at most 300 of them; ids may be decimal strings.
    logprobs: give each output token's log probability and those of so many most likely ones, 0 to 20; None: none.
    prompt_logprobs: the same for each prompt token but the first.
    min_tokens: no end token, and no stop string in the text after so many tokens only.
    guide: what the output must match, a Guide or a mapping with one of its fields.

    Raises InvalidRequest for a value out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    guide: Guide | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1, high=MAX_COUNT)
        _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _integer("top_k", self.top_k, low=0, high=MAX_COUNT)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _integer("seed", self.seed, low=SEED_MIN, high=SEED_MAX)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        _integer("priority", self.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InvalidRequest(f"cache_salt must be a string, got {self.cache_salt!r}")
        _number("frequency_penalty", self.frequency_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
        _number("presence_penalty", self.presence_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=MAX_PENALTY, low_open=True)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        _integer("min_tokens", self.min_tokens, low=0, high=MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.guide is not None:
            try:
                object.__setattr__(self, "guide", Guide.of(self.guide))
            except InvalidGuide as error:
                raise InvalidRequest(str(error)) from error

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a decoded JSON object. Raises InvalidRequest for an unknown name or a bad value."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidRequest(f"unknown sampling field {', '.join(map(repr, unknown))}; known: {sorted(known)}")
        return cls(**values)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}")


def _number(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}")
    # Written so that NaN, which compares false with everything, is refused too.
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:
        raise InvalidRequest(f"{name} must be in {'(' if low_open else '['}{low:g}, {high:g}], got {value}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value if value is not None else ()
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"{name} must be a string or a list of strings, got {value!r}")
    if any(item == "" for item in items):
        raise InvalidRequest(f"{name} must not contain the empty string, got {value!r}")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{name} may hold at most {MAX_STOP_STRINGS} strings, got {len(items)}")
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    items = value if value is not None else ()
    if not isinstance(items, list | tuple):
        raise InvalidRequest(f"{name} must be a list of token ids, got {value!r}")
    if len(items) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"{name} may hold at most {MAX_STOP_TOKENS} token ids, got {len(items)}")
    for item in items:
        _integer(f"{name} entry", item, low=0, high=MAX_COUNT)
    return tuple(items)


def _biases(value: object) -> dict[int, float] | None:
    """Token id -> bias, with the ids as integers."""
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"logit_bias must be a mapping of token ids to numbers, got {value!r}")
    if len(value) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias may hold at most {MAX_BIASED_TOKENS} tokens, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has no other keys than strings. Long ones are no token ids, and slow to convert.
        is_decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token_id = int(key) if is_decimal else key
        _integer("logit_bias token id", token_id, low=0, high=MAX_COUNT)
        if token_id in biases:
            raise InvalidRequest(f"logit_bias names token id {token_id} twice")
        _number(f"logit_bias of token {token_id}", bias, low=-MAX_BIAS, high=MAX_BIAS)
        biases[token_id] = float(bias)
    return biases
