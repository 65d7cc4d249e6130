"""Conversion of GGUF files: done once per content, whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import workers.gguf
from attention.shared_work import cache_root
from workers.gguf import ConversionError, _fingerprint, converted_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Not a model, but large enough that its fingerprint takes samples."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 400)
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were converted, by a converter that takes its time and writes two files."""
    done: list[Path] = []

    def write_model(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        time.sleep(0.05)
        (folder / "model.safetensors").write_bytes(path.read_bytes())
        done.append(path)

    monkeypatch.setattr(workers.gguf, "_write_model", write_model)
    return done


def folders(cache: Path) -> list[str]:
    return [path.name for path in (cache / "gguf").iterdir() if path.is_dir()]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"<html></html>" * 100])
def test_a_corrupt_file_is_named_and_leaves_no_folder(content: bytes, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ConversionError, match=f"cannot read GGUF file {path}"):
        converted_folder(path)
    assert folders(cache) == []


def test_an_interrupted_conversion_leaves_no_folder(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.gguf, "_write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted_folder(file)
    assert folders(cache) == []


def test_a_file_is_converted_once(file: Path, cache: Path, conversions: list[Path]) -> None:
    folder = converted_folder(file)
    assert folder.parent == cache / "gguf"
    assert (folder / "model.safetensors").read_bytes() == file.read_bytes()
    assert converted_folder(file) == folder
    assert conversions == [file]
    assert folders(cache) == [folder.name]


def test_a_copy_needs_no_second_conversion(file: Path, tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    first = converted_folder(file)
    copy = tmp_path / "elsewhere" / file.name
    copy.parent.mkdir()
    shutil.copy(file, copy)
    assert converted_folder(copy) == first
    assert conversions == [file]


def test_ranks_that_start_together_convert_once(file: Path, cache: Path, conversions: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(converted_folder(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert conversions == [file]


def test_a_process_that_converts_for_ever_is_not_waited_for(
    file: Path, cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers.gguf, "LOCK_SECONDS", 0.5)
    folder = converted_folder(file)
    shutil.rmtree(folder)
    (lock,) = folder.parent.glob(".*.lock")
    assert lock.read_text() == str(os.getpid()), "who has it does not say so"
    holding = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-S", "-c", f"{holding}; time.sleep(60)", str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder, caplog.at_level("INFO"):
        holder.stdout.readline()
        began = time.monotonic()
        with pytest.raises(ConversionError, match=f"process {os.getpid()} has been converting {file}"):
            converted_folder(file)
        assert 0.5 <= time.monotonic() - began < 5
        assert caplog.text.count(f"waiting for process {os.getpid()}") == 1
        holder.kill()
    assert converted_folder(file) == folder


@pytest.mark.parametrize("place", [0, 5, 70_000, -1])
def test_a_changed_byte_changes_the_fingerprint(place: int, file: Path) -> None:
    before = _fingerprint(file)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert _fingerprint(file) != before


def test_bytes_more_or_less_change_the_fingerprint(file: Path) -> None:
    prints = {_fingerprint(file)}
    content = file.read_bytes()
    for changed in (content + b"\0", content[:-1], b""):
        file.write_bytes(changed)
        prints.add(_fingerprint(file))
    assert len(prints) == 4


def test_changes_behind_a_large_head_are_sampled_throughout(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head of 1 KiB and samples of 256 bytes, the file is larger than what is read of it."""
    monkeypatch.setattr(workers.gguf, "_HEAD_BYTES", 1024)
    monkeypatch.setattr(workers.gguf, "_SAMPLE_BYTES", 256)
    content, prints = file.read_bytes(), {_fingerprint(file)}
    for start in range(1024, len(content) - 4096, 4096):
        file.write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])
        prints.add(_fingerprint(file))
    assert len(prints) == 1 + len(range(1024, len(content) - 4096, 4096))


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("QUADRIGA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "quadriga"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "quadriga"
