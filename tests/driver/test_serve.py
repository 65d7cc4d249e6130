"""`quadriga serve --executor inline`: over HTTP, and how it starts and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driver import cli, hosts
from driver import serve as serve_module
from driver.executor import WorkerFailed
from driver.handle import Client, ClientStream
from driver.hosts import InlineHost
from driver.http_server import HttpServer, make_app
from driver.wire import ServiceUnavailable
from tests.driver.serving import (
    NUM_BLOCKS,
    PROMPT,
    Brake,
    fail_for_good,
    greedy_params,
    wait_until,
)
from tests.end_to_end.serving import Serve

KEY = "s3cret é"


def get(url: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON body; 0 while nobody listens."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except urllib.error.URLError:
        return 0, {}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def options(folder: Path, *more: str) -> list[str]:
    model = ("--model", str(folder), "--num-kv-blocks", str(NUM_BLOCKS))
    return [*model, "--executor", "inline", "--device", "cpu", *more]


# ---- as a process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_what_it_is_and_ends_in_good_order(folder: Path, number: signal.Signals) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    more = ("--port", str(port), "--served-model-name", "tiny", "--api-key", "other", KEY)
    serve = Serve(*options(folder, *more))
    try:
        seen: list[int] = []
        assert wait_until(lambda: bool(seen.append(get(f"{url}/ready")[0])) or seen[-1] == 200, 60), serve.text
        assert 503 in seen, "readiness was not denied while it started"
        assert set(seen) <= {0, 503, 200}
        assert seen == sorted(seen, key=[0, 503, 200].index), "readiness came and went"
        assert serve.wait_ready() == url

        code, health = get(f"{url}/health")
        assert (code, health["state"], health["model"], health["running"]) == (200, "ready", "tiny", 0)
        assert get(f"{url}/stats")[0] == 401
        assert get(f"{url}/stats", "wrong")[0] == 401
        assert get(f"{url}/stats", "")[0] == 401
        for key in (KEY, "other"):
            code, stats = get(f"{url}/stats", key)
            assert (code, stats["kv_blocks_free"], stats["state"]) == (200, NUM_BLOCKS, "ready")
        assert get(f"{url}/nothing")[0] == 404

        taken = Serve(*options(folder, "--port", str(port)))
        assert taken.wait(30) == 2
        assert taken.lines[-1].startswith(f"quadriga: cannot listen on 127.0.0.1 port {port}: ")
        assert "starting" not in taken.text
        taken.close()

        assert serve.end(number) == 0
        assert serve.process.stdout.read() == ""
        assert get(f"{url}/ready")[0] == 0
    finally:
        serve.close()
    patterns = ("starting: ", "ready in .* s", "'llm' is ready at", "draining, for 30 s", "stopped; 0 requests")
    for pattern in patterns:
        serve.wait_for(f"quadriga: .*{pattern}", 0.1)
    assert "Traceback" not in serve.text


def test_a_model_that_cannot_be_loaded_is_the_callers_to_mend(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    os.truncate(damaged / "model.safetensors", 20_000)
    serve = Serve(*options(damaged))
    assert serve.wait(60) == 2
    assert "model.safetensors" in serve.lines[-1]
    assert "Traceback" not in serve.text
    serve.close()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000"),
        (["--port", "-1"], "cannot listen on"),
        (["--port", "x"], "invalid int value"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--tp", "2"], "the inline executor runs one rank"),
        (["--num-kv-blocks", "0"], "num_kv_blocks must be"),
        (["--drain-seconds", "-1"], "--drain-seconds must be between 0 and 1e+06, got -1"),
        (["--drain-seconds", "nan"], "got nan"),
        (["--drain-seconds", "inf"], "got inf"),
        (["--max-queued-requests", "-1"], "must not be negative"),
        (["--name", ""], "--name must not be empty"),
        (["--max-body-mib", "0"], "--max-body-mib must be more than 0, got 0"),
        (["--max-body-mib", "nan"], "--max-body-mib must be more than 0, got nan"),
        (["--max-choices", "0"], "max_choices must be at least 1, got 0"),
        (["--max-prompts", "-3"], "max_prompts must be at least 1, got -3"),
        (["--max-prompt-tokens", "0"], "max_prompt_tokens must be at least 1, got 0"),
        (["--detach"], "cannot be detached"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_had_ends_it_before_it_starts(
    folder: Path, process_state: None, capsys: pytest.CaptureFixture[str], more: list[str], reason: str
) -> None:
    before = set(threading.enumerate())
    try:
        code = cli.main(["serve", *options(folder, "--port", "0", *more)])
    except SystemExit as exit_:  # argparse
        code = exit_.code
    found = capsys.readouterr()
    assert (code, found.out) == (2, "")
    assert reason in found.err
    assert "starting" not in found.err
    assert set(threading.enumerate()) == before


# ---- the end, in this process


class Serving:
    """`quadriga serve` in the main thread, and what goes on meanwhile in another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: list[InlineHost] = []
        self.errors: list[BaseException] = []

        class Seen(InlineHost):
            def __init__(host, *arguments: Any) -> None:  # noqa: N805
                super().__init__(*arguments)
                self.hosts.append(host)

        monkeypatch.setattr(hosts, "InlineHost", Seen)
        self._serving = threading.Event()
        wait = serve_module._wait
        monkeypatch.setattr(serve_module, "_wait", lambda *arguments: (self._serving.set(), wait(*arguments)))

    def run(self, meanwhile: Callable[[InlineHost], None], *arguments: str) -> int:
        """The exit code. meanwhile: gets the host when it is ready, and should end the command."""

        def other() -> None:
            try:
                assert self._serving.wait(60)
                meanwhile(self.hosts[0])
            except BaseException as error:  # noqa: BLE001 raised in the main thread
                self.errors.append(error)
                terminate()

        thread = threading.Thread(target=other)
        thread.start()
        try:
            return serve_module.run(cli._parser().parse_args(["serve", "--port", "0", *arguments]))
        finally:
            thread.join(30)
            if self.errors:
                raise self.errors[0]


