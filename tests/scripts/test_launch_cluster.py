"""scripts/launch_cluster.sh and stop_cluster.sh: what they would do, and a cluster of one machine from start to end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.clusters import ROOT, SECONDS, free_ports, ray_environment
from tests.end_to_end.test_life import processes_naming, until
from tests.models import make_byte_tokenizer, make_tiny_model

LAUNCH, STOP = str(ROOT / "scripts" / "launch_cluster.sh"), str(ROOT / "scripts" / "stop_cluster.sh")


class Scripts:
    """Runs the two scripts with a state folder of their own, and one for what Ray's dashboard leaves behind."""

    def __init__(self, state: Path, temporary: str) -> None:
        self.state = state
        self.exported: dict[str, str] = {}
        self.environment = ray_environment(QUADRIGA_PYTHON=sys.executable, QUADRIGA_STATE=str(state), TMPDIR=temporary)
        del self.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # the script's own business

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        everything = {**self.environment, **environment}
        return subprocess.run(
            ["bash", *words], env=everything, capture_output=True, text=True, timeout=2 * SECONDS, cwd="/"
        )

    def plan(self, *words: str, **environment: str) -> list[list[str]]:
        """The commands of a dry run, each without its program's folder; what it exports is in `exported`."""
        done = self.run(LAUNCH, "--dry-run", *words, **environment)
        assert done.returncode == 0, done.stderr
        assert not self.state.exists()
        lines = [shlex.split(line) for line in done.stdout.splitlines()]
        self.exported = dict(words[1].split("=", 1) for words in lines if words[0] == "export")
        commands = [words for words in lines if words[0] != "export"]
        return [[Path(program).name, *rest] for program, *rest in commands]

    def pids(self) -> list[int]:
        return [int(file.read_text().split()[0]) for file in self.state.glob("*.pid")]


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as temporary:  # short enough for sockets
        yield Scripts(tmp_path / "state", temporary)


def has(command: list[str], *words: str) -> bool:
    return shlex.join(words) in shlex.join(command)


def test_a_head_for_this_machine_alone_listens_on_the_loopback_address(scripts: Scripts) -> None:
    ray, wait, serve = scripts.plan("--head", "--tp", "3", "--model", "smollm2", "--", "--max-num-seqs", "8")
    assert ray[:3] == ["ray", "start", "--head"]
    assert has(ray, "--node-ip-address", "127.0.0.1")
    assert has(wait, "quadriga", "wait-for-devices", "--tp", "3", "--nodes", "1", "--device", "auto")
    assert has(wait, "--wait-seconds", "300")
    assert has(serve, "quadriga", "serve", "--model", "smollm2", "--tp", "3")
    assert has(serve, "--port", "8000")
    assert serve[-2:] == ["--max-num-seqs", "8"]
    assert scripts.exported["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert scripts.exported["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert scripts.exported["RAY_AUTH_MODE"] == "token"


def test_a_head_for_more_machines_listens_for_them(scripts: Scripts) -> None:
    words = ["--head", "--tp", "16", "--model", "m", "--nodes", "2", "--device", "cuda", "--port", "9000"]
    ray, wait, serve = scripts.plan(*words, "--wait-seconds", "9", "--ray-options", "--port 6380 --num-cpus 4")
    assert not has(ray, "--node-ip-address")
    assert ray[-4:] == ["--port", "6380", "--num-cpus", "4"]
    assert has(wait, "--tp", "16", "--nodes", "2", "--device", "cuda", "--wait-seconds", "9")
    assert has(serve, "--device", "cuda", "--port", "9000")


def test_joining_starts_ray_only(scripts: Scripts) -> None:
    (ray,) = scripts.plan("--join", "10.0.0.1:6379", "--node-ip", "10.0.0.2")
    assert has(ray, "start", "--address", "10.0.0.1:6379", "--node-ip-address", "10.0.0.2")


def test_a_named_cluster_is_used_as_it_is(scripts: Scripts) -> None:
    wait, serve = scripts.plan("--tp", "2", "--model", "m", RAY_ADDRESS="10.0.0.1:6379")
    assert "wait-for-devices" in wait
    assert "serve" in serve
    assert "RAY_ADDRESS" not in scripts.exported


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "m"], "--tp and --model are needed"),
        (["--tp", "0", "--model", "m"], "must be positive numbers, got 0"),
        (["--tp", "2", "--model"], "--model needs a value"),
        (["--tp", "2", "--model", "m", "--gpus", "3"], "unknown option --gpus"),
        (["--head", "--join", "a:1"], "exclude each other"),
    ],
)
def test_wrong_words_are_refused(scripts: Scripts, words: list[str], message: str) -> None:
    done = scripts.run(LAUNCH, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 30),
        (["--max-num-seqs", "8", "--drain-seconds", "300", "--no-prefix-caching"], 300),
        (["--drain-seconds=0.2"], 0),
        (["--drain-seconds=5", "--drain-seconds", "1e3"], 1000),
    ],
)
def test_what_a_service_gives_its_requests_is_remembered(scripts: Scripts, words: list[str], seconds: int) -> None:
    source = f"source {shlex.quote(str(ROOT / 'scripts' / 'cluster_state.sh'))}"
    assert scripts.run("-c", f"{source}; drain_seconds {shlex.join(words)}").stdout == f"{seconds}\n"


