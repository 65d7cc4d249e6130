"""Models that cannot be served: the command says which file is at fault and leaves with code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.driver.conftest import Run
from tests.models import make_byte_tokenizer, make_tiny_model

ASK = ("--prompt", "a", "--max-tokens", "2", "--json")
WEIGHTS = "model.safetensors"


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def spoil_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def assert_refused(run: Run, model: Path | str, *parts: str) -> None:
    outcome = run(*ASK, model=model)
    assert (outcome.code, outcome.out) == (2, "")
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("quadriga: ")
    for part in parts:
        assert part in last


def test_the_undamaged_copy_is_served(run: Run, damaged: Path) -> None:
    assert run(*ASK, model=damaged).code == 0


def test_a_folder_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert_refused(run, tmp_path / "nowhere", str(tmp_path / "nowhere"))


def test_a_folder_without_weights(run: Run, damaged: Path) -> None:
    (damaged / WEIGHTS).unlink()
    assert_refused(run, damaged, str(damaged), "no weights", WEIGHTS)


@pytest.mark.parametrize("size", [0, 4, 100, 0.5, -1])
def test_truncated_weights(run: Run, damaged: Path, size: float) -> None:
    """size: bytes left, a share of them, or how many are lost."""
    path = damaged / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes(whole[: int(size * len(whole)) if isinstance(size, float) else size])
    assert_refused(run, damaged, str(path), "damaged or incomplete")


@pytest.mark.parametrize("start", [0, 8, 40])
def test_corrupt_weights(run: Run, damaged: Path, start: int) -> None:
    path = damaged / WEIGHTS
    content = bytearray(path.read_bytes())
    content[start : start + 16] = b"\xff" * 16
    path.write_bytes(content)
    assert_refused(run, damaged, str(path), "damaged or incomplete")


def test_a_missing_tensor_is_named(run: Run, damaged: Path) -> None:
    spoil_tensors(damaged, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(run, damaged, str(damaged), "'model.layers.1.mlp.up_proj.weight'")


def test_a_tensor_too_many_is_named(run: Run, damaged: Path) -> None:
    spoil_tensors(damaged, lambda tensors: tensors.update(extra=tensors["model.norm.weight"].copy()))
    assert_refused(run, damaged, "does not use", "extra")


def test_a_tensor_of_the_wrong_shape_is_named(run: Run, damaged: Path) -> None:
    spoil_tensors(
        damaged, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:40].copy()})
    )
    assert_refused(run, damaged, "'model.norm.weight'", "(40,)", "(48,)")


def test_a_missing_shard_is_named(run: Run, damaged: Path) -> None:
    names = list(load_file(damaged / WEIGHTS))
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(run, damaged, "model-00001-of-00002.safetensors", "not in")


@pytest.mark.parametrize("content", ["", "{", '{"weight_map": 5}', "{}"])
def test_a_damaged_index_is_named(run: Run, damaged: Path, content: str) -> None:
    (damaged / "model.safetensors.index.json").write_text(content)
    assert_refused(run, damaged, "model.safetensors.index.json")


def test_an_architecture_that_is_not_covered(run: Run, damaged: Path) -> None:
    path = damaged / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["GPT2LMHeadModel"]}))
    assert_refused(run, damaged, "GPT2LMHeadModel", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[")]
)
def test_a_damaged_file_is_named(run: Run, damaged: Path, name: str, content: str) -> None:
    (damaged / name).write_text(content)
    assert_refused(run, damaged, str(damaged))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_where_it_matters(run: Run, tmp_path: Path) -> None:
    """The tokenizer knows 260 tokens, the model 250: a text that needs the rest is refused, not misread."""
    small = make_byte_tokenizer(make_tiny_model("mha", tmp_path, vocab_size=250))
    assert run(*ASK, model=small).code == 0
    outcome = run("--prompt", "a<|end|>", "--max-tokens", "2", "--json", model=small)
    assert outcome.code == 2
    assert "256" in outcome.err
    assert "250" in outcome.err


def test_a_chat_without_a_template(run: Run, damaged: Path) -> None:
    make_byte_tokenizer(damaged, chat_template=None)
    outcome = run("--prompt", "hi", "--chat", "--json", model=damaged)
    assert outcome.code == 2
    assert "no chat template" in outcome.err


def test_a_text_for_a_model_without_tokenizer(run: Run, damaged: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    outcome = run(*ASK, model=damaged)
    assert outcome.code == 2
    assert "a text prompt needs a tokenizer" in outcome.err
