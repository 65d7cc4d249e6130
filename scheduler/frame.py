"""Step plans and results as msgpack frames. Everything is checked when decoded; nothing is ever unpickled.

A frame is a flat list, so that steady decode is a few dozen bytes. Token lists travel as little-endian int32 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from scheduler.logprobs import TokenLogprobs, pack, pack_logprobs, unpack, unpack_logprobs
from scheduler.plan import Admission, Chunk, Extras, StepPlan

_INT32_MAX = 2**31 - 1


class FrameError(RuntimeError):
    """Bytes that are not a frame of ours."""


@dataclass(frozen=True, slots=True)
class StepExtras:
    """What few requests ask for besides tokens.

    logprobs: places among the step's sampled rows, and their tokens' log probabilities.
    prompt_logprobs: (which of the step's chunks, index of the first token in its row, the tokens' log probabilities).
    failures: places among the sampled rows that cannot go on, and why; their tokens mean nothing.
    """

    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank 0's answer to one step: the sampled token ids, in the order of the step's sampled rows.

    seconds: time the worker spent on the step.
    """

    epoch: int
    step: int
    tokens: list[int]
    seconds: float
    extras: StepExtras | None = None


def tokens_crc(tokens: list[int]) -> int:
    """CRC-32 of a step's sampled tokens, as exchanged to prove that all ranks agree."""
    return zlib.crc32(_pack(tokens))


def encode_plan(plan: StepPlan) -> bytes:
    return msgpack.packb(
        [
            plan.epoch,
            plan.step,
            [
                [
                    a.row,
                    _pack(a.tokens),
                    a.seed,
                    a.temperature,
                    a.top_k,
                    a.top_p,
                    a.min_p,
                    a.computed,
                    _packed(a.extras),
                ]
                for a in plan.admissions
            ],
            plan.new_blocks,
            [[c.row, c.start, c.length, c.sample] for c in plan.chunks],
            plan.leave,
            plan.join,
            plan.num_decodes,
            plan.checksum,
            plan.agreed,
        ]
    )


def decode_plan(frame: bytes) -> StepPlan:
    """Raises FrameError for anything that is not a well-formed plan."""
    return _decode(frame, 10, _plan)


def encode_result(result: StepResult) -> bytes:
    extras = result.extras
    packed = extras and [
        [[place, pack_logprobs([entry])] for place, entry in extras.logprobs],
        [[chunk, first, pack_logprobs(entries)] for chunk, first, entries in extras.prompt_logprobs],
        extras.failures,
    ]
    return msgpack.packb([result.epoch, result.step, _pack(result.tokens), result.seconds, packed])


def decode_result(frame: bytes) -> StepResult:
    """Raises FrameError for anything that is not a well-formed result."""
    return _decode(frame, 5, _result)


def _plan(items: list[Any]) -> StepPlan:
    epoch, step, admissions, new_blocks, chunks, leave, join, num_decodes, checksum, agreed = items
    agreed_step, agreed_crc = agreed
    return StepPlan(
        _count(epoch),
        _count(step),
        [_admission(*item) for item in admissions],
        [(_count(row), _counts(blocks)) for row, blocks in new_blocks],
        [_chunk(*item) for item in chunks],
        _counts(leave),
        _counts(join),
        _count(num_decodes),
        _count(checksum, 2**32 - 1),
        (_typed(agreed_step, int), _count(agreed_crc, 2**32 - 1)),
    )


def _result(items: list[Any]) -> StepResult:
    epoch, step, tokens, seconds, extras = items
    extras = None if extras is None else _step_extras(*_typed(extras, list))
    return StepResult(_count(epoch), _count(step), _unpack(tokens), _typed(seconds, float), extras)


def _step_extras(logprobs: Any, prompt_logprobs: Any, failures: Any) -> StepExtras:
    sampled = []
    for place, columns in _typed(logprobs, list):
        (entry,) = unpack_logprobs(columns)
        sampled.append((_count(place), entry))
    return StepExtras(
        sampled,
        [
            (_count(chunk), _count(first), unpack_logprobs(columns))
            for chunk, first, columns in _typed(prompt_logprobs, list)
        ],
        [(_count(place), _typed(reason, str)) for place, reason in _typed(failures, list)],
    )


def _admission(
    row: Any, tokens: Any, seed: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, computed: Any, extras: Any
) -> Admission:
    return Admission(
        _count(row),
        _unpack(tokens),
        _count(seed, 2**64 - 1),
        _typed(temperature, float),
        _count(top_k),
        _typed(top_p, float),
        _typed(min_p, float),
        _count(computed),
        None if extras is None else _extras(*_typed(extras, list)),
    )


def _packed(extras: Extras | None) -> list[Any] | None:
    if extras is None:
        return None
    e = extras
    return [
        *(e.num_prompt, e.frequency_penalty, e.presence_penalty, e.repetition_penalty, _pack(e.bias_ids), e.biases),
        *(e.min_tokens, _pack(e.end_ids), e.logprobs, e.prompt_logprobs, e.scored, e.guide),
    ]


def _extras(
    num_prompt: Any,
    frequency: Any,
    presence: Any,
    repetition: Any,
    bias_ids: Any,
    biases: Any,
    min_tokens: Any,
    end_ids: Any,
    logprobs: Any,
    prompt_logprobs: Any,
    scored: Any,
    guide: Any,
) -> Extras:
    ids, values = _unpack(bias_ids), _floats(biases)
    if len(ids) != len(values):
        raise FrameError(f"{len(ids)} biased ids came with {len(values)} biases")
    if guide is not None:
        kind, text = _typed(guide, list)
        guide = (_typed(kind, str), _typed(text, str))
    return Extras(
        _count(num_prompt),
        *(_typed(frequency, float), _typed(presence, float), _typed(repetition, float), ids, values),
        *(_count(min_tokens), _unpack(end_ids), _optional_count(logprobs), _optional_count(prompt_logprobs)),
        *(_count(scored), guide),
    )


def _chunk(row: Any, start: Any, length: Any, sample: Any) -> Chunk:
    return Chunk(_count(row), _count(start), _count(length), _typed(sample, bool))


def _decode(frame: bytes, length: int, build: Callable[[list[Any]], Any]) -> Any:
    try:
        items = msgpack.unpackb(frame)
        if not isinstance(items, list) or len(items) != length:
            raise FrameError(f"a frame must be a list of {length} items")
        return build(items)
    except FrameError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError(f"malformed frame of {len(frame)} bytes: {error}") from error


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise FrameError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _count(value: Any, high: int = _INT32_MAX) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise FrameError(f"expected an integer in [0, {high}], got {value!r}")
    return value


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _floats(values: Any) -> list[float]:
    return [_typed(value, float) for value in _typed(values, list)]


def _counts(values: Any) -> list[int]:
    return [_count(value) for value in _typed(values, list)]


def _pack(tokens: list[int]) -> bytes:
    return pack("i", tokens)


def _unpack(data: Any) -> list[int]:
    return unpack("i", data)
