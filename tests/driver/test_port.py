"""The port and its handles: those that die, stop, fall silent, or do not behave."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from driver import port as port_module
from driver import wire
from driver.llm import LLM
from scheduler.params import SamplingParams
from tests.driver.serving import (
    PROMPT,
    Brake,
    Place,
    all_free,
    greedy_params,
    open_place,
    wait_until,
)

# A handle in a process of its own, which streams and tells how it went.
SCRIPT = """
import pickle, sys
from driver import wire
wire.PING_SECONDS, wire.SILENCE_SECONDS, address, prompt, params = pickle.loads(bytes.fromhex(sys.argv[1]))
from driver.handle import Client
client = Client(lambda: address)
tokens, text = [], ""
for piece in client.stream(prompt, params):
    tokens += piece.token_ids
    text += piece.text
    print("piece", flush=True)
print(repr((tokens, text, piece.finish_reason, client.reconnections)), flush=True)
"""


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed sooner. To be asked for before a place."""
    monkeypatch.setattr(wire, "PING_SECONDS", 0.3)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 1.5)


@contextmanager
def other_process(place: Place, params: SamplingParams) -> Iterator[subprocess.Popen]:
    arguments = (wire.PING_SECONDS, wire.SILENCE_SECONDS, place.port.address, PROMPT, params)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, pickle.dumps(arguments).hex()], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ---- handles that die, stop or say nothing


def test_a_killed_client_has_its_requests_aborted(llm: LLM, place: Place) -> None:
    with Brake(llm, 20) as brake, other_process(place, greedy_params(300)) as process:
        assert process.stdout.readline() == "piece\n"
        assert not all_free(llm)
        process.kill()
        process.wait()
        brake.allow(100)  # fewer than it would have taken
        assert wait_until(lambda: all_free(llm) and not place.port._sessions, 2 * wire.SILENCE_SECONDS)


def test_a_client_that_falls_silent_has_its_requests_aborted(soon_silent: None, llm: LLM, place: Place) -> None:
    with Brake(llm, 20) as brake:
        raw = place.raw(HEARTBEAT_IVL=0)
        raw.ask(1, PROMPT, greedy_params(300))
        assert raw.hear()[0] == "accepted"
        assert wait_until(lambda: not place.port._sessions, 10)
        brake.allow(100)
        assert wait_until(lambda: all_free(llm))


def test_a_stopped_client_goes_on_where_it_was(soon_silent: None, llm: LLM, place: Place) -> None:
    params = SamplingParams(seed=3, max_tokens=60)
    whole = llm.generate(PROMPT, params)
    with Brake(llm, 20) as brake, other_process(place, params) as process:
        for _ in range(5):
            assert process.stdout.readline() == "piece\n"
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: not place.port._sessions, 10), "it was not missed"
        brake.allow(float("inf"))
        assert wait_until(lambda: all_free(llm)), "its request went on without it"
        process.send_signal(signal.SIGCONT)
        *_, last = process.stdout.read().splitlines()
    tokens, text, reason, reconnections = eval(last)
    assert (tokens, text, reason) == (whole.output_token_ids, whole.text, "length")
    assert reconnections == 1


def test_a_goodbye_aborts_at_once(llm: LLM, place: Place) -> None:
    with Brake(llm, 20) as brake:
        raw = place.raw()
        raw.ask(1, PROMPT, greedy_params(300))
        assert raw.hear()[0] == "accepted"
        raw.say("bye")
        assert wait_until(lambda: not place.port._sessions, 1)
        brake.allow(100)
        assert wait_until(lambda: all_free(llm))


# ---- handles that do not behave


def test_a_handle_that_does_not_read_costs_no_more_than_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_FRAMES_AHEAD", 50)
    whole = llm.generate(PROMPT, greedy_params(60))
    with open_place(llm) as place:
        raw = place.raw(RCVHWM=1)
        (session,) = place.port._sessions.values()
        other = place.client()
        number = 100
        while not session.unsent:  # until all buffers on the way are full
            number += 1
            raw.say("query", number, "x" * 30_000)
            wait_until(lambda: bool(session.unsent), 0.005)
        raw.ask(1, PROMPT, greedy_params(60))
        assert wait_until(lambda: 1 in session.pending and session.pending[1].last.finish_reason is not None)
        frames = len(session.unsent)
        assert len(session.pending) == 1
        assert session.pending[1].token_ids == whole.output_token_ids
        assert other.generate(PROMPT, greedy_params(60)).text == whole.text
        assert len(session.unsent) <= frames
        assert session in place.port._sessions.values()
        assert raw.end_of(1) == (whole.output_token_ids, whole.text, "length")


