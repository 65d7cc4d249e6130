"""What a service makes of requests: going on behind tokens that are there, limits, draining."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.engine import EngineDead
from driver.llm import LLM
from driver.service import DRAINING, FAILED, READY, Service
from driver.wire import Ask, Overloaded, ServiceUnavailable, ShutDown
from scheduler.params import InvalidRequest, SamplingParams
from tests.driver.serving import (
    PROMPT,
    Brake,
    Sink,
    all_free,
    fail_for_good,
    greedy_params,
    open_llm,
    run_ask,
    wait_until,
)

LENGTH = 24
REPLACEMENT = "\ufffd"


@pytest.fixture
def service(llm: LLM) -> Iterator[Service]:
    yield Service(llm, 1000)
    assert wait_until(lambda: all_free(llm))


# ---- going on behind what a handle has already


def assert_every_cut_goes_on(service: Service, params: SamplingParams) -> Sink:
    """Cuts a request's output behind each of its updates, and asks again for the rest. Returns the whole."""
    whole = run_ask(service, Ask(PROMPT, params)).wait()
    rests = []
    for at in range(len(whole.updates) + 1):
        had = whole.updates[:at]
        produced = [token for update in had for token in update.token_ids]
        seen = len("".join(update.text for update in had))
        rests.append((run_ask(service, Ask(PROMPT, params, produced, seen)), produced, seen))
    for rest, produced, seen in rests:
        rest.wait()
        assert produced + rest.tokens == whole.tokens, len(produced)
        assert whole.text[:seen] + rest.text == whole.text, len(produced)
        assert rest.end == whole.end, len(produced)
    return whole


def sampled(seed: int, max_tokens: int = LENGTH, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **fields)


def test_greedy_output_goes_on_from_every_cut(service: Service) -> None:
    whole = assert_every_cut_goes_on(service, greedy_params(LENGTH))
    assert len(whole.tokens) == LENGTH
    assert whole.end == ("length", None)


@pytest.mark.parametrize("seed", [0, 1, -(2**63), 2**64 - 1])
def test_sampled_output_goes_on_from_every_cut(service: Service, seed: int) -> None:
    whole = assert_every_cut_goes_on(service, sampled(seed))
    assert whole.tokens != run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait().tokens


def test_a_character_in_pieces_goes_on_whole(service: Service) -> None:
    """Some seed has the model write a character of several bytes; all places to cut it are among the cuts."""
    sinks = {seed: run_ask(service, Ask(PROMPT, sampled(seed))) for seed in range(60)}
    wide = {seed for seed, sink in sinks.items() if any("\x80" <= char != REPLACEMENT for char in sink.wait().text)}
    held = {seed for seed, sink in sinks.items() if sink.text.endswith(REPLACEMENT)}
    assert wide
    assert held, "no text that ends inside a character"
    for seed in [*sorted(wide)[:3], *sorted(held)[:2]]:
        assert_every_cut_goes_on(service, sampled(seed))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_stop_string_across_the_cut_is_found(service: Service, size: int) -> None:
    text = run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait().text
    stop = text[7 : 7 + size]
    assert len(stop) == size
    whole = assert_every_cut_goes_on(service, greedy_params(LENGTH, stop=(stop,)))
    assert whole.end == ("stop", stop)
    assert whole.text == text[: text.index(stop)]
    # At the cuts inside it, its beginning has been held back.
    assert any(not update.text for update in whole.updates[-size:-1])


def test_what_only_began_like_a_stop_string_comes_later(service: Service) -> None:
    text = run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait().text
    stop = text[5:8] + "~no~"
    whole = assert_every_cut_goes_on(service, greedy_params(LENGTH, stop=(stop,)))
    assert whole.text == text
    assert any(len(update.text) > 2 for update in whole.updates), "nothing was held back"


def test_a_stop_string_that_the_last_token_completes_wins(service: Service) -> None:
    plain = run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait()
    stop = plain.text[-3:]
    if plain.text.index(stop) != len(plain.text) - 3:
        pytest.fail("the model repeats its last characters; take another prompt")
    whole = assert_every_cut_goes_on(service, greedy_params(LENGTH, stop=(stop,)))
    assert len(whole.tokens) == LENGTH
    assert whole.end == ("stop", stop)


def test_an_end_token_at_the_cut_ends_it(service: Service) -> None:
    tokens = run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait().tokens
    last = next(at for at in range(6, LENGTH) if tokens[at] not in tokens[:at])
    whole = assert_every_cut_goes_on(service, greedy_params(LENGTH, stop_token_ids=(tokens[last],)))
    assert whole.tokens == tokens[: last + 1]
    assert whole.end == ("stop", tokens[last])


