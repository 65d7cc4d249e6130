"""Building kernels: once, atomically, anew when a file is damaged, refused with a reason; and one OpenMP runtime."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from attention.backend import BackendError, HeadLayout, make_backend
from attention.native import NativeError, call, function, load_library
from attention.shared_work import only_one

SOURCE = 'extern "C" __attribute__((visibility("default"))) long answer(const long* a, void*) { return a[0] + NUMBER; }'
LAYOUT, CPU = HeadLayout(2, 1, 8), torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and no library remembered from before."""
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QUADRIGA_KERNELS", raising=False)
    load_library.cache_clear()
    yield tmp_path / "cache" / "kernels"
    load_library.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    try:
        load_library(write_source(tmp_path, 0))
    except NativeError as error:
        pytest.skip(f"no compiled kernels here: {error}")
    return write_source(tmp_path, 1)


def write_source(folder: Path, number: int) -> Path:
    path = folder / f"answer{number}.cpp"
    path.write_text(SOURCE.replace("NUMBER", str(number)))
    return path


def answer(source: Path) -> int:
    """41 plus the source's number."""
    return call(function(load_library(source), "answer"), 41)


def libraries(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.glob("*.so")}


def test_a_second_process_takes_what_the_first_has_built(source: Path, cache: Path) -> None:
    assert answer(source) == 42
    built = libraries(cache)
    load_library.cache_clear()
    assert answer(source) == 42
    assert libraries(cache) == built


def test_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    assert answer(source) == 42
    assert answer(write_source(tmp_path, 2)) == 43
    source.write_text(SOURCE.replace("NUMBER", "5"))
    load_library.cache_clear()
    assert answer(source) == 46


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_file_is_built_anew(source: Path, cache: Path, damage: str) -> None:
    before = set(cache.glob("*.so"))
    # In a process of its own, because this one could not unload the library it would damage.
    call = [sys.executable, "-c", f"from attention.native import *; load_library(Path({str(source)!r}))"]
    subprocess.run(call, check=True)
    (path,) = set(cache.glob("*.so")) - before
    content = path.read_bytes()
    damaged = {"empty": b"", "cut": content[:-3000], "flipped": content[:5000] + b"\xff" + content[5001:]}[damage]
    assert damaged != content
    path.unlink()
    path.write_bytes(damaged)
    assert answer(source) == 42
    assert path.read_bytes() == content


def test_of_ranks_that_need_it_at_the_same_time_one_builds(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = tmp_path / "compiler", tmp_path / "runs"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo run >> {runs};; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(answer, [source] * 8)) == [42] * 8
    assert {path.suffix for path in cache.iterdir()} == {".so", ".lock"}
    assert runs.read_text() == "run\n"


def test_a_process_that_compiles_for_ever_is_not_waited_for(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.native._BUILD_SECONDS", 0.3)
    monkeypatch.setattr("attention.native._find_compiler", lambda: "true")  # which answers in time
    path = cache / "kernels-x.so"
    with only_one(path.with_suffix(".lock"), 1, "standing still"):
        monkeypatch.setattr("attention.native._fingerprint", lambda *_: "x")
        with pytest.raises(NativeError, match=f"process {os.getpid()} has been compiling {path.name} for more than"):
            load_library(source)


def test_what_the_compiler_says_is_passed_on(source: Path) -> None:
    source.write_text("int main() { nonsense }")
    with pytest.raises(NativeError, match=r"failed: .*error: .*nonsense"):
        load_library(source)


def test_without_a_compiler_auto_is_the_reference_and_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert make_backend("auto", LAYOUT, 1.0, CPU).name == "reference"
    assert "no C++ compiler (no-such-compiler)" in caplog.text
    assert "slow for long contexts" in caplog.text
    with pytest.raises(BackendError, match="no-such-compiler"):
        make_backend("cpu", LAYOUT, 1.0, CPU)


def test_a_compiler_that_cannot_be_run_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\0neither script nor program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeError, match=f"cannot run {compiler}: "):
        load_library(write_source(tmp_path, 7))


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("QUADRIGA_KERNELS", "off")
    assert make_backend("auto", LAYOUT, 1.0, CPU).name == "reference"
    assert "QUADRIGA_KERNELS=off" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "file"))
    with pytest.raises(NativeError, match="cannot build"):
        load_library(write_source(tmp_path, 7))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux shows a process its libraries")
def test_the_process_has_one_openmp_runtime(source: Path) -> None:
    code = (
        "import re, torch\n"
        "from attention.backend import HeadLayout, make_backend\n"
        "backend = make_backend('cpu', HeadLayout(2, 1, 8), 1.0, torch.device('cpu'))\n"
        "torch.randn(500, 500) @ torch.randn(500, 500)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len(set(re.findall(r'\\S*/lib(?:g|i)?omp\\S*', maps))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
