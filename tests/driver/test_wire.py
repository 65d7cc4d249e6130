"""What handles and driver say to each other: it arrives as it left, and anything else is an error and no more."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver import wire
from driver.wire import Ask, WireError, ask_body, decode, encode, read_ask
from scheduler.logprobs import TokenLogprobs
from scheduler.params import MAX_COUNT, SEED_MAX, SEED_MIN, InvalidRequest, SamplingParams

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
NUMBERS = st.integers(0, wire.MAX_NUMBER)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | TEXT
    | st.binary(max_size=20)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | st.binary(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["prompt", "params", "produced", "seen", "other", *SamplingParams.__dataclass_fields__])
# Mappings that look like requests, so that the fuzz gets beyond the first check.
BODIES = VALUES | st.dictionaries(FIELDS, VALUES, max_size=5)
BODIES |= st.fixed_dictionaries({"prompt": VALUES, "params": st.dictionaries(FIELDS | TEXT, VALUES, max_size=4)})
KINDS = (wire.FROM_HANDLE, wire.FROM_DRIVER)


def items_of(types: tuple[type, ...]) -> st.SearchStrategy[list[Any]]:
    of = {
        int: NUMBERS,
        str: TEXT,
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        dict: st.dictionaries(TEXT, NUMBERS, max_size=3),
        list: st.lists(NUMBERS, max_size=5),
        object: VALUES,
    }
    return st.tuples(*(of[cls] for cls in types)).map(list)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, MAX_COUNT),
    temperature=st.floats(0, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, MAX_COUNT),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(SEED_MIN, SEED_MAX) | st.sampled_from([SEED_MIN, SEED_MAX, 2**63, -1, 0]),
    stop=st.lists(TEXT.filter(bool), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, MAX_COUNT), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    priority=st.integers(-100, 100),
    cache_salt=st.none() | TEXT,
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, MAX_COUNT), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    guide=st.sampled_from(
        [
            None,
            {"json_object": True},
            {"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}},
            {"regex": "[ab]+"},
            {"choice": ["yes", "n\u00f6"]},
            {"grammar": 'start: "a"'},
        ]
    ),
)
IDS = st.lists(st.integers(0, 2**31), max_size=8)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), min_size=1, max_size=3)


# ---- what is said arrives


@pytest.mark.parametrize("kinds", KINDS)
@given(data=st.data())
def test_every_kind_of_message_arrives_as_it_left(kinds: dict[str, tuple[type, ...]], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(kinds)))
    items = data.draw(items_of(kinds[kind]))
    found, arrived = decode(encode(kind, *items), kinds)
    assert found == kind
    assert repr(arrived) == repr(items)  # NaN is not equal to itself


@given(prompt=TEXT | IDS | MESSAGES, params=PARAMS, produced=IDS, seen=NUMBERS)
def test_requests_arrive_as_they_left(prompt: Any, params: SamplingParams, produced: list[int], seen: int) -> None:
    ask = Ask(prompt, params, produced, seen)
    _, (number, body) = decode(encode("ask", 7, ask_body(ask)), wire.FROM_HANDLE)
    assert number == 7
    assert read_ask(body) == ask
    assert read_ask(body).is_chat == (bool(prompt) and isinstance(prompt, list) and isinstance(prompt[0], dict))


def test_parameters_at_the_ends_of_their_range_arrive() -> None:
    for seed in (SEED_MIN, -1, 0, 2**63, SEED_MAX):
        params = SamplingParams(seed=seed, stop=("a", "\n\n"), stop_token_ids=(0, MAX_COUNT), cache_salt="")
        arrived = read_ask(msgpack.unpackb(msgpack.packb(ask_body(Ask("x", params))))).params
        assert arrived == params
        assert isinstance(arrived.stop, tuple)
        assert isinstance(arrived.stop_token_ids, tuple)


@pytest.mark.parametrize("kind", wire.REFUSALS)
def test_an_error_is_the_same_on_the_other_side(kind: str) -> None:
    assert wire.refusal_kind(wire.REFUSALS[kind]("reason")) == kind


def test_an_unknown_error_is_a_failure() -> None:
    assert wire.refusal_kind(KeyError("x")) == "failed"


@st.composite
def updates(draw: st.DrawFn) -> tuple[Any, ...]:
    pairs = st.tuples(st.integers(0, MAX_COUNT), st.floats(width=32, allow_nan=False))
    width = draw(st.integers(0, 3))
    entry = st.tuples(pairs, st.lists(pairs, min_size=width, max_size=width)).map(
        lambda drawn: TokenLogprobs(*drawn[0], drawn[1])
    )
    token_ids = draw(IDS)
    logprobs = draw(st.none() | st.lists(entry, min_size=len(token_ids), max_size=len(token_ids)))
    prompt = draw(st.none() | st.lists(entry, max_size=4).map(lambda entries: [None, *entries]))
    reason = draw(st.sampled_from([(None, None), ("stop", "\n"), ("stop", 7), ("length", None)]))
    return (7, draw(TEXT), token_ids, *reason, draw(NUMBERS), logprobs, prompt)


@given(update=updates())
def test_updates_arrive_as_they_left(update: tuple[Any, ...]) -> None:
    _, ((item,),) = decode(encode("updates", [wire.pack_update(*update)]), wire.FROM_DRIVER)
    assert tuple(wire.read_update(item)) == update


@given(place=st.integers(0, 7), value=VALUES)
def test_a_damaged_update_is_an_error(place: int, value: Any) -> None:
    entry = TokenLogprobs(5, -0.5, [(5, -0.5)])
    item = wire.pack_update(7, "a", [5], "stop", "a", 0, [entry], [None, entry])
    item[place] = value
    try:
        read = wire.read_update(msgpack.unpackb(msgpack.packb(item)))
    except WireError:
        return
    assert read[6] is None or len(read[6]) == len(read[2])
    for scores in (read[6], read[7]):
        assert scores is None or all(one is None or isinstance(one, TokenLogprobs) for one in scores)


def test_as_many_log_probabilities_as_tokens_arrive() -> None:
    item = wire.pack_update(7, "", [5, 6], None, None, 0, [TokenLogprobs(5, -0.5)], None)
    with pytest.raises(WireError, match="1 log probabilities for 2 tokens"):
        wire.read_update(item)


# ---- anything else is refused


def refuses_or_reads(frame: bytes) -> None:
    for kinds in KINDS:
        try:
            kind, items = decode(frame, kinds)
        except WireError:
            continue
        assert len(items) == len(kinds[kind])
        for item, cls in zip(items, kinds[kind], strict=True):
            assert isinstance(item, cls)
            assert cls is not int or (type(item) is int and 0 <= item <= wire.MAX_NUMBER)


@given(frame=st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error(frame: bytes) -> None:
    refuses_or_reads(frame)


@given(kind=st.sampled_from(sorted({*wire.FROM_HANDLE, *wire.FROM_DRIVER})), values=st.lists(VALUES, max_size=7))
def test_arbitrary_items_are_an_error(kind: str, values: list[Any]) -> None:
    refuses_or_reads(msgpack.packb([kind, *values]))


@given(data=st.data(), cut=st.integers(0, 100), flip=st.integers(1, 255))
def test_damaged_messages_are_an_error(data: st.DataObject, cut: int, flip: int) -> None:
    frame = encode("ask", 1, ask_body(Ask(data.draw(TEXT | IDS), data.draw(PARAMS))))
    at = cut % len(frame)
    refuses_or_reads(frame[:at])
    refuses_or_reads(frame + frame[:1])
    refuses_or_reads(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :])


@settings(max_examples=400)
@given(body=BODIES)
def test_arbitrary_bodies_are_an_error(body: Any) -> None:
    arrived = msgpack.unpackb(msgpack.packb(body))
    try:
        ask = read_ask(arrived)
    except InvalidRequest:
        return
    assert isinstance(ask.params, SamplingParams)
    assert isinstance(ask.produced, list)
    assert type(ask.seen) is int
    assert ask.seen >= 0


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (["ask", True, {}], "ask message must carry"),
        (["ask", -1, {}], "ask message must carry"),
        (["ask", 2**63, {}], "ask message must carry"),
        (["ask", 1], "ask message must carry"),
        (["ping", 1], "ping message must carry"),
        (["hello", "text", 1, True], "hello message must carry"),
        (["hello", b"", 1, 1], "hello message must carry"),
        (["pong"], "begins with a kind"),
        ([b"ping"], "begins with a kind"),
        ([[]], "begins with a kind"),
        ([], "begins with a kind"),
        ({"ask": 1}, "begins with a kind"),
        (None, "begins with a kind"),
    ],
)
def test_messages_that_break_the_protocol_are_named(items: Any, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(msgpack.packb(items), wire.FROM_HANDLE)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "must be a mapping"),
        ({"prompt": "a", "more": 1}, "must be a mapping of prompt, params"),
        ({b"prompt": "a"}, "must be a mapping of prompt, params"),
        ({"prompt": "a", "params": []}, "params must be a mapping"),
        ({"prompt": "a", "params": {b"seed": 1, "x": 2}}, "names as keys"),
        ({"prompt": "a", "params": {"speed": 1}}, "unknown sampling field 'speed'"),
        ({"prompt": "a", "params": {"seed": 1.5}}, "seed must be an integer"),
        ({"prompt": "a", "produced": None}, "produced must be a list"),
        ({"prompt": "a", "seen": -1}, "seen a number"),
        ({"prompt": "a", "seen": True}, "seen a number"),
        ({"prompt": [{"role": "user"}, "b"]}, "must all be mappings"),
    ],
)
def test_bodies_that_are_no_request_are_named(body: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read_ask(body)


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_no_number_in_a_frame_makes_it_allocate(header: bytes) -> None:
    """A header that announces four thousand million items in a frame of a few bytes."""
    for frame in (header, b"\x92\xa3ask" + header, b"\x93\xa3ask\x01" + header + b"\x01" * 100):
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                decode(frame, wire.FROM_HANDLE)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000, wire.FROM_HANDLE)
    with pytest.raises(WireError):
        decode(b"\x93\xa3ask\x01" + b"\x91" * 100_000 + b"\x01", wire.FROM_HANDLE)