def test_a_service_that_drains_is_not_killed_before_its_time(scripts: Scripts, tmp_path: Path) -> None:
    (fast := tmp_path / "bin").mkdir()
    (fast / "sleep").symlink_to("/bin/true")  # the script waits in sleeps of 0.2 s
    scripts.state.mkdir()
    (scripts.state / "drain").write_text("5\n")
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", stubborn], stdout=subprocess.PIPE) as serve:
        serve.stdout.readline()
        source = f"source {shlex.quote(str(ROOT / 'scripts' / 'cluster_state.sh'))}"
        scripts.run("-c", f"{source}; remember serve {serve.pid}")
        done = scripts.run(STOP, PATH=f"{fast}:{os.environ['PATH']}")
        assert f"serve (process {serve.pid}) has not ended within 65 s; killing it" in done.stderr
        assert serve.wait(5) == -9
    assert not list(scripts.state.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_byte_tokenizer(make_tiny_model("llama", tmp_path / "model"))


@pytest.fixture
def options(scripts: Scripts) -> Iterator[list[str]]:
    """Options for ports that are free here. Whatever the test, all is stopped at its end."""
    port, dashboard, ray, client, agent = map(str, free_ports(5))
    ray_options = ["--port", ray, "--ray-client-server-port", client, "--dashboard-agent-listen-port", agent]
    ray_options += ["--num-cpus", "2", "--object-store-memory", str(100 << 20)]
    yield ["--port", port, "--dashboard-port", dashboard, "--ray-options", shlex.join(ray_options)]
    scripts.run(STOP)


def test_launch_to_stop(scripts: Scripts, model: Path, options: list[str], tmp_path: Path) -> None:
    done = scripts.run(LAUNCH, "--head", "--tp", "2", "--model", str(model), *options, "--", "--num-kv-blocks", "64")
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1: 2 of 2 CPUs free: room for 2 of 2" in done.stderr
    url = f"http://127.0.0.1:{options[1]}"
    for part in (f"curl {url}/health", f"--address http://127.0.0.1:{options[3]}", f"source {scripts.state}/env"):
        assert part in done.stderr
    with urllib.request.urlopen(f"{url}/health") as answer:
        assert json.load(answer)["state"] == "ready"
    folder, pids = Path((scripts.state / "folder").read_text().strip()), scripts.pids()
    assert len(pids) == 2

    again = scripts.run(LAUNCH, "--head", "--tp", "1", "--model", str(model), *options)
    assert (again.returncode, "was launched already" in again.stderr) == (2, True)
    # Another service on the same cluster, which is full: that says so, and leaves the cluster and the first alone.
    other = Scripts(tmp_path / "other", scripts.environment["TMPDIR"])
    variables = dict(line.split("export ")[1].split("=") for line in (scripts.state / "env").read_text().splitlines())
    variables["RAY_AUTH_TOKEN"] = scripts.environment["RAY_AUTH_TOKEN"]
    refused = other.run(LAUNCH, "--tp", "1", "--model", str(model), "--wait-seconds", "1", **variables)
    assert refused.returncode == 1
    assert "127.0.0.1: 0 of 2 CPUs free: room for 0 of 1" in refused.stderr
    assert "gave up after 1 s; still missing: room for 1 rank" in refused.stderr
    assert all(map(psutil.pid_exists, pids))

    stopped = scripts.run(STOP)
    assert stopped.returncode == 0, stopped.stderr
    assert until(lambda: not processes_naming(folder), 5), processes_naming(folder)
    assert not folder.exists()
    assert "stopped; 0 requests were aborted" in (scripts.state / "serve.log").read_text()
    assert "nothing was launched here" in scripts.run(STOP).stderr


def test_a_service_that_cannot_start_is_told_and_leaves_nothing(scripts: Scripts, options: list[str]) -> None:
    done = scripts.run(LAUNCH, "--head", "--tp", "2", "--model", "/no/such/model", *options)
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "the service could not start" in done.stderr
    assert not scripts.pids()
    assert not processes_naming(scripts.state)


def test_stopping_ends_no_process_that_only_has_a_remembered_number(scripts: Scripts) -> None:
    """The number of a process that ended may be another's by then."""
    scripts.state.mkdir()
    (scripts.state / "serve.pid").write_text(f"{os.getpid()} 1\n")
    assert scripts.run(STOP).returncode == 0
