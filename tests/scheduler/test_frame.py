"""Frames: what is sent arrives unchanged, is small, and nothing else is taken for one."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.frame import (
    FrameError,
    StepExtras,
    StepResult,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
)
from scheduler.logprobs import TokenLogprobs
from scheduler.plan import Admission, Chunk, Extras, StepPlan

INT32 = 2**31 - 1
counts = st.integers(0, INT32)
tokens = st.lists(counts, max_size=20)
crcs = st.integers(0, 2**32 - 1)
numbers = st.floats(allow_nan=False)
optional = st.none() | counts


@st.composite
def all_extras(draw: st.DrawFn) -> Extras:
    biases = draw(st.lists(numbers, max_size=3))
    ids = draw(st.lists(counts, min_size=len(biases), max_size=len(biases)))
    return Extras(
        *(draw(counts), draw(numbers), draw(numbers), draw(numbers), ids, biases),
        *(draw(counts), draw(tokens), draw(optional), draw(optional), draw(counts)),
        draw(st.none() | st.tuples(st.text(max_size=5), st.text(max_size=5))),
    )


@st.composite
def all_entries(draw: st.DrawFn, most: int = 3) -> list[TokenLogprobs]:
    pairs = st.tuples(counts, st.floats(allow_nan=False, width=32))
    width = draw(st.integers(0, 3))
    return [
        TokenLogprobs(*pair, draw(st.lists(pairs, min_size=width, max_size=width)))
        for pair in draw(st.lists(pairs, min_size=1, max_size=most))
    ]


plans = st.builds(
    StepPlan,
    epoch=counts,
    step=counts,
    admissions=st.lists(
        st.builds(
            Admission,
            *(counts, tokens, st.integers(0, 2**64 - 1), numbers, counts, numbers, numbers, counts),
            st.none() | all_extras(),
        ),
        max_size=3,
    ),
    new_blocks=st.lists(st.tuples(counts, st.lists(counts, max_size=5)), max_size=3),
    chunks=st.lists(st.builds(Chunk, counts, counts, counts, st.booleans()), max_size=3),
    leave=st.lists(counts, max_size=5),
    join=st.lists(counts, max_size=5),
    num_decodes=counts,
    checksum=crcs,
    agreed=st.tuples(st.integers(-1, INT32), crcs),
)
step_extras = st.builds(
    StepExtras,
    st.lists(st.tuples(counts, all_entries(1).map(lambda entries: entries[0])), max_size=3),
    st.lists(st.tuples(counts, counts, all_entries()), max_size=2),
    st.lists(st.tuples(counts, st.text(max_size=5)), max_size=2),
)
results = st.builds(StepResult, counts, counts, tokens, numbers, st.none() | step_extras)

FULL_EXTRAS = Extras(2, 0.5, -0.5, 1.5, [7, 9], [1.0, -100.0], 3, [256], 20, 0, 1, ("regex", "a+"))
ENTRY = TokenLogprobs(5, -0.5, [(5, -0.5), (300, -1.25)])

FULL_PLAN = StepPlan(
    epoch=1,
    step=7,
    admissions=[Admission(3, [1, 2, 300], 2**64 - 1, 0.5, 40, 0.9, 0.1, 0, FULL_EXTRAS)],
    new_blocks=[(3, [9, 8])],
    chunks=[Chunk(3, 0, 3, True)],
    leave=[2],
    join=[4],
    num_decodes=1,
    checksum=2**32 - 1,
    agreed=(5, 17),
)
FULL_RESULT = StepResult(1, 7, [5, 300], 0.25, StepExtras([(1, ENTRY)], [(0, 1, [ENTRY, ENTRY])], [(0, "why")]))


@settings(deadline=None)
@given(plans)
def test_plan_arrives_unchanged(plan: StepPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


@settings(deadline=None)
@given(results)
def test_result_arrives_unchanged(result: StepResult) -> None:
    assert decode_result(encode_result(result)) == result


def test_steady_decode_fits_in_a_hundred_bytes() -> None:
    steady = StepPlan(epoch=9, step=10**8, num_decodes=256, checksum=2**32 - 1, agreed=(10**8 - 2, 2**32 - 1))
    assert len(encode_plan(steady)) < 100
    # A sixteenth of 64 rows needs a new block in each step.
    growing = StepPlan(9, 10**8, new_blocks=[(row, [10**6 + row]) for row in range(4)], num_decodes=64)
    assert len(encode_plan(growing)) < 100


def test_a_plan_has_no_room_for_more_than_it_says() -> None:
    """A prompt costs four bytes a token, so that a long one does not swell the frame."""
    plan = StepPlan(0, 0, [Admission(0, [INT32] * 1000, 0, 0.0, 0, 1.0, 0.0)])
    assert len(encode_plan(plan)) < 4100


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x9a" + b"\xc0" * 10)
@example(b"\x94\x00\x00\xc4\x03abc\xca\x00\x00\x00\x00")  # three bytes are no int32
@example(b"\xdd\xff\xff\xff\xff")  # a list said to have four thousand million items
@example(b"\x91" * 5000)
@example(b"\xd6\xff\x00\x00\x00\x00")  # msgpack's timestamp
def test_random_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    for decode, kind in ((decode_plan, StepPlan), (decode_result, StepResult)):
        try:
            decoded = decode(data)
        except FrameError:
            continue
        assert isinstance(decoded, kind)


@settings(deadline=None, max_examples=400)
@given(plans, st.data())
def test_mutated_plan_is_refused_or_well_formed(plan: StepPlan, data: st.DataObject) -> None:
    frame = bytearray(encode_plan(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, 3))
    frame = bytes(frame[start : data.draw(st.integers(start, len(frame)))]) + data.draw(st.binary(max_size=4))
    try:
        decoded = decode_plan(frame)
    except FrameError:
        return
    _assert_well_formed(decoded)


# Anything msgpack can carry, in the place of any item of a plan or a result.
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(),
    lambda children: st.lists(children, max_size=8) | st.dictionaries(st.text(max_size=2), children, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 9), values)
def test_wrong_item_in_a_plan_is_refused_or_well_formed(place: int, value: Any) -> None:
    items = msgpack.unpackb(encode_plan(FULL_PLAN))
    items[place] = value
    try:
        decoded = decode_plan(msgpack.packb(items))
    except FrameError:
        return
    _assert_well_formed(decoded)


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 11), values)
def test_wrong_item_in_extras_is_refused_or_well_formed(place: int, value: Any) -> None:
    items = msgpack.unpackb(encode_plan(FULL_PLAN))
    items[2][0][8][place] = value
    try:
        extras = decode_plan(msgpack.packb(items)).admissions[0].extras
    except FrameError:
        return
    assert len(extras.bias_ids) == len(extras.biases)
    assert all(type(bias) is float for bias in extras.biases)
    assert extras.guide is None or all(type(part) is str for part in extras.guide)
    assert all(v is None or 0 <= v <= INT32 for v in (extras.logprobs, extras.prompt_logprobs, extras.scored))


@pytest.mark.parametrize("columns", [[b""], [b"1234", b"", b"", b""], [b"1234"] * 3, [b"12345678"] * 2 + [b"1234"] * 2])
def test_columns_that_do_not_fit_together_are_refused(columns: list[bytes]) -> None:
    items = msgpack.unpackb(encode_result(FULL_RESULT))
    items[4][1][0][2] = columns
    with pytest.raises(FrameError):
        decode_result(msgpack.packb(items))


def test_extras_cost_a_byte_where_none_are_asked_for() -> None:
    bare, full = (Admission(3, [1], 0, 0.0, 0, 1.0, 0.0, 0, extras) for extras in (None, FULL_EXTRAS))
    assert len(encode_plan(StepPlan(0, 0, [bare]))) < 60
    assert len(encode_plan(StepPlan(0, 0, [full]))) < 160
    assert len(encode_result(StepResult(1, 7, [5], 0.25))) < 25


@settings(deadline=None)
@given(st.integers(0, 4), values)
def test_wrong_item_in_a_result_is_refused_or_well_formed(place: int, value: Any) -> None:
    items = msgpack.unpackb(encode_result(FULL_RESULT))
    items[place] = value
    try:
        decoded = decode_result(msgpack.packb(items))
    except FrameError:
        return
    assert all(type(token) is int for token in decoded.tokens)
    assert type(decoded.seconds) is float
    assert 0 <= decoded.epoch <= INT32
    assert 0 <= decoded.step <= INT32


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused(protocol: int) -> None:
    plain = ([0] * 10, [0, 0, b"", 0.0, None])
    for value in plain if protocol < 2 else (*plain, FULL_PLAN, FULL_RESULT):  # slots need protocol 2
        for decode in (decode_plan, decode_result):
            with pytest.raises(FrameError):
                decode(pickle.dumps(value, protocol))


def test_the_two_kinds_of_frame_are_not_confused() -> None:
    with pytest.raises(FrameError, match="10 items"):
        decode_plan(encode_result(FULL_RESULT))
    with pytest.raises(FrameError, match="5 items"):
        decode_result(encode_plan(FULL_PLAN))


def test_every_truncation_is_refused() -> None:
    for frame, decode in ((encode_plan(FULL_PLAN), decode_plan), (encode_result(FULL_RESULT), decode_result)):
        for length in range(len(frame)):
            with pytest.raises(FrameError):
                decode(frame[:length])
        with pytest.raises(FrameError):
            decode(frame + b"\x00")


def _assert_well_formed(plan: StepPlan) -> None:
    small = [plan.epoch, plan.step, plan.num_decodes, *plan.leave, *plan.join]
    small += [value for row, blocks in plan.new_blocks for value in (row, *blocks)]
    small += [value for chunk in plan.chunks for value in (chunk.row, chunk.start, chunk.length)]
    small += [value for admission in plan.admissions for value in (admission.row, admission.top_k)]
    assert all(type(value) is int and 0 <= value <= INT32 for value in small)
    assert all(type(chunk.sample) is bool for chunk in plan.chunks)
    for admission in plan.admissions:
        assert all(type(token) is int for token in admission.tokens)
        assert 0 <= admission.seed < 2**64
        assert all(type(v) is float for v in (admission.temperature, admission.top_p, admission.min_p))
    assert 0 <= plan.checksum < 2**32
    assert 0 <= plan.agreed[1] < 2**32
    if not any(math.isnan(v) for a in plan.admissions for v in (a.temperature, a.top_p, a.min_p)):
        assert decode_plan(encode_plan(plan)) == plan
