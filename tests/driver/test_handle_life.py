"""A handle whose service is lost and found again, and what its callers see of that: nothing."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from driver import wire
from driver.engine import Update
from driver.handle import Client
from driver.llm import LLM
from driver.results import Completion, Increment
from driver.wire import Ask, RequestFailed, ServiceUnavailable
from parallel.channel import ChannelAddress, bind
from scheduler.params import SamplingParams
from tests.driver.serving import (
    PROMPT,
    Brake,
    Place,
    all_free,
    fail_for_good,
    greedy_params,
    open_llm,
    open_place,
    wait_until,
)
from tests.models import END, END_ID, make_byte_tokenizer, make_tiny_model


class Address:
    """Where the service is at present, if anywhere."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.asked = 0

    def __call__(self) -> ChannelAddress:
        self.asked += 1
        if self.place is None:
            raise ServiceUnavailable("there is no service yet")
        return self.place.port.address


def cases(text: str) -> list[SamplingParams]:
    return [
        greedy_params(60),
        greedy_params(60, stop=(text[30:33],)),
        SamplingParams(seed=7, max_tokens=60),
        SamplingParams(seed=2**64 - 1, max_tokens=60, top_k=20),
        SamplingParams(temperature=1.3, seed=-5, max_tokens=60, top_p=0.9),
        greedy_params(60, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={"101": 4}),
        greedy_params(60, stop=(text[5:6],), min_tokens=25, logprobs=2, prompt_logprobs=3),
    ]


def joined(pieces: Sequence[Increment]) -> Completion:
    """What the pieces of a stream add up to; a prompt's log probabilities may come once only."""
    whole = Completion()
    for piece in pieces:
        assert piece.prompt_logprobs is None or whole.prompt_logprobs is None
        whole.take(
            Update(
                "",
                piece.text,
                piece.token_ids,
                piece.finish_reason,
                0.0,
                piece.stop_reason,
                0,
                None,
                piece.logprobs,
                piece.prompt_logprobs,
            )
        )
    return whole


def assert_same_logprobs(one: Completion, other: Completion) -> None:
    """As many, of the same tokens, equal but for rounding: a prompt that is computed again has other chunks."""
    for name in ("logprobs", "prompt_logprobs"):
        entries, others = getattr(one, name), getattr(other, name)
        assert (entries is None) == (others is None)
        for entry, its in zip(entries or (), others or (), strict=True):
            assert (entry is None) == (its is None)
            if entry is not None:
                assert entry.token_id == its.token_id
                assert [entry.logprob, *(v for _, v in entry.top)] == pytest.approx(
                    [its.logprob, *(v for _, v in its.top)], abs=1e-3
                )


@pytest.mark.parametrize("steps", [6, 17])
def test_streams_go_on_with_another_service(folder: Path, llm: LLM, steps: int) -> None:
    whole = llm.generate(PROMPT, greedy_params(60), use_tqdm=False)
    params = cases(whole.text)
    expected = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    where = Address()
    with ExitStack() as stack:
        client = Client(where)
        stack.callback(client.close)
        first, second = (stack.enter_context(open_llm(folder, num_kv_blocks=200)) for _ in range(2))
        brake = stack.enter_context(Brake(first))
        where.place = Place(first, 10)
        streams = [client.stream(PROMPT, one) for one in params]
        unseeded = client.stream(PROMPT, SamplingParams(max_tokens=60))
        assert wait_until(lambda: len(where.place.service._live) == len(params) + 1)
        brake.allow(steps)
        calls = [stream._call for stream in streams]
        assert wait_until(lambda: min(len(call.ask.produced) for call in calls) >= steps - 4)
        lost, where.place = where.place, None
        lost.close()
        brake.allow(float("inf"))
        assert wait_until(lambda: all_free(first)), "the lost service computes for nobody"
        assert wait_until(lambda: not client.connected)
        asked = where.asked
        assert wait_until(lambda: where.asked > asked + 1), "it is not looked for"
        before = second.stats()["steps"]
        with open_place(second) as where.place:
            for stream, one in zip(streams, expected, strict=True):
                pieces = list(stream)
                piece = pieces[-1]
                assert [token for piece in pieces for token in piece.token_ids] == one.output_token_ids
                assert "".join(piece.text for piece in pieces) == one.text
                assert (piece.finish_reason, piece.stop_reason) == (one.finish_reason, one.stop_reason)
                assert_same_logprobs(one, joined(pieces))
            assert list(unseeded)[-1].finish_reason == "length"
            assert client.reconnections == 1
            # Only what was missing was sampled; requests that come one after another share not quite all steps.
            assert 60 - steps <= second.stats()["steps"] - before <= 60 - steps + 10