def test_all_tokens_there_but_not_all_text(service: Service) -> None:
    """The tokens count: what of their text is missing comes, and nothing is computed."""
    whole = run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait()
    before = service.stats()["steps"]
    for seen in (0, 1, len(whole.text) - 1, len(whole.text)):
        rest = run_ask(service, Ask(PROMPT, greedy_params(LENGTH), whole.tokens, seen)).wait()
        assert (rest.tokens, rest.text, rest.end) == ([], whole.text[seen:], ("length", None))
    assert service.stats()["steps"] == before


def test_produced_tokens_are_checked(service: Service) -> None:
    for produced, reason in (([1] * 13, "more than max_tokens 12"), ([301], "outside the vocabulary"), (["a"], "'a'")):
        with pytest.raises(InvalidRequest, match=reason):
            service.submit(Ask(PROMPT, greedy_params(12), produced), Sink())


# ---- limits


def test_no_more_than_so_many_run_or_wait(folder: Path) -> None:
    with open_llm(folder, max_num_seqs=2) as llm, Brake(llm) as brake:
        service = Service(llm, 3)
        sinks = [run_ask(service, Ask([at], greedy_params(4))) for at in range(5)]
        with pytest.raises(Overloaded, match="5 requests run or wait"):
            service.submit(Ask(PROMPT, greedy_params(4)), Sink())
        # What cannot be served at all takes nobody's place.
        brake.allow(float("inf"))
        assert [sink.wait().end[0] for sink in sinks] == ["length"] * 5
        for _ in range(20):
            with pytest.raises(InvalidRequest):
                service.submit(Ask([999], greedy_params(4)), Sink())
        assert run_ask(service, Ask(PROMPT, greedy_params(4))).wait().end == ("length", None)


def test_a_request_beyond_the_cache_is_refused_and_forgotten(service: Service) -> None:
    sink = run_ask(service, Ask([1] * 200, greedy_params(300))).wait()
    assert isinstance(sink.updates[-1].error, InvalidRequest)
    assert not service._live


# ---- the end


def test_draining_finishes_what_runs_and_takes_nothing_new(llm: LLM) -> None:
    service = Service(llm, 10)
    whole = run_ask(service, Ask(PROMPT, greedy_params(LENGTH))).wait()
    with Brake(llm, 5) as brake:
        running = run_ask(service, Ask(PROMPT, greedy_params(LENGTH)))
        assert wait_until(lambda: bool(running.updates))
        assert service.health()["state"] == READY
        aborted: list[int] = []
        drain = threading.Thread(target=lambda: aborted.append(service.drain(30)))
        drain.start()
        assert wait_until(lambda: service.state == DRAINING)
        with pytest.raises(ServiceUnavailable, match="shutting down"):
            service.submit(Ask(PROMPT, greedy_params(2)), Sink())
        assert drain.is_alive(), "it did not wait"
        assert service.health()["running"] == 1
        brake.allow(float("inf"))
        drain.join(20)
    assert aborted == [0]
    assert (running.tokens, running.end) == (whole.tokens, ("length", None))


@pytest.mark.parametrize("hurried", [False, True])
def test_draining_aborts_what_takes_too_long(llm: LLM, hurried: bool) -> None:
    service = Service(llm, 10)
    with Brake(llm) as brake:
        running = [run_ask(service, Ask(PROMPT, greedy_params(200))) for _ in range(3)]
        brake.allow(5)  # now that all are there, or those steps could be one request's
        assert wait_until(lambda: all(sink.updates for sink in running))

        def let_the_engine_hear() -> None:  # which it does between two steps
            wait_until(lambda: llm._engine._commands.qsize() == 3)
            brake.allow(1)

        threading.Thread(target=let_the_engine_hear).start()
        if hurried:
            threading.Timer(0.2, service.hurry).start()
        began = time.monotonic()
        assert service.drain(60 if hurried else 0.2) == 3
        assert time.monotonic() - began < 5
    assert [sink.wait().end[0] for sink in running] == ["error"] * 3
    for sink in running:
        assert isinstance(sink.updates[-1].error, ShutDown), "cut off, and not told"
    assert wait_until(lambda: all_free(llm))


def test_a_failed_engine_is_told_to_all(folder: Path) -> None:
    with open_llm(folder) as llm:
        service = Service(llm, 10)
        with Brake(llm, 5):
            running = run_ask(service, Ask(PROMPT, greedy_params(200)))
            assert wait_until(lambda: bool(running.updates))
            fail_for_good(llm)
        assert running.wait().end[0] == "error"
        assert "the device melted" in str(running.updates[-1].error)
        assert service.health()["state"] == FAILED
        assert "the device melted" in service.health()["error"]
        with pytest.raises(ServiceUnavailable, match="the device melted"):
            service.submit(Ask(PROMPT, greedy_params(2)), Sink())
        with pytest.raises(EngineDead):
            llm.generate(PROMPT, greedy_params(2))
        assert service.drain(5) == 0
