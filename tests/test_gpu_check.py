"""The GPU check in its reduced form, so that it never rots where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where kernels lie that are compiled already
PARTS = ("backends", "tokens", "graphs", "linears", "shards", "timings", "serving", "peers")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("gpu-check")
    environment = {"PATH": "/usr/bin:/bin", "OUT": str(out), "PYTHON": sys.executable, "HOME": str(out)}
    environment["XDG_CACHE_HOME"] = CACHE
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--cpu"]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=120)
    return done, out


def test_every_part_passes_on_cpu(run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, out = run
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "gpu_check.json").read_text())
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(PARTS, "passed")
    assert report["machine"]["device"] == "cpu"
    parts = report["parts"]
    assert parts["backends"]["tested"] == ["flash_attn", "torch_flash"]
    assert parts["graphs"]["backends"]["reference"]["replays"]
    assert [row["name"] for row in parts["timings"]["decode"]] == ["1 rows launched", "4 rows launched"]
    assert all(row["measured"] > 0 for kind in ("decode", "prefill") for row in parts["timings"][kind])
    assert [row["name"].split(", ")[1] for row in parts["timings"]["mixed"]] == ["one", "two"]
    assert set(parts["linears"]["largest_error"]) == {*(f"int4 in groups of {n}" for n in (32, 64, 128)), "int8", "fp8"}
    assert "flash_attn fp8" in parts["backends"]["largest_error"]
    for way in ("chunked prefill", "whole prompts"):
        assert parts["serving"]["tbt_ms"][way]["longest"] >= parts["serving"]["tbt_ms"][way]["p50"] > 0
        assert all(step["step"] > 0 for step in parts["serving"]["steps_ms"][way].values())
    assert "mixed" in parts["serving"]["steps_ms"]["chunked prefill"]
    for name in ("decode", "serving"):
        assert (out / f"gpu_check_{name}.png").is_file()


def test_torch_and_numpy_are_enough(tmp_path: Path) -> None:
    """What is installed here besides is hidden."""
    hidden = ("llguidance", "msgpack", "safetensors", "psutil", "zmq", "ray", "transformers", "tokenizers", "fastapi")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {hidden!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--cpu", "--out", str(tmp_path / "out")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path)}
    environment["XDG_CACHE_HOME"] = CACHE
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert report["machine"]["missing"] == list(hidden[:4])


def test_without_a_gpu_the_full_form_says_so_and_passes_nothing(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--out", str(tmp_path / "out")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "torch sees no CUDA device; --cpu runs the reduced form" in done.stderr
    assert not (tmp_path / "out").exists()
