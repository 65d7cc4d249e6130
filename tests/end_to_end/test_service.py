"""`quadriga serve` on Ray: streams outlive drivers and workers, and nothing outlives the service."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from driver.cluster import Cluster
from driver.handle import Client
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.serving import Serve, left_in_ray, processes_of_ray, status_of, until
from tests.models import make_byte_tokenizer

PROMPT = [1, 2, 3]
LONG = 440
PARAMS = (
    SamplingParams(temperature=0, max_tokens=LONG),
    SamplingParams(seed=11, max_tokens=LONG),
    SamplingParams(seed=2**64 - 1, temperature=1.4, top_k=40, max_tokens=LONG),
)
Start = Callable[..., Serve]


@pytest.fixture(scope="session")
def folder(tiny: TinyModels) -> Path:
    return make_byte_tokenizer(shutil.copytree(tiny.folder("llama"), tiny.folder("llama").with_name("served")))


@pytest.fixture
def start(folder: Path, ray_cluster: Cluster) -> Iterator[Start]:
    """Starts services on the tests' Ray; whatever a failed test leaves ends with it."""
    started: list[Serve] = []

    def start(name: str, *options: str, model: Path = folder) -> Serve:
        address = ray.get_runtime_context().gcs_address
        options = ("--model", str(model), "--name", name, "--num-kv-blocks", "256", *options)
        started.append(Serve(*options, address=address))
        return started[-1]

    yield start
    for serve in started:
        serve.close()
    for entry in ray.util.list_named_actors(all_namespaces=True):
        ray.kill(ray.get_actor(entry["name"], entry["namespace"]), no_restart=True)


@pytest.fixture
def client() -> Iterator[Callable[[str], Client]]:
    clients: list[Client] = []

    def connect(name: str) -> Client:
        clients.append(Client.connect(name))
        return clients[-1]

    yield connect
    for one in clients:
        one.close()


def kill_under_streams(client: Client, victim: str) -> None:
    """Streams go on to just the tokens and texts that an undisturbed run gives."""
    expected = client.generate([PROMPT] * len(PARAMS), PARAMS)
    before = client.reconnections
    streams = [client.stream(PROMPT, params) for params in PARAMS]
    pieces = [[next(stream)] for stream in streams]
    os.kill(processes_of_ray(victim)[-1], signal.SIGKILL)
    had = [len(stream._call.ask.produced) for stream in streams]
    assert max(had) < LONG - 20, "they were nearly over"
    for stream, got, whole in zip(streams, pieces, expected, strict=True):
        got.extend(stream)
        assert [token for piece in got for token in piece.token_ids] == whole.output_token_ids
        assert "".join(piece.text for piece in got) == whole.text
        assert got[-1].finish_reason == "length"
    assert client.reconnections == before + (victim == "DriverActor")


def test_a_killed_driver_is_not_noticed_and_a_killed_serve_leaves_nothing(
    start: Start, client: Callable[[str], Client]
) -> None:
    serve = start("two", "--tp", "2")
    serve.wait_ready()
    pid = status_of("two")["pid"]
    kill_under_streams(client("two"), "DriverActor")
    assert status_of("two")["pid"] != pid
    assert status_of("two")["restarted"]

    assert len(processes_of_ray("DriverActor", "WorkerActor")) == 3
    serve.process.kill()
    assert until(lambda: not left_in_ray("two"), 20), left_in_ray("two")


@pytest.mark.parametrize("stopped", ["the driver", "serve"])
def test_who_is_stopped_for_a_while_finds_the_others_where_they_were(
    start: Start, client: Callable[[str], Client], stopped: str
) -> None:
    serve = start("still", "--tp", "2")
    serve.wait_ready()
    driver, ranks = status_of("still")["pid"], sorted(processes_of_ray("WorkerActor"))
    handle = client("still")
    whole = handle.generate(PROMPT, PARAMS[1])
    stream = handle.stream(PROMPT, PARAMS[1])
    tokens = list(next(stream).token_ids)
    pid = driver if stopped == "the driver" else serve.process.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(14)  # longer than an owner or a connection may be silent, and than a step may take
    os.kill(pid, signal.SIGCONT)
    for piece in stream:
        tokens += piece.token_ids
    assert tokens == whole.output_token_ids
    time.sleep(3)  # whoever was to end by now would have
    assert (status_of("still")["pid"], sorted(processes_of_ray("WorkerActor"))) == (driver, ranks)
    assert handle.stats()["restarts"] == 0
    serve.process.send_signal(signal.SIGTERM)
    assert serve.wait() == 0, serve.text


