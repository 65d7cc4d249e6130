"""`ray job submit` on a cluster that has the dependencies only: the code and the environment come with the job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.clusters import ROOT, SECONDS, free_ports, ray_environment, short_folder
from tests.end_to_end.test_life import until

PACKAGES = ("attention", "driver", "parallel", "scheduler", "workers")
# Only in the job's working directory: it notes who imported it, in which environment.
ONLY_HERE = """
import json, os, sys

def note(code):
    actor = sys.argv[0].endswith("default_worker.py")
    about = {"pid": os.getpid(), "actor": actor, "mark": os.environ.get("MARK"), "code": code, "here": __file__}
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps(about), file=file)
"""


# A stream that goes on for longer than a job that is stopped may.
STREAM = """
import sys
from quadriga import Client, SamplingParams

client = Client.connect(address=f"127.0.0.1:{sys.argv[1]}")
for piece in client.stream("Once", SamplingParams(max_tokens=8000, temperature=0, ignore_eos=True)):
    print("token", flush=True)
"""


@dataclass(frozen=True)
class JobCluster:
    """python: has the dependencies and not this project. dashboard: URL of the jobs interface."""

    python: str
    port: int
    environment: dict[str, str]
    dashboard: str

    def ray(self, *words: str) -> list[str]:
        return [self.python, "-m", "ray.scripts.scripts", *words]


@pytest.fixture(scope="module")
def job_cluster() -> Iterator[JobCluster]:
    """`ray start --head` with room for three ranks, as docs/deploy has it."""
    with short_folder() as folder:
        python = python_without_us(folder / "python")
        # Ray's dashboard leaves a folder in TMPDIR when it is told to end.
        environment = ray_environment(PATH=f"{Path(python).parent}:{os.environ['PATH']}", TMPDIR=str(folder))
        del environment["PYTHONPATH"]
        port, dashboard, client, agent = free_ports(4)
        cluster = JobCluster(python, port, environment, f"http://127.0.0.1:{dashboard}")
        command = cluster.ray("start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--num-cpus", "3")
        command += ["--port", str(port), "--dashboard-port", str(dashboard), "--ray-client-server-port", str(client)]
        command += ["--dashboard-agent-listen-port", str(agent), "--temp-dir", str(folder / "ray")]
        command += ["--disable-usage-stats", "--object-store-memory", str(100 << 20)]
        log = folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=file)
        try:
            assert until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, SECONDS)
            assert process.poll() is None, log.read_text()
            yield cluster
        finally:
            process.terminate()
            process.wait(timeout=SECONDS)


def python_without_us(folder: Path) -> str:
    """A Python with all that is installed here except this project, whose editable install is a .pth file's doing."""
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = str(folder / "bin" / "python")
    code = "import importlib.util as u, ray; assert not any(map(u.find_spec, ['quadriga', 'driver', 'workers']))"
    subprocess.run([python, "-c", code], check=True, cwd=folder, env={"PATH": os.environ["PATH"]})
    return python


@pytest.fixture
def working_dir(tmp_path: Path) -> Path:
    """This project's code, which notes where it runs, and things that must not be uploaded."""
    folder = tmp_path / "work"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("quadriga.py", ".rayignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "only_here.py").write_text(ONLY_HERE)
    for module in ("driver/port.py", "workers/worker.py"):  # the driver's actor has the one, the workers the other
        with (folder / module).open("a") as file:
            file.write("\n\nimport only_here\n\nonly_here.note(__file__)\n")
    for name in (".git/objects", ".venv/lib", "shared"):
        (folder / name).mkdir(parents=True)
        (folder / name / "large").write_bytes(os.urandom(1 << 20))
    return folder


def notes_in(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the process prints, to the line that has `text`; it must come in time."""
    lines, deadline = [], time.monotonic() + 2 * SECONDS
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
        assert time.monotonic() < deadline, "".join(lines)
    pytest.fail("".join(lines))


def submit(cluster: JobCluster, working_dir: Path, variables: dict[str, str], words: Sequence[str]) -> subprocess.Popen:
    """`ray job submit`, which shows the job's log as it grows."""
    command = cluster.ray("job", "submit", "--address", cluster.dashboard, "--working-dir", ".")
    command += ["--submission-id", "served", "--runtime-env-json", json.dumps({"env_vars": variables})]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, "--", *words], env=cluster.environment, cwd=working_dir, text=True, **pipes)


def test_a_submitted_job_brings_its_code_and_stopped_amid_a_stream_it_ends_with_all_its_workers(
    job_cluster: JobCluster, working_dir: Path, smollm2: Path, tmp_path: Path
) -> None:
    notes, (port,) = tmp_path / "notes", free_ports(1)
    words = ["python", "-m", "quadriga", "serve", "--model", "smollm2", "--tp", "3", "--port", str(port)]
    process = submit(job_cluster, working_dir, {"MARK": "seven", "NOTES": str(notes)}, words)
    try:
        log = read_until(process, "is ready at")
        for progress in ("starting: weights and cache", "ready in", f"'llm' is ready at http://127.0.0.1:{port}"):
            assert progress in log, log
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert json.load(answer)["tensor_parallel_size"] == 3

        found = [note for note in notes_in(notes) if note["actor"]]
        assert sorted(Path(note["code"]).name for note in found) == ["port.py", "worker.py", "worker.py", "worker.py"]
        assert {note["mark"] for note in found} == {"seven"}
        (uploaded,) = {Path(note["here"]).parent for note in found}
        assert "working_dir_files" in uploaded.parts
        assert all(Path(note["code"]).is_relative_to(uploaded) for note in found)
        names = {path.name for path in uploaded.iterdir()} - {"__pycache__", ".gitignore", ".rayignore"}
        assert names == {*PACKAGES, "quadriga.py", "only_here.py"}

        words = [job_cluster.python, "-c", STREAM, str(job_cluster.port)]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        stream = subprocess.Popen(words, env=job_cluster.environment, cwd=working_dir, **pipes)
        assert "token" in stream.stdout.readline()
        stop = job_cluster.ray("job", "stop", "--address", job_cluster.dashboard, "served")
        subprocess.run(stop, env=job_cluster.environment, check=True, capture_output=True, timeout=SECONDS)
        pids = [note["pid"] for note in found]
        assert until(lambda: not any(map(psutil.pid_exists, pids)), 25)
        assert "draining, for 30 s at most" in process.communicate(timeout=SECONDS)[0]
        stream.kill()
        stream.communicate()
    finally:
        process.kill()
        process.communicate()


def test_who_has_no_token_may_not_submit(job_cluster: JobCluster) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{job_cluster.dashboard}/api/jobs/")
