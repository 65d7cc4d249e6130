"""The perplexity of the benchmark is transformers', and the model off the grid computes the same by other numbers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.bench_perplexity import LINEARS, TEXT, WEIGHTS, measure, moved
from tests.models import load_reference, make_byte_tokenizer, make_tiny_model

ARGS = argparse.Namespace(window=50, tokens=120, repeats=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(make_tiny_model("llama", tmp_path_factory.mktemp("model")))


def test_perplexity_is_that_of_transformers(folder: Path) -> None:
    found = measure(str(folder), "fp32", ARGS)
    ids = list(TEXT.read_bytes()[: ARGS.tokens])
    model, losses = load_reference(folder), []
    for at in range(0, len(ids), ARGS.window):
        window = torch.tensor(ids[at : at + ARGS.window])
        with torch.inference_mode():
            logits = model(window[None]).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").tolist()
    assert found["tokens"] == len(losses) == 117
    assert found["perplexity"] == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-4)


def test_numbers_off_the_grid_compute_the_same(folder: Path, tmp_path: Path) -> None:
    moved(folder, tmp_path)
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / WEIGHTS)
    for name in LINEARS:
        assert not torch.equal(before[f"model.layers.1.{name}.weight"], after[f"model.layers.1.{name}.weight"])
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        logits, same = (load_reference(place)(ids).logits for place in (folder, tmp_path))
    torch.testing.assert_close(logits, same, rtol=1e-3, atol=1e-3)
