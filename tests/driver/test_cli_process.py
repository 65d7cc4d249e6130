"""The command line as users start it: a process of its own, its streams, its signals. Each run costs seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from driver.config import EngineConfig
from tests.models import greedy

MODULE = [sys.executable, "-m", "quadriga"]
SCRIPT = [str(Path(sys.executable).with_name("quadriga"))]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def generate(folder: Path, *options: str) -> list[str]:
    return ["generate", "--model", str(folder), "--device", "cpu", "--num-kv-blocks", "64", *options]


def test_json_lines_are_all_that_stands_on_standard_output(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"The sea"\n{"prompt": "a", "top_p": 2}\n[5, 300]\n')
    options = ("--prompt-file", "prompts.jsonl", "--max-tokens", "5", "--json")
    done = run([*MODULE, *generate(folder, *options)], tmp_path)
    assert done.returncode == 2
    first, bad, last = (json.loads(line) for line in done.stdout.splitlines())
    assert first["output_token_ids"] == greedy(folder, b"The sea", 5)
    assert last["output_token_ids"] == greedy(folder, [5, 300], 5)
    assert "top_p must be in (0, 1], got 2" in bad["error"]
    assert "top_p must be in (0, 1], got 2" in done.stderr
    assert "INFO quadriga" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_is_the_same_program(folder: Path, tmp_path: Path) -> None:
    done = run([*SCRIPT, *generate(folder, "--prompt", "The sea", "--max-tokens", "5", "--json")], tmp_path)
    assert done.returncode == 0
    (found,) = (json.loads(line) for line in done.stdout.splitlines())
    assert found["output_token_ids"] == greedy(folder, b"The sea", 5)


def test_module_and_script_offer_the_same(tmp_path: Path) -> None:
    helps = [run([*command, "generate", "--help"], tmp_path) for command in (MODULE, SCRIPT)]
    assert [done.returncode for done in helps] == [0, 0]
    assert helps[0].stdout == helps[1].stdout
    text = re.sub(r"\s+", " ", helps[0].stdout)
    fields = EngineConfig.__dataclass_fields__
    for option, name in (
        ("--max-num-seqs N", "max_num_seqs"),
        ("--gpu-memory-utilization F", "gpu_memory_utilization"),
        ("--async-depth N", "async_depth"),
        ("--start-timeout S", "start_timeout_seconds"),
        ("--tp N", "tensor_parallel_size"),
    ):
        default = text.split(f" {option} ")[-1].split("(default: ")[1].split(")")[0]
        assert default == str(fields[name].default), option
    for unit in ("in GiB", "seconds to wait", "tokens per KV block", "token budget", "size in ranks", "(0, 1]"):
        assert unit in text
    assert "not given: 128" in text


def test_a_damaged_model_ends_with_code_2_and_one_line(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    os.truncate(damaged / "model.safetensors", 1000)
    done = run([*MODULE, *generate(damaged, "--prompt", "a")], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"quadriga: cannot read {damaged / 'model.safetensors'}")


def test_an_unknown_model_id_ends_with_code_2(tmp_path: Path) -> None:
    done = run([*MODULE, *generate(Path("no-such/model"), "--prompt", "a")], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "'no-such/model' is no folder here" in done.stderr


@contextmanager
def streaming(folder: Path) -> Iterator[subprocess.Popen]:
    """A process that has printed its first bytes and has seconds of work left."""
    command = [*MODULE, *generate(folder, "--prompt", "x", "--max-tokens", "500", "--ignore-eos")]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(1)
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, b"quadriga: interrupted"), (signal.SIGTERM, 143, b"")]
)
def test_a_signal_ends_the_run_in_good_order(folder: Path, number: int, code: int, message: bytes) -> None:
    with streaming(folder) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert process.returncode == code
        assert message in err
        assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_run_quietly(folder: Path) -> None:
    with streaming(folder) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(20) == 1
        assert b"Traceback" not in err
        assert b"Exception ignored" not in err


def test_the_first_answer_does_not_wait_for_torchs_compiler(folder: Path) -> None:
    """Importing it takes longer than the rest of the first step."""
    program = (
        "import sys; from quadriga import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], executor='inline', device='cpu', num_kv_blocks=64) as llm:\n"
        "    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=4, temperature=0.7), use_tqdm=False)\n"
        "print(sorted({'torch', 'torch._dynamo', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['torch']", done.stderr
