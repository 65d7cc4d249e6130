"""The HTTP front over an engine that is held, broken or drained at the right moment."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from driver import http_door, openai_completions, sse
from driver.front import HttpLimits
from driver.handle import Client
from driver.hosts import InlineHost
from driver.http_server import HttpServer, make_app
from driver.tokenizer import Tokenizer
from driver.wire import ServiceUnavailable
from tests.driver.serving import NUM_BLOCKS, Brake, all_free, fail_for_good, wait_until

LONG = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


class Front:
    """A service in this process with HTTP before it."""

    def __init__(self, host: InlineHost, url: str) -> None:
        self.host, self.url = host, url

    @property
    def live(self) -> int:
        """Requests that the service has taken; an engine that is held does not know of the newest yet."""
        return len(self.host._port.service._live)

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=30)

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Callable[[], list[dict[str, Any]]]]:
        """An open stream; what it gives reads it to its end."""
        body = {**LONG, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")

            def rest() -> list[dict[str, Any]]:
                data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
                return [{"done": True} if one == "[DONE]" else json.loads(one) for one in data]

            yield rest


@pytest.fixture
def front(folder: Path) -> Iterator[Front]:
    """At most two requests run, and one waits."""
    engine = {"model": str(folder), "executor": "inline", "device": "cpu", "num_kv_blocks": NUM_BLOCKS}
    host, server = InlineHost({**engine, "max_num_seqs": 2}, 1, "tiny"), HttpServer("127.0.0.1", 0)
    with host.connect() as client:
        server.start(make_app(client, limits=HttpLimits(max_body_bytes=100_000)))
        assert wait_until(lambda: client.connected, 60)
        yield Front(host, server.url)
        server.close()
    assert host._llm.failure is not None or wait_until(lambda: all_free(host._llm)), "requests outlive their callers"
    host.close()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_full_queue_is_told_and_passes(front: Front) -> None:
    with Brake(front.host._llm) as brake, ThreadPoolExecutor() as pool:
        taken = [pool.submit(front.post, {**LONG, "max_tokens": 3}) for _ in range(3)]
        assert wait_until(lambda: front.live == 3)
        refused = front.post(LONG)
        assert error_of(refused) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert error_of(front.post({**LONG, "stream": True})) == (429, "queue_full")
        brake.allow(float("inf"))
        assert [one.result().status_code for one in taken] == [200] * 3
    assert front.post({**LONG, "n": 3}).status_code == 200
    too_many = front.post({**LONG, "n": 4})
    assert too_many.status_code == 400
    assert "4 sequences, more than the 3" in too_many.json()["error"]["message"]


def test_a_batch_that_does_not_fit_takes_no_part_of_the_room(front: Front) -> None:
    with Brake(front.host._llm, 4) as brake, front.stream():
        assert error_of(front.post({**LONG, "n": 3})) == (429, "queue_full")
        brake.allow(float("inf"))
        assert wait_until(lambda: front.live == 0)


def test_an_engine_that_fails_ends_streams_with_an_error(front: Front) -> None:
    with Brake(front.host._llm, 4) as brake, front.stream() as rest, ThreadPoolExecutor() as pool:
        whole = pool.submit(front.post, LONG)
        assert wait_until(lambda: front.live == 2)
        fail_for_good(front.host._llm)
        brake.allow(float("inf"))
        events = rest()
        assert events[0]["choices"][0]["finish_reason"] is None
        assert set(events[-1]) == {"error"}
        assert "the device melted" in events[-1]["error"]["message"]
        assert whole.result().status_code in (500, 503)
    assert error_of(front.post(LONG)) == (503, "not_ready")


def test_who_is_cut_off_by_the_end_of_the_service_is_told(front: Front) -> None:
    with Brake(front.host._llm, 4) as brake, front.stream() as rest, ThreadPoolExecutor() as pool:
        whole = pool.submit(front.post, LONG)
        assert wait_until(lambda: front.live == 2)
        end = pool.submit(front.host.end, 0.2)
        assert wait_until(lambda: front.host._llm._engine._commands.qsize() >= 2), "its patience has no end"
        brake.allow(1)
        events = rest()
        assert "shut down before this request was finished" in events[-1]["error"]["message"]
        assert error_of(whole.result()) == (503, "not_ready")
        assert end.result() == 2
    refused = front.post(LONG)
    assert error_of(refused) == (503, "not_ready")
    assert refused.headers["retry-after"] == "1"


def test_nobody_is_answered_before_the_service_is_there() -> None:
    def nowhere() -> Any:
        raise ServiceUnavailable("it is starting")

    server = HttpServer("127.0.0.1", 0)
    with Client(nowhere) as client:
        server.start(make_app(client))
        for path, body in (("/v1/completions", LONG), ("/tokenize", {"prompt": "a"})):
            assert error_of(httpx.post(f"{server.url}{path}", json=body)) == (503, "not_ready")
        assert error_of(httpx.get(f"{server.url}/v1/models")) == (503, "not_ready")
        assert httpx.get(f"{server.url}/version").status_code == 200
        server.close()


def test_a_stream_that_waits_long_begins_without_its_first_event(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", 0.2)
    with Brake(front.host._llm) as brake, front.stream(max_tokens=5) as rest:
        brake.allow(float("inf"))
        assert rest()[-1] == {"done": True}


def test_who_leaves_before_the_first_event_takes_the_request_along(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (0.1, 20.0):  # after the answer has begun, and before
        monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", seconds)
        with Brake(front.host._llm, 0) as brake:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{front.url}/v1/completions", json={**LONG, "stream": True}, timeout=0.5)
            assert wait_until(lambda: not front.host._llm._engine._commands.empty()), "nothing is aborted"
            brake.allow(2)
            assert wait_until(lambda: front.live == 0)


def test_long_texts_are_encoded_aside(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, threads = Tokenizer.encode, []

    def slow(tokenizer: Tokenizer, text: str, *options: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        time.sleep(1.0)
        return encode(tokenizer, text, *options)

    httpx.get(f"{front.url}/v1/models")
    monkeypatch.setattr(Tokenizer, "encode", slow)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(front.post, {"prompt": "a" * 5000})
        assert wait_until(lambda: bool(threads))
        began = time.monotonic()
        assert httpx.get(f"{front.url}/version").status_code == 200
        assert time.monotonic() - began < 0.5
        assert asked.result().status_code == 400
    assert threads != ["quadriga-http"]


def test_a_fault_of_ours_tells_no_secrets(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(openai_completions, "answer", broken)
    answer = front.post(LONG)
    assert error_of(answer) == (500, "internal_error")
    assert "secret" not in answer.text


def test_a_body_that_does_not_come_is_not_waited_for(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_door, "BODY_SECONDS", 0.3)
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
    assert front.post({"prompt": "ab"}, "/tokenize").json()["tokens"] == [97, 98]


def test_what_comes_while_a_reader_is_slow_is_joined(front: Front) -> None:
    """A reader that takes nothing for a while costs no event for each token, and misses none."""
    whole = front.post({**LONG, "max_tokens": 300}).json()["choices"][0]["text"]
    with front.stream(max_tokens=300) as rest:
        assert wait_until(lambda: front.host._llm.load() == (0, 0)), "the engine waits for the reader"
        events = rest()
    assert "".join(one["choices"][0]["text"] for one in events[:-1]) == whole


def test_limits_must_make_sense() -> None:
    with pytest.raises(ValueError, match="max_choices must be at least 1, got 0"):
        HttpLimits(max_choices=0)