def test_a_guide_is_followed_on_another_service_from_where_it_was(tmp_path: Path) -> None:
    folder = make_byte_tokenizer(make_tiny_model("llama", tmp_path, eos_token_id=END_ID), END)
    guide = {"regex": "([a-f]{2}-[0-9]{3};){8}"}
    params = [SamplingParams(seed=at, max_tokens=80, guide=guide, logprobs=1, temperature=2.0) for at in range(4)]
    where = Address()
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_llm(folder)) for _ in range(2))
        expected = first.generate([PROMPT] * len(params), params, use_tqdm=False)
        assert len({completion.text for completion in expected}) == len(params)
        client = Client(where)
        stack.callback(client.close)
        brake = stack.enter_context(Brake(first))
        where.place = Place(first, 10)
        streams = [client.stream(PROMPT, one) for one in params]
        assert wait_until(lambda: len(where.place.service._live) == len(params))
        brake.allow(15)
        assert wait_until(lambda: min(len(stream._call.ask.produced) for stream in streams) >= 11)
        lost, where.place = where.place, None
        lost.close()
        brake.allow(float("inf"))
        with open_place(second) as where.place:
            for stream, one in zip(streams, expected, strict=True):
                whole = joined(list(stream))
                assert (whole.output_token_ids, whole.text) == (one.output_token_ids, one.text)
                assert (whole.finish_reason, whole.stop_reason) == ("stop", END_ID)
                assert re.fullmatch(guide["regex"], whole.text)
                assert_same_logprobs(one, whole)
            assert second.stats()["decode_tokens"] > 0


def test_whole_texts_survive_a_restart(folder: Path, llm: LLM) -> None:
    params = [SamplingParams(seed=at, max_tokens=40, stop=("e", "\ufffd\ufffd\ufffd\ufffd")) for at in range(12)]
    prompts = [f"prompt {at}" for at in range(12)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    assert {completion.finish_reason for completion in expected} == {"length", "stop"}
    where = Address()
    found: list[Any] = []
    with ExitStack() as stack:
        client = Client(where)
        stack.callback(client.close)
        first, second = (stack.enter_context(open_llm(folder)) for _ in range(2))
        brake = stack.enter_context(Brake(first, 12))
        where.place = Place(first, 100)
        asking = threading.Thread(target=lambda: found.extend(client.generate(prompts, params)))
        asking.start()
        assert wait_until(lambda: first.stats()["decode_tokens"] > 30)
        lost, where.place = where.place, None
        lost.close()
        brake.allow(float("inf"))
        with open_place(second) as where.place:
            asking.join(30)
            assert client.reconnections == 1
            assert second.stats()["decode_tokens"] > 0
    for one, other in zip(found, expected, strict=True):
        assert (one.output_token_ids, one.text) == (other.output_token_ids, other.text)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)


def test_a_request_once_taken_waits_even_if_told_not_to(folder: Path) -> None:
    """After a restart there may be no room for it at once, but it has had its place."""
    where = Address()
    with ExitStack() as stack:
        client = Client(where)
        stack.callback(client.close)
        first = stack.enter_context(open_llm(folder))
        second = stack.enter_context(open_llm(folder, max_num_seqs=1))
        stack.enter_context(Brake(first, 8))
        where.place = Place(first, 10)
        streams = [client.stream([at], greedy_params(30), wait=False) for at in range(4)]
        assert all(next(stream).token_ids for stream in streams)
        lost, where.place = where.place, None
        lost.close()
        with open_place(second, max_queued=0) as where.place:
            assert [list(stream)[-1].finish_reason for stream in streams] == ["length"] * 4


def test_an_abort_while_the_service_is_lost_is_remembered(folder: Path, llm: LLM) -> None:
    where = Address()
    with ExitStack() as stack:
        client = Client(where)
        stack.callback(client.close)
        first = stack.enter_context(open_llm(folder))
        stack.enter_context(Brake(first, 8))
        where.place = Place(first, 10)
        doomed, kept = client.stream("a", greedy_params(30)), client.stream("b", greedy_params(30))
        next(doomed), next(kept)
        lost, where.place = where.place, None
        lost.close()
        assert wait_until(lambda: not client.connected)
        client.abort(doomed.request_id)
        assert list(doomed)[-1].finish_reason == "abort"
        with open_place(llm) as where.place:
            before = llm.stats()["prefill_tokens"]
            assert list(kept)[-1].finish_reason == "length"
            assert llm.stats()["prefill_tokens"] - before <= 31, "the aborted one was asked for again"