def test_a_killed_worker_is_not_noticed_and_sigterm_leaves_nothing(
    start: Start, client: Callable[[str], Client], folder: Path, tiny: TinyModels
) -> None:
    serve = start("three", "--tp", "3")
    url = serve.wait_ready()
    assert serve.wait_for(r"ready in \d+\.\d s \(.*weights and cache \d")
    pid = status_of("three")["pid"]
    handle = client("three")
    kill_under_streams(handle, "WorkerActor")
    assert status_of("three")["pid"] == pid, "a lost rank costs no driver"
    found = handle.generate(PROMPT, SamplingParams(temperature=0, max_tokens=64))
    assert found.output_token_ids == tiny.greedy("llama", PROMPT, 64)

    stream = handle.stream(PROMPT, PARAMS[0])
    next(stream)
    serve.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].finish_reason == "length", "a running request was not left to finish"
    assert serve.wait() == 0
    assert "stopped; 0 requests were aborted" in serve.text
    assert "Traceback" not in serve.text
    assert serve.process.stdout.read() == ""
    assert not left_in_ray("three")
    assert url.startswith("http://127.0.0.1:")


def test_a_name_is_taken_until_it_is_replaced(start: Start, client: Callable[[str], Client]) -> None:
    first = start("one", "--executor", "ray")
    first.wait_ready()
    refused = start("one", "--executor", "ray")
    assert refused.wait(30) == 2
    assert "a service named 'one' runs on this Ray cluster already" in refused.lines[-1]

    handle = client("one")
    whole = handle.generate(PROMPT, PARAMS[1])
    stream = handle.stream(PROMPT, PARAMS[1])
    next(stream)
    pid = status_of("one")["pid"]
    for worker in (workers := processes_of_ray("WorkerActor")):  # so that the other finds the stream running
        os.kill(worker, signal.SIGSTOP)
    successor = start("one", "--executor", "ray", "--replace", "--detach")
    assert successor.wait_for("service 'one' is drained and replaced")
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    assert successor.wait(60) == 0
    assert "service 'one' is ready; `quadriga stop --name one` ends it" in successor.text
    assert status_of("one")["pid"] != pid
    assert first.wait(30) == 1, first.text
    assert "the service has failed" in first.lines[-1]
    assert list(stream)[-1].finish_reason == "length", "a running request was not left to finish"
    # The handle finds the successor; neither its predecessor's owner nor its own command takes that along.
    assert handle.generate(PROMPT, PARAMS[1]).output_token_ids == whole.output_token_ids
    assert handle.reconnections == 1
    address = ray.get_runtime_context().gcs_address
    stop = [sys.executable, "-m", "quadriga", "stop", "--name", "one", "--ray-address", address]
    done = subprocess.run(stop, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "quadriga: 'one' has ended; 0 requests were aborted")
    assert until(lambda: not left_in_ray("one"), 20), left_in_ray("one")
    assert subprocess.run(stop, capture_output=True, timeout=60).returncode == 1


def test_a_model_that_cannot_be_loaded_ends_it_with_the_cause(start: Start, folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    os.truncate(damaged / "model.safetensors", 20_000)
    began = time.monotonic()
    serve = start("broken", "--tp", "2", model=damaged)
    assert serve.wait(60) == 2, serve.text
    assert time.monotonic() - began < 30
    assert "model.safetensors" in serve.lines[-1]
    assert "Traceback" not in serve.text
    assert until(lambda: not left_in_ray("broken"), 10), left_in_ray("broken")


SCRIPT = """
from quadriga import Client, SamplingParams
with Client.connect("private") as client:
    print(client.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=16)).output_token_ids)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_ray_of_its_own_is_found_and_ends_with_it(
    folder: Path, tiny: TinyModels, ray_cluster: Cluster, number: signal.Signals
) -> None:
    with tempfile.TemporaryDirectory(prefix="q") as short:
        options = ("--model", str(folder), "--name", "private", "--executor", "ray", "--num-kv-blocks", "64")
        serve = Serve(*options, address="local", TMPDIR=short)
        try:
            serve.wait_ready()
            (own,) = Path(short).glob("quadriga-*")
            if number == signal.SIGTERM:
                # A user's shell says nothing of Ray's authentication, which is on by default.
                shell = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
                command = [sys.executable, "-c", SCRIPT]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=shell)
                assert done.stdout == f"{tiny.greedy('llama', PROMPT, 16)}\n", done.stderr
                os.killpg(serve.process.pid, number)  # as service managers do
                code = serve.wait()
                assert "stopped; 0 requests were aborted" in serve.text
            else:
                code = serve.end(number)
            assert code == (0 if number == signal.SIGTERM else -number)
            assert until(lambda: not own.exists(), 15)
        finally:
            serve.close()