@pytest.fixture
def serving(process_state: None, monkeypatch: pytest.MonkeyPatch) -> Serving:
    return Serving(monkeypatch)


def begin(client: Client) -> ClientStream:
    stream = client.stream(PROMPT, greedy_params(60))
    next(stream)
    return stream


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_lets_what_runs_finish(folder: Path, serving: Serving) -> None:
    def meanwhile(host: InlineHost) -> None:
        with host.connect() as client, Brake(host._llm, 10) as brake:
            stream = begin(client)
            terminate()
            assert wait_until(lambda: host._port.service.state == "draining")
            with pytest.raises(ServiceUnavailable, match="shutting down"):
                client.generate("a", greedy_params(2))
            brake.allow(float("inf"))
            assert list(stream)[-1].finish_reason == "length"

    assert serving.run(meanwhile, *options(folder)) == 0


def test_what_takes_longer_than_it_may_is_aborted(
    folder: Path, serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    def meanwhile(host: InlineHost) -> None:
        with host.connect() as client, Brake(host._llm, 10) as brake:
            stream = begin(client)
            terminate()
            assert wait_until(lambda: host._port.service.state == "draining")
            assert wait_until(lambda: not host._llm._engine._commands.empty()), "its patience has no end"
            brake.allow(1)
            with pytest.raises(ServiceUnavailable, match="has shut down before this request was finished"):
                list(stream)

    assert serving.run(meanwhile, *options(folder, "--drain-seconds", "0.2")) == 0
    assert "stopped; 1 requests were aborted" in capsys.readouterr().err


def test_a_second_signal_ends_it_at_once(folder: Path, serving: Serving) -> None:
    ended_at: list[float] = []

    def meanwhile(host: InlineHost) -> None:
        with host.connect() as client, Brake(host._llm, 10):
            stream = begin(client)
            terminate()
            assert wait_until(lambda: host._port.service.state == "draining")
            ended_at.append(time.monotonic())
            terminate()
            assert wait_until(lambda: not client.connected), "the port is still open"
            stream.close()

    with pytest.raises(SystemExit) as exit_:
        serving.run(meanwhile, *options(folder, "--drain-seconds", "600"))
    assert exit_.value.code == 128 + signal.SIGTERM
    assert time.monotonic() - ended_at[0] < 10


def test_a_failed_engine_ends_it_with_the_cause(folder: Path, serving: Serving) -> None:
    with pytest.raises(WorkerFailed, match=r"the service has failed: .*the device melted"):
        serving.run(lambda host: fail_for_good(host._llm), *options(folder))


def test_a_signal_during_the_start_ends_it_without_a_service(
    folder: Path, process_state: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, go_on = threading.Event(), threading.Event()
    say = serve_module._say
    monkeypatch.setattr(serve_module, "_say", lambda message: (say(message), shown.set()))
    monkeypatch.setattr(InlineHost, "_bring_up", lambda host: go_on.wait(30))
    threading.Thread(target=lambda: (shown.wait(30), terminate(), go_on.set())).start()
    assert cli.main(["serve", "--port", "0", *options(folder)]) == 0
    found = capsys.readouterr().err
    assert "starting" in found
    assert "ready" not in found


def test_a_service_that_fails_before_it_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "LOOK_SECONDS", 0.1)
    states = [{"state": "ready"}, {"state": "failed", "error": "out of ranks"}]
    client = SimpleNamespace(connected=False)
    with pytest.raises(WorkerFailed, match="the service has failed: out of ranks"):
        serve_module._wait_for_answer(client, threading.Event(), lambda: states.pop(0))
    client.connected = True
    serve_module._wait_for_answer(client, threading.Event(), lambda: states.pop(0))


# ---- health and readiness


@pytest.fixture
def front(folder: Path) -> Iterator[tuple[InlineHost, Client, str]]:
    """A host with HTTP before it, without a command around them."""
    engine = {"model": str(folder), "executor": "inline", "device": "cpu", "num_kv_blocks": NUM_BLOCKS}
    host, server = InlineHost(engine, 10, None), HttpServer("127.0.0.1", 0)
    with host.connect() as client:
        server.start(make_app(client))
        yield host, client, server.url
        server.close()
    host.close()


def test_readiness_and_health_tell_the_truth(front: tuple[InlineHost, Client, str]) -> None:
    host, client, url = front
    assert wait_until(lambda: get(f"{url}/ready")[0] == 200, 60)
    assert get(f"{url}/health")[0] == 200
    assert get(f"{url}/stats")[0] == 200  # without keys there is no check
    with Brake(host._llm, 10) as brake:
        stream = begin(client)
        assert get(f"{url}/health")[1]["running"] == 1
        drain = threading.Thread(target=host.end, args=(30.0,))
        drain.start()
        assert wait_until(lambda: get(f"{url}/ready")[0] == 503)
        assert get(f"{url}/ready")[1]["state"] == "draining"
        code, health = get(f"{url}/health")
        assert (code, health["state"], health["running"]) == (200, "draining", 1)
        brake.allow(float("inf"))
        list(stream)
        drain.join(30)
    fail_for_good(host._llm)
    assert wait_until(lambda: get(f"{url}/health")[0] == 503)
    assert "the device melted" in get(f"{url}/health")[1]["error"]
    assert get(f"{url}/ready")[0] == 503
    host._port.close()
    assert wait_until(lambda: not client.connected)
    assert get(f"{url}/health")[1]["state"] == "unavailable"


def test_a_server_that_has_ended_and_a_port_that_has_failed_are_told(
    front: tuple[InlineHost, Client, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, client, url = front
    assert wait_until(lambda: get(f"{url}/ready")[0] == 200, 60)

    def fail(*_: object) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(host._port, "_take", fail)
    assert host.status()["state"] == "ready"
    assert wait_until(lambda: host.status()["state"] == "failed", 10)
    assert "a fault of ours" in host.status()["error"]

    server = HttpServer("127.0.0.1", 0)
    assert server.failed() is None, "it has not begun"
    server.start(make_app(client))
    assert wait_until(lambda: get(f"{server.url}/version")[0] == 200)
    assert server.failed() is None
    server._server.should_exit = True
    assert wait_until(lambda: server.failed() is not None)
    assert server.failed()["error"] == f"the HTTP server at {server.url} has ended"
    server.close()


def test_a_port_is_taken_from_the_moment_it_is_asked_for() -> None:
    first = HttpServer("127.0.0.1", 0)
    with pytest.raises(ValueError, match="cannot listen"):
        HttpServer("127.0.0.1", first.port)
    first.close()
    HttpServer("127.0.0.1", first.port).close()