def test_a_handle_that_asks_on_and_never_reads_is_dropped(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_FRAMES_AHEAD", 20)
    with open_place(llm) as place, Brake(llm, 20) as brake:
        raw, other = place.raw(RCVHWM=1), place.client()
        assert other.health()["state"] == "ready"
        raw.ask(1, PROMPT, greedy_params(300))
        for number in range(2, 1000):
            raw.say("query", number, "x" * 30_000)
        assert wait_until(lambda: len(place.port._sessions) == 1, 10)
        brake.allow(100)
        assert wait_until(lambda: all_free(llm))
        brake.allow(float("inf"))
        assert len(other.generate(PROMPT, greedy_params(5)).output_token_ids) == 5


def test_a_wrong_token_gets_nothing(llm: LLM, place: Place) -> None:
    for token in (secrets.token_bytes(32), b"", place.port.address.token[:-1]):
        raw = place.raw(greet=False)
        raw.say("hello", token, wire.VERSION, True)
        assert raw.hears_nothing()
        raw.ask(1, PROMPT)
        raw.say("query", 2, "stats")
        assert [raw.hear()[0] for _ in range(2)] == ["stranger"] * 2
        assert raw.hears_nothing()
    assert not place.port._sessions
    assert place.port.owner_seen_at == 0
    assert not place.service._live


def test_another_version_is_told(place: Place) -> None:
    raw = place.raw(greet=False)
    raw.say("hello", place.port.address.token, wire.VERSION + 1, False)
    reason = f"the handle speaks version {wire.VERSION + 1} of the protocol, the service {wire.VERSION}"
    assert raw.hear() == ("refused", [0, "unavailable", reason])


def test_garbage_is_ignored_and_others_are_served(llm: LLM, place: Place) -> None:
    raw, client = place.raw(), place.client()
    garbage = [
        b"",
        b"\xc1",
        b"\x93\x01",
        os.urandom(100),
        b"\xdd\xff\xff\xff\xff",
        wire.encode("ask"),
        wire.encode("x"),
    ]
    garbage += [wire.encode("ask", -1, {}), wire.encode("abort", 2**64 - 1), wire.encode("hello", b"x", 1, 1)]
    for frame in garbage:
        raw.socket.send(frame)
    raw.socket.send_multipart([b"two", b"parts"])
    assert client.generate(PROMPT, greedy_params(5)).finish_reason == "length"
    assert raw.hears_nothing(0.1)
    for number, body in enumerate([None, [], {"x": 1}, {"prompt": None}, {"prompt": "a", "params": {b"x": 1, "y": 2}}]):
        raw.say("ask", number, body)
        kind, (of, refusal, _) = raw.hear()
        assert (kind, of, refusal) == ("refused", number, "invalid")
    raw.say("query", 9, "secrets")
    assert raw.hear()[1][:2] == [9, "invalid"]
    raw.ask(10, PROMPT, greedy_params(5))
    assert len(raw.end_of(10)[0]) == 5


def test_a_number_in_use_is_refused_and_may_come_again(llm: LLM, place: Place) -> None:
    raw = place.raw()
    with Brake(llm, 8) as brake:
        raw.ask(7, PROMPT, greedy_params(20))
        assert raw.hear()[0] == "accepted"
        raw.ask(7, PROMPT, greedy_params(20))
        kind, items = raw.hear()
        while kind == "updates":
            kind, items = raw.hear()
        assert (kind, items) == ("refused", [7, "invalid", "number 7 is in use"])
        brake.allow(float("inf"))
        assert raw.end_of(7)[2] == "length"
    raw.ask(7, PROMPT, greedy_params(3))
    assert len(raw.end_of(7)[0]) == 3


def test_two_handles_have_numbers_of_their_own(llm: LLM, place: Place) -> None:
    first, second = place.raw(), place.raw()
    expected = [llm.generate(prompt, greedy_params(20)).output_token_ids for prompt in ("a", "b")]
    with Brake(llm, 8) as brake:
        first.ask(1, "a", greedy_params(20))
        second.ask(1, "b", greedy_params(20))
        third = place.raw()
        third.say("abort", 1)
        third.say("query", 1, "health")
        assert third.hear()[0] == "answer"
        brake.allow(float("inf"))
        assert [raw.end_of(1)[0] for raw in (first, second)] == expected
        assert third.hears_nothing(0.1)


def test_greeting_anew_gives_no_news_of_the_old(llm: LLM, place: Place) -> None:
    """The end of the aborted request must not be taken for that of the new one with its number."""
    raw = place.raw()
    whole = llm.generate(PROMPT, greedy_params(30))
    for _ in range(20):
        with Brake(llm, 8) as brake:
            raw.ask(1, PROMPT, greedy_params(30))
            kind, _ = raw.hear()
            assert kind == "accepted"
            raw.say("hello", place.port.address.token, wire.VERSION, False)
            raw.ask(1, PROMPT, greedy_params(30))
            while raw.hear()[0] != "welcome":
                pass
            brake.allow(float("inf"))
            assert raw.end_of(1) == (whole.output_token_ids, whole.text, "length")


def test_a_panic_over_one_request_fails_that_alone(llm: LLM, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As those of Rust are: no Exception."""

    def encode(text: str, encode: Callable[[str], list[int]] = llm._intake._encode) -> list[int]:
        if text.startswith("bad"):
            raise Panic("index out of bounds")
        return encode(text)

    monkeypatch.setattr(llm._intake, "_encode", encode)
    client = place.client()
    for text in ("bad", "bad" * 10_000):  # the second is prepared aside
        with pytest.raises(wire.RequestFailed, match="index out of bounds"):
            client.generate(text, greedy_params(2))
    assert len(client.generate("good", greedy_params(2)).output_token_ids) == 2
    assert wait_until(lambda: place.port._encoding == 0)
