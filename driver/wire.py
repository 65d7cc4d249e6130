"""What a client handle and the driver say to each other: msgpack lists `[kind, ...]`, checked where they come in.

    handle -> driver                                driver -> handle
    hello   token, version, owner                   welcome   about
    ask     number, body                            accepted  number, prompt token ids
    abort   number                                  updates   [[number, text, token ids, finish reason,
    query   number, "stats", "health", "model"                  stop reason, cached tokens,
                                                              their and the prompt's log
                                                              probabilities], ...]
    ping                                            refused   number, kind, message
    bye                                             answer    number, mapping
                                                    pong
                                                    stranger  (say hello first, and ask again)

A number is the handle's own for a request; the driver knows requests by (session, number).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from scheduler.logprobs import TokenLogprobs, pack_logprobs, unpack_logprobs
from scheduler.params import InvalidRequest, SamplingParams

VERSION = 2
MAX_MESSAGE_BYTES = 64 << 20
MAX_NUMBER = 2**63 - 1

# Both sides say something at least this often, and take silence for the other's death.
PING_SECONDS = 1.0
SILENCE_SECONDS = 5.0


class WireError(RuntimeError):
    """A message that does not follow the protocol."""


class Overloaded(RuntimeError):
    """The service has as many requests waiting as it may have; try again later."""


class ServiceUnavailable(RuntimeError):
    """The service cannot be reached, is shutting down, or has failed; the message says which."""


class ShutDown(ServiceUnavailable):
    """The service ended before the request did."""


class RequestFailed(RuntimeError):
    """The service accepted a request and could not finish it."""


REFUSALS: dict[str, type[Exception]] = {
    "invalid": InvalidRequest,
    "overloaded": Overloaded,
    "unavailable": ServiceUnavailable,
    "failed": RequestFailed,
}


def refusal_kind(error: Exception) -> str:
    """The name under which an error crosses the wire."""
    return next((kind for kind, cls in REFUSALS.items() if isinstance(error, cls)), "failed")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a handle puts it.

    prompt: text, token ids, or a conversation's messages ({"role", "content"}).
    produced, seen: output tokens and characters that the handle has already, where it asks again after a break.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    params: SamplingParams
    produced: list[int] = field(default_factory=list)
    seen: int = 0

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)


def ask_body(ask: Ask) -> dict[str, Any]:
    params = {name: value for name, value in asdict(ask.params).items() if value is not None}
    if "logit_bias" in params:  # keys that are no strings are refused where messages are decoded
        params["logit_bias"] = {str(token_id): bias for token_id, bias in params["logit_bias"].items()}
    return {"prompt": ask.prompt, "params": params, "produced": ask.produced, "seen": ask.seen}


def read_ask(body: Any) -> Ask:
    """Raises InvalidRequest for what is not a request."""
    if not isinstance(body, dict) or set(body) - {"prompt", "params", "produced", "seen"}:
        raise InvalidRequest("a request must be a mapping of prompt, params, produced and seen")
    params, produced, seen = body.get("params", {}), body.get("produced", []), body.get("seen", 0)
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise InvalidRequest(f"params must be a mapping with names as keys, got {type(params).__name__}")
    if not isinstance(produced, list) or type(seen) is not int or seen < 0:
        raise InvalidRequest("produced must be a list of token ids and seen a number of characters")
    ask = Ask(body.get("prompt"), SamplingParams.from_mapping(params), produced, seen)
    if ask.is_chat and not all(isinstance(message, dict) for message in ask.prompt):
        raise InvalidRequest("the messages of a conversation must all be mappings")
    return ask


def pack_update(
    number: int,
    text: str,
    token_ids: list[int],
    finish_reason: str | None,
    stop_reason: int | str | None,
    cached_tokens: int,
    logprobs: list[TokenLogprobs] | None,
    prompt_logprobs: list[TokenLogprobs | None] | None,
) -> list[Any]:
    """An item of an updates message, with fields as in driver.engine.Update."""
    scores = [
        None if logprobs is None else pack_logprobs(logprobs),
        None if prompt_logprobs is None else pack_logprobs(prompt_logprobs[1:]),
    ]
    return [number, text, token_ids, finish_reason, stop_reason, cached_tokens, *scores]


def read_update(item: Any) -> list[Any]:
    """The arguments of `pack_update`. Raises WireError for what it does not make."""
    if not isinstance(item, list) or len(item) != 8:
        raise WireError("an update must be a list of 8 items")
    number, text, token_ids, finish_reason, stop_reason, cached_tokens, logprobs, prompt_logprobs = item
    if not (_is_a(number, int) and isinstance(text, str) and _is_a(cached_tokens, int)):
        raise WireError("an update must begin with a number and a text and count its cached tokens")
    if not isinstance(token_ids, list) or not all(_is_a(token, int) for token in token_ids):
        raise WireError("an update must carry a list of token ids")
    if not isinstance(finish_reason, str | None) or not isinstance(stop_reason, str | int | None):
        raise WireError("an update's finish reason must be a name, and its stop reason a string or a token id")
    try:
        logprobs = None if logprobs is None else unpack_logprobs(logprobs)
        prompt_logprobs = None if prompt_logprobs is None else [None, *unpack_logprobs(prompt_logprobs)]
    except (ValueError, TypeError) as error:
        raise WireError(f"an update's log probabilities cannot be read: {error}") from error
    if logprobs is not None and len(logprobs) != len(token_ids):
        raise WireError(f"an update has {len(logprobs)} log probabilities for {len(token_ids)} tokens")
    return [number, text, token_ids, finish_reason, stop_reason, cached_tokens, logprobs, prompt_logprobs]


def encode(kind: str, *items: Any) -> bytes:
    return msgpack.packb([kind, *items])


def decode(frame: bytes, kinds: Mapping[str, tuple[type, ...]]) -> tuple[str, list[Any]]:
    """A message's kind and items. kinds: the types of each kind's items. Raises WireError for anything else."""
    try:
        message = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"{len(frame)} bytes that are not msgpack: {error}") from error
    if not isinstance(message, list) or not message or not isinstance(message[0], str) or message[0] not in kinds:
        raise WireError("a message must be a list that begins with a kind")
    kind, items = message[0], message[1:]
    expected = kinds[kind]
    if len(items) != len(expected) or not all(map(_is_a, items, expected)):
        raise WireError(f"a {kind} message must carry {[cls.__name__ for cls in expected]}")
    return kind, items


def _is_a(item: Any, cls: type) -> bool:
    if cls is int:
        return type(item) is int and 0 <= item <= MAX_NUMBER
    return cls is object or isinstance(item, cls)


FROM_HANDLE: dict[str, tuple[type, ...]] = {
    "hello": (bytes, int, bool),
    "ask": (int, object),
    "abort": (int,),
    "query": (int, str),
    "ping": (),
    "bye": (),
}
FROM_DRIVER: dict[str, tuple[type, ...]] = {
    "welcome": (dict,),
    "accepted": (int, list),
    "updates": (list,),
    "refused": (int, str, str),
    "answer": (int, dict),
    "pong": (),
    "stranger": (),
}