def test_a_service_that_stays_away_fails_calls_in_time(place: Place) -> None:
    def nowhere() -> ChannelAddress:
        raise ServiceUnavailable("there is no service named 'x'")

    with Client(nowhere, reconnect_seconds=0.3) as client:
        with pytest.raises(ServiceUnavailable, match="no service named 'x'"):
            client.generate("a")
        with pytest.raises(ServiceUnavailable, match="no service named 'x'"):
            client.health()
        assert not client.connected


def test_a_service_that_does_not_answer_fails_calls_in_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_SECONDS", 0.1)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.5)
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as mute:
        for address, reason in (
            (bind(mute, None), "nothing heard"),
            (ChannelAddress(place.port.address.url, b"wrong"), "not answered"),
        ):
            with Client(lambda address=address: address, reconnect_seconds=1.0) as client:
                with pytest.raises(ServiceUnavailable, match=reason):
                    client.generate("a")
                assert not client.connected


def test_a_failure_of_the_link_itself_reaches_its_callers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.client()
    assert client.health()["state"] == "ready"

    def broken(_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(client._link, "_on_updates", broken)
    with pytest.raises(ServiceUnavailable, match="a fault of ours"):
        client.generate(PROMPT, greedy_params(5))
    with pytest.raises(ServiceUnavailable, match="closed"):
        client.generate(PROMPT, greedy_params(5))


def test_a_link_that_cannot_even_say_goodbye_tells_its_callers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.client()
    assert client.health()["state"] == "ready"
    news: queue.SimpleQueue[Update] = queue.SimpleQueue()

    class Panic(BaseException):
        """As those of Rust are: no Exception."""

    def broken(*_: object) -> None:
        raise Panic("no more sockets")

    monkeypatch.setattr(client._link, "_on_updates", broken)
    monkeypatch.setattr(client._link, "_send", broken)
    client._link.submit(Ask(PROMPT, greedy_params(5)), news.put)
    assert isinstance(news.get(timeout=10).error, ServiceUnavailable)


def test_a_failed_engine_that_comes_back_is_waited_for(folder: Path, llm: LLM) -> None:
    where = Address()
    whole = llm.generate(PROMPT, greedy_params(40))
    with ExitStack() as stack:
        client = Client(where)
        stack.callback(client.close)
        first = stack.enter_context(open_llm(folder))
        with Brake(first, 8):
            where.place = lost = Place(first, 10, restarts=True)
            stream = client.stream(PROMPT, greedy_params(40))
            tokens = list(next(stream).token_ids)
            fail_for_good(first)
        assert wait_until(lambda: first.failure is not None)
        late = client.stream(PROMPT, greedy_params(40))
        assert client.health()["state"] == "failed"  # so the port has seen the late one
        where.place = None
        lost.close()
        with open_place(llm) as where.place:
            for piece in stream:
                tokens += piece.token_ids
            assert tokens == whole.output_token_ids
            assert "".join(piece.text for piece in late) == whole.text


class Doomed(threading.Thread):
    """A service that is another one every time it has taken the request, after so many tokens of it."""

    def __init__(self, router: zmq.Socket, tokens: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._router, self._tokens = router, tokens
        self.lives = 0
        self.closing = False

    def run(self) -> None:
        while not self.closing:
            if not self._router.poll(50):
                continue
            handle, frame = self._router.recv_multipart()
            kind, items = wire.decode(frame, wire.FROM_HANDLE)
            if kind == "hello":
                self.lives += 1
                self._say(handle, "welcome", {"started_at": self.lives})
            elif kind == "ask":
                self._say(handle, "accepted", items[0], [1, 2])
                for _ in range(self._tokens[self.lives - 1]):
                    item = wire.pack_update(items[0], "a", [97], None, None, 0, None, None)
                    self._say(handle, "updates", [item])
                self._say(handle, "stranger")

    def _say(self, handle: bytes, kind: str, *items: object) -> None:
        self._router.send_multipart([handle, wire.encode(kind, *items)])


@pytest.mark.parametrize(("tokens", "lives"), [([0] * 5, 6), ([0, 0, 1, 0, 0, 0, 0], 8)], ids=["none", "one"])
def test_a_request_that_ends_its_driver_every_time_is_given_up(tokens: list[int], lives: int) -> None:
    """... unless there was a token of it in between."""
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        address = bind(router, None)
        service = Doomed(router, [*tokens, 0, 0])
        service.start()
        try:
            with Client(lambda: address) as client:
                with pytest.raises(RequestFailed, match="5 drivers in a row have ended while they had this request"):
                    client.generate([1, 2], greedy_params(9))
                assert service.lives == lives
        finally:
            service.closing = True
            service.join(5)
