"""Starting, ending and dying: what is left behind, and what those who wait are told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from driver.cluster import Cluster
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.running import Ranks
from tests.end_to_end.serving import processes_of_ray, until

LONG = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)


@pytest.fixture
def ranks(tiny: TinyModels, ray_cluster: Cluster) -> Iterator[Ranks]:
    ranks = Ranks(tiny.folder("llama"), 2)
    yield ranks
    ranks.close()


def worker_pids() -> list[int]:
    return processes_of_ray("WorkerActor")


def test_a_killed_worker_is_named_and_close_works_twice(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with ranks.llm(budget=64) as llm:
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        os.kill(worker_pids()[-1], signal.SIGKILL)
        assert list(stream)[-1].finish_reason == "length"
        assert re.search(r"epoch \d+ has ended: rank \d failed: its process died", caplog.text)
    ranks.close()
    ranks.close()


def test_a_worker_that_raises_is_named_with_its_cause(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with ranks.llm(budget=64) as llm:
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        channel = ranks.executor._channel
        llm._engine._command(lambda: channel._socket.send_multipart([channel._peers[1], b"plan", b"junk"]))
        assert list(stream)[-1].finish_reason == "length"
        assert re.search(r"epoch \d+ has ended: rank 1 failed: .*frame", caplog.text)


def test_ending_leaves_no_worker_in_a_joined_cluster(ranks: Ranks) -> None:
    assert len(worker_pids()) == 2
    ranks.close()
    assert until(lambda: not worker_pids(), 10)


SCRIPT = """
import sys
from quadriga import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(sys.argv[1], tensor_parallel_size=2, ray_address="local", dtype="float32") as llm:
        print(llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=3)).output_token_ids)
        print("torch" in sys.modules, "transformers" in sys.modules, flush=True)
        for increment in llm.stream([1, 2, 3], SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)):
            print("token", flush=True)
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        yield Path(folder)


@pytest.fixture
def driver(tiny: TinyModels, tmp_path: Path, short_folder: Path) -> Iterator[subprocess.Popen]:
    """A driver process of its own with a private Ray, in the middle of a stream."""
    script = tmp_path / "driver_script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(short_folder), "PYTHONPATH": os.getcwd()}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tiny.folder("llama"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield process
    process.kill()
    process.communicate()


def processes_naming(folder: Path) -> list[str]:
    """Command lines of processes that have a file below `folder` open or name it."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            names = [*command, *(file.path for file in process.open_files())]
        except psutil.Error:
            continue
        if any(str(folder) in name for name in names) and process.pid != os.getpid():
            found.append(" ".join(command)[:120])
    return found


def test_the_driver_needs_no_torch_and_its_death_leaves_nothing(driver: subprocess.Popen, short_folder: Path) -> None:
    lines = [driver.stdout.readline() for _ in range(3)]
    assert lines[1:] == ["False False\n", "token\n"], driver.stderr.read()
    folders = list(short_folder.glob("quadriga-*"))
    assert len(folders) == 1
    assert processes_naming(folders[0])
    driver.kill()
    gone = until(lambda: not processes_naming(folders[0]) and not folders[0].exists(), 10)
    assert gone, processes_naming(folders[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_all_it_started(
    tiny: TinyModels, tmp_path: Path, short_folder: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "quadriga", "generate", "--model", str(tiny.folder("llama"))]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2, 3]\n" * 200)
    options = ["--tp", "2", "--prompt-file", str(prompts), "--max-tokens", "500", "--ignore-eos", "--json"]
    process = subprocess.Popen(
        [*command, *options, "--ray-address", "local"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short_folder)},
    )
    try:
        for line in process.stderr:
            if "rank 1:" in line:
                break
        time.sleep(1)
        assert process.poll() is None, "the command ended before it could be interrupted"
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert "A worker died or was killed" not in output + errors  # which Ray says of ranks that were not asked to end
    assert until(lambda: not list(short_folder.glob("quadriga-*")), 10)
