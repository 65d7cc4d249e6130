"""The client handle in the service's own process: what it returns, raises, and how it waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver import link as link_module
from driver.handle import Client
from driver.llm import LLM
from driver.wire import Overloaded, RequestFailed, ServiceUnavailable
from scheduler.params import InvalidRequest, SamplingParams
from tests.driver.serving import (
    NUM_BLOCKS,
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

OTHERS = ["a", "Once upon a time", "x" * 40]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(place: Place) -> Client:
    return place.client()


# ---- one and many


def test_it_answers_as_the_model_itself(llm: LLM, client: Client) -> None:
    for prompt in (PROMPT, "The sea is", tuple(PROMPT)):
        mine, its = client.generate(prompt, greedy_params(20)), llm.generate(prompt, greedy_params(20))
        for name in ("prompt", "prompt_token_ids", "output_token_ids", "text", "finish_reason", "stop_reason", "error"):
            assert getattr(mine, name) == getattr(its, name), name
    assert mine.cached_tokens > 0
    assert len(mine.token_times) == 20
    assert mine.ttft_s > 0


def test_log_probabilities_come_as_from_the_model_itself(llm: LLM, client: Client) -> None:
    params = greedy_params(9, logprobs=3, prompt_logprobs=2)
    mine, its = client.generate(PROMPT, params), llm.generate(PROMPT, params)
    assert (mine.logprobs, mine.prompt_logprobs) == (its.logprobs, its.prompt_logprobs)
    assert [entry.token_id for entry in mine.logprobs] == mine.output_token_ids
    assert [entry and entry.token_id for entry in mine.prompt_logprobs] == [None, *PROMPT[1:]]
    plain = client.generate(PROMPT, greedy_params(9))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": {301: 1}}, "logit_bias token id 301 is outside the vocabulary of 301"),
        ({"stop_token_ids": [300, 301]}, "stop_token_ids entry 301 is outside the vocabulary of 301"),
        ({"min_tokens": 1000}, "min_tokens 1000 is more than the"),
        ({"guide": {"regex": "a"}}, "guide's regex cannot be used: the model names no end token"),
    ],
)
def test_fields_that_the_model_cannot_have_are_refused_by_the_service(
    client: Client, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        client.generate(PROMPT, greedy_params(None, **fields))


def test_many_come_back_in_order_each_with_its_own_parameters(llm: LLM, client: Client) -> None:
    lengths = [30, 3, 12]
    params = [SamplingParams(seed=at, max_tokens=length) for at, length in enumerate(lengths)]
    found = client.generate(OTHERS, params, use_tqdm=True)
    assert [len(completion.output_token_ids) for completion in found] == lengths
    assert [completion.prompt for completion in found] == OTHERS
    alone = llm.generate(OTHERS, params, use_tqdm=False)
    assert [completion.text for completion in found] == [completion.text for completion in alone]
    assert client.generate([], greedy_params()) == []


BAD_PROMPTS = {
    "too great an id": ([301], "outside the vocabulary"),
    "too long": ([1] * 512, "context length of 512"),
    "beyond the cache": ([1] * 450, "but the KV cache has 96"),
    "empty": ("", "empty"),
    "no prompt": (5, "must be a string or a list of token ids"),
    "bytes": (b"abc", "must be a string or a list of token ids"),
    "no ids": ([1, None], "position 1 must be an integer"),
    "half a character": ("\ud800", "cannot be sent: .*surrogates"),
    "not to be packed": ([1, object()], "cannot be sent"),
    "beyond 64 bits": ([2**70], "cannot be sent"),
    "half a conversation": ([{"role": "user", "content": "a"}, 3], "must all be mappings"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_leaves_the_others_alone(client: Client, name: str) -> None:
    bad, reason = BAD_PROMPTS[name]
    first, wrong, last = client.generate(["a", bad, "b"], greedy_params(5))
    assert [len(completion.output_token_ids) for completion in (first, wrong, last)] == [5, 0, 5]
    assert (first.error, last.error) == (None, None)
    assert wrong.finish_reason == "error"
    with pytest.raises(InvalidRequest, match=reason):
        raise wrong.error


@pytest.mark.parametrize("prompt", ["", [301], [1] * 450])
def test_a_single_bad_prompt_raises(client: Client, prompt: Any) -> None:
    for ask in (client.generate, lambda *asked: list(client.stream(*asked))):
        with pytest.raises(InvalidRequest):
            ask(prompt, greedy_params(50))


def test_parameters_of_the_wrong_kind_are_refused_here(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        client.generate("a", {"max_tokens": 3})
    with pytest.raises(InvalidRequest, match="2 prompts came with 1"):
        client.generate(["a", "b"], [greedy_params()])
    with pytest.raises(InvalidRequest, match="messages must be"):
        client.chat("hi")


def test_numbers_of_numpy_are_token_ids(client: Client) -> None:
    assert client.generate(list(np.array(PROMPT)), greedy_params(3)).prompt_token_ids == PROMPT


def test_a_request_larger_than_a_message_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver.wire.MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="more than 1000"):
        client.generate("x" * 1001, greedy_params(2))
    assert len(client.generate("x", greedy_params(2)).output_token_ids) == 2
    assert client.reconnections == 0


def test_a_chat_is_its_template(llm: LLM, client: Client) -> None:
    mine, its = client.chat(MESSAGES, greedy_params()), llm.chat(MESSAGES, greedy_params())
    assert (mine.prompt_token_ids, mine.text) == (its.prompt_token_ids, its.text)


# ---- streams


@pytest.mark.parametrize("size", [None, 2, 3, 4])
def test_the_pieces_of_a_stream_are_the_whole(client: Client, size: int | None) -> None:
    params = greedy_params(40)
    whole = client.generate(PROMPT, params)
    if size is not None:
        params = greedy_params(40, stop=(whole.text[9 : 9 + size],))
        whole = client.generate(PROMPT, params)
        assert (whole.finish_reason, whole.stop_reason) == ("stop", params.stop[0])
        assert params.stop[0] not in whole.text
    pieces = list(client.stream(PROMPT, params))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.output_token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)


def test_a_stream_without_a_seed_is_sampled_anew(client: Client) -> None:
    params = SamplingParams(max_tokens=30)
    assert client.generate(PROMPT, params).output_token_ids != client.generate(PROMPT, params).output_token_ids


def test_closing_or_dropping_a_stream_aborts_it(llm: LLM, client: Client) -> None:
    for leave in ("close", "drop"):
        with Brake(llm, 8) as brake:
            stream = client.stream(PROMPT, greedy_params(300))
            next(stream)
            assert not all_free(llm)
            if leave == "close":
                stream.close()
                assert list(stream) == []
            del stream
            brake.allow(50)  # fewer than it would have taken
            assert wait_until(lambda: all_free(llm))


def test_abort_by_id_ends_that_stream_alone(llm: LLM, client: Client) -> None:
    with Brake(llm, 8) as brake:
        doomed, kept = client.stream("a", greedy_params(300)), client.stream(PROMPT, greedy_params(20))
        next(doomed), next(kept)
        client.abort(doomed.request_id)
        client.abort(10**9)
        brake.allow(float("inf"))
        assert list(doomed)[-1].finish_reason == "abort"
        assert list(kept)[-1].finish_reason == "length"
        client.abort(kept.request_id)  # long since over


# ---- asyncio


def test_the_async_twins_answer_alike(client: Client) -> None:
    async def ask() -> None:
        params = greedy_params(20)
        whole = client.generate(PROMPT, params)
        assert (await client.agenerate(PROMPT, params)).text == whole.text
        many = await client.agenerate(["a", [301], PROMPT], params)
        assert [completion.finish_reason for completion in many] == ["length", "error", "length"]
        pieces = [piece async for piece in client.astream(PROMPT, params)]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert pieces[-1].finish_reason == "length"
        assert (await client.achat(MESSAGES, params)).text == client.chat(MESSAGES, params).text
        with pytest.raises(InvalidRequest):
            await client.agenerate([301], params)
        with pytest.raises(InvalidRequest):
            await anext(client.astream([301], params))
        together = await asyncio.gather(*(client.agenerate(prompt, params) for prompt in OTHERS))
        assert [c.text for c in together] == [c.text for c in client.generate(OTHERS, params)]
        assert (await client.ahealth())["state"] == "ready"
        assert (await client.astats())["kv_blocks"] == NUM_BLOCKS

    asyncio.run(ask())


@pytest.mark.parametrize("kind", ["agenerate", "astream", "achat"])
def test_cancelling_aborts(llm: LLM, client: Client, kind: str) -> None:
    async def ask() -> None:
        if kind == "astream":
            async for _ in client.astream(PROMPT, greedy_params(300)):
                pass
        elif kind == "agenerate":
            await client.agenerate([PROMPT, "a"], greedy_params(300))
        else:
            await client.achat(MESSAGES, greedy_params(300))

    async def cancel(brake: Brake) -> None:
        task = asyncio.create_task(ask())
        while all_free(llm):
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        brake.allow(50)  # fewer than they would have taken
        assert await asyncio.to_thread(wait_until, lambda: all_free(llm))

    with Brake(llm, 8) as brake:
        asyncio.run(cancel(brake))


def test_leaving_an_async_stream_early_aborts_it(llm: LLM, client: Client) -> None:
    async def leave(brake: Brake) -> None:
        async with contextlib.aclosing(client.astream(PROMPT, greedy_params(300))) as pieces:
            async for _ in pieces:
                break
        brake.allow(50)
        assert await asyncio.to_thread(wait_until, lambda: all_free(llm))

    with Brake(llm, 8) as brake:
        asyncio.run(leave(brake))


def test_a_query_given_up_does_no_harm(client: Client) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(client.ahealth())
        await asyncio.sleep(0)
        task.cancel()

    for _ in range(20):
        asyncio.run(give_up())
    assert client.health()["state"] == "ready"
    assert client.reconnections == 0


# ---- limits, figures, the end


def test_stats_and_health_tell_what_goes_on(llm: LLM, client: Client) -> None:
    before = client.stats()
    with Brake(llm, 8) as brake:
        stream = client.stream(PROMPT, greedy_params(30))
        next(stream)
        assert client.health() | {"uptime_s": 0, "started_at": 0} == {
            "state": "ready",
            "model": llm.config.model,
            "tensor_parallel_size": 1,
            "max_model_len": 512,
            "running": 1,
            "waiting": 0,
            "recovering": False,
            "uptime_s": 0,
            "started_at": 0,
        }
        assert client.stats()["kv_blocks_free"] < NUM_BLOCKS
        brake.allow(float("inf"))
        list(stream)
    after = client.stats()
    assert after["decode_tokens"] - before["decode_tokens"] >= 29
    assert after["kv_blocks_free"] == NUM_BLOCKS
    assert client.connected


def test_beyond_the_limit_one_is_told_or_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FIRST_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(link_module, "LAST_RETRY_SECONDS", 0.1)
    with open_llm(folder, max_num_seqs=1) as llm, open_place(llm, max_queued=1) as place:
        client = place.client()
        expected = llm.generate([[at] for at in range(20)], greedy_params(6), use_tqdm=False)
        with Brake(llm) as brake:
            held = [client.stream([at], greedy_params(6)) for at in range(2)]
            assert wait_until(lambda: len(place.service._live) == 2)
            with pytest.raises(Overloaded, match="2 requests run or wait"):
                client.generate("a", greedy_params(6), wait=False)
            with pytest.raises(Overloaded):
                next(client.stream("a", greedy_params(6), wait=False))
            with pytest.raises(Overloaded):
                asyncio.run(client.agenerate("a", greedy_params(6), wait=False))
            found: list[Any] = []
            asking = threading.Thread(
                target=lambda: found.extend(client.generate([[at] for at in range(20)], greedy_params(6)))
            )
            asking.start()
            assert wait_until(lambda: len(client._link._waiting) == 20), "the others do not wait here"
            waiting = client.stream("never sent", greedy_params(6))
            client.abort(waiting.request_id)
            assert next(waiting).finish_reason == "abort"
            brake.allow(float("inf"))
            asking.join(30)
        assert [completion.output_token_ids for completion in found] == [c.output_token_ids for c in expected]
        assert [list(stream)[-1].finish_reason for stream in held] == ["length"] * 2


def test_a_failed_service_fails_its_requests(folder: Path) -> None:
    with open_llm(folder) as llm, open_place(llm) as place:
        client = place.client()
        with Brake(llm, 8):
            stream = client.stream(PROMPT, greedy_params(200))
            next(stream)
            fail_for_good(llm)
        with pytest.raises(RequestFailed, match="the device melted"):
            list(stream)
        with pytest.raises(ServiceUnavailable, match="the device melted"):
            client.generate("a")
        assert client.health()["state"] == "failed"


def test_a_closed_client_says_so_and_leaves_nothing(llm: LLM, place: Place) -> None:
    before = set(threading.enumerate())
    client = place.client()
    with Brake(llm, 8) as brake:
        stream = client.stream(PROMPT, greedy_params(300))
        next(stream)
        client.close()
        client.close()
        with pytest.raises(ServiceUnavailable, match="closed"):
            list(stream)
        for use in (client.health, lambda: client.generate("a"), lambda: client.stream("a")):
            with pytest.raises(ServiceUnavailable, match="closed"):
                use()
        brake.allow(50)
        assert wait_until(lambda: all_free(llm))
    assert set(threading.enumerate()) <= before


def test_what_was_asked_just_before_closing_is_answered(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.client()
    assert client.health()["state"] == "ready"
    busy, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(client._link, "_send_waiting", lambda: (busy.set(), go_on.wait(10)))
    assert busy.wait(5)
    stream = client.stream("a", greedy_params(300))  # behind the thread's look at its commands
    closing = threading.Thread(target=client.close)
    closing.start()
    assert wait_until(lambda: client._link._closing)
    go_on.set()
    closing.join(10)
    with pytest.raises(ServiceUnavailable, match="closed"):
        list(stream)


LONG_TEXT = "sea " * 20_000


def test_a_text_that_is_too_long_by_far_is_refused_before_it_is_encoded(client: Client, llm: LLM) -> None:
    text = "a" * (4 * llm.model.tokenizer.longest_token * llm.model.max_model_len + 1)
    with pytest.raises(
        InvalidRequest, match=f"the text has {len(text)} characters, more than 512 tokens can stand for"
    ):
        client.generate(text)
    assert client.generate(PROMPT, greedy_params(4)).finish_reason == "length"


@pytest.fixture
def slow_encoding(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Texts are encoded as soon as the second event is set; the first one tells that somebody waits for that."""
    encoding, finish = threading.Event(), threading.Event()

    def slowly(text: str, *_: object, **__: object) -> list[int]:
        encoding.set()
        assert finish.wait(20)
        return list(PROMPT)

    monkeypatch.setattr(llm.model.tokenizer, "encode", slowly)
    return encoding, finish


def test_streams_go_on_while_a_long_text_is_encoded(
    llm: LLM, client: Client, slow_encoding: tuple[threading.Event, threading.Event]
) -> None:
    encoding, finish = slow_encoding
    long = [client.stream(LONG_TEXT, greedy_params(6)) for _ in range(2)]
    assert encoding.wait(10)
    assert client.generate(PROMPT, greedy_params(6)).finish_reason == "length"
    client.abort(long[1].request_id)
    assert client.health()["state"] == "ready"
    finish.set()
    assert [list(stream)[-1].finish_reason for stream in long] == ["length", "abort"]
    assert wait_until(lambda: all_free(llm))


def test_a_handle_that_leaves_while_its_text_is_encoded_leaves_nothing(
    llm: LLM, place: Place, slow_encoding: tuple[threading.Event, threading.Event]
) -> None:
    encoding, finish = slow_encoding
    leaving = place.client()
    stream = leaving.stream(LONG_TEXT, greedy_params(400))
    assert encoding.wait(10)
    leaving.close()
    finish.set()
    with pytest.raises(ServiceUnavailable, match="closed"):
        list(stream)
    assert wait_until(lambda: place.port._encoding == 0 and all_free(llm))


def test_an_interrupt_while_requests_are_asked_aborts_them(
    llm: LLM, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = client._link.submit, []

    def interrupted(*arguments: Any) -> Any:
        if len(calls) == 2:
            assert wait_until(lambda: len(client._link._active) == 2)  # what still waits here is dropped at once
            raise KeyboardInterrupt
        calls.append(submit(*arguments))
        return calls[-1]

    monkeypatch.setattr(client._link, "submit", interrupted)
    with Brake(llm, 3) as brake:
        with pytest.raises(KeyboardInterrupt):
            client.generate([PROMPT] * 4, greedy_params(200))
        assert len(calls) == 2
        brake.allow(3)  # far from the end of what was asked
        assert wait_until(lambda: not client._link._active and not client._link._waiting and all_free(llm))
