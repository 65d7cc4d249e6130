"""Quantised checkpoints end to end: the tokens of transformers with the numbers that they stand for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file

from attention.native import load_library
from driver.cluster import Cluster
from driver.config import ConfigError
from driver.llm import LLM
from tests.end_to_end.running import Ranks, outputs
from tests.end_to_end.test_tiny_models import GREEDY, MAX_TOKENS, PROMPTS
from tests.models import greedy, make_tiny_model
from tests.packing import KINDS, gptq, store
from tests.workers.compiled import kernels_or_skip
from workers.architecture import UnsupportedModel

# Whole groups of 32 and whole words, in which the cuts of ranks fall anywhere.
SIZES = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 304}
ONE_RANK = [
    *((name, "llama", "lm_head") for name in KINDS),
    ("awq", "qwen2", "down_proj"),
    ("gptq", "llama", "nothing"),
]
SEVERAL = [("gptq asymmetric", 2), ("awq 32", 3), ("packed asymmetric", 2), ("fp8", 3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(kind, root / kind, **SIZES, head_dim=16) for kind in ("llama", "qwen2")}


def check(stored: Path, plain: Path, size: int = 1, **settings: str) -> list[int]:
    """Compares tokens and returns the bytes of each rank's weights."""
    expected = [greedy(plain, prompt, MAX_TOKENS) for prompt in PROMPTS]
    ranks = Ranks(stored, size, **settings)
    try:
        with ranks.llm(7) as llm:
            assert outputs(llm, PROMPTS, GREEDY) == expected
        return [ready.weight_bytes for ready in ranks.ready]
    finally:
        ranks.close()


@pytest.mark.parametrize(("name", "model", "left"), ONE_RANK)
def test_one_rank(name: str, model: str, left: str, models: dict[str, Path], tmp_path: Path) -> None:
    """left: linears that the checkpoint does not quantise: the head, others, or none."""
    check(*store(models[model], KINDS[name], tmp_path, left))


@pytest.mark.parametrize(("name", "size"), SEVERAL)
def test_several_ranks(name: str, size: int, models: dict[str, Path], ray_cluster: Cluster, tmp_path: Path) -> None:
    check(*store(models["llama"], KINDS[name], tmp_path), size)


@pytest.mark.parametrize(("name", "bits", "group"), [("awq 32", 4, 32), ("gptq", 4, 16), ("packed int8", 8, 0)])
def test_weights_stay_packed(name: str, bits: int, group: int, models: dict[str, Path], tmp_path: Path) -> None:
    """Half a byte a weight and two fp32 numbers a group, or a byte and one for each output."""
    kernels_or_skip()
    stored, plain = store(models["llama"], KINDS[name], tmp_path)
    expected = 0
    for tensor_name, weight in load_file(plain / "model.safetensors").items():
        if tensor_name.endswith("proj.weight"):
            outputs, inputs = weight.shape
            expected += outputs * inputs * bits // 8 + outputs * (8 * inputs // group if group else 4)
        else:  # vocabularies come in panels of 32
            expected += (320 if weight.dim() == 2 else len(weight)) * weight[0].nbytes
    assert check(stored, plain) == [expected]


@pytest.mark.parametrize("name", ["awq 32", "gptq int8", "fp8"])
def test_without_kernels_the_tokens_are_the_same_and_a_warning_tells_what_it_costs(
    name: str,
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("QUADRIGA_KERNELS", "off")
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            check(*store(models["llama"], KINDS[name], tmp_path), attention_backend="reference")
    finally:
        load_library.cache_clear()
    assert caplog.text.count("there is no kernel here for") == 1


def test_what_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    stored, _ = store(models["llama"], KINDS["gptq"], tmp_path)
    with pytest.raises(ConfigError, match=r"int4 needs plain weights, .* has int4 \(gptq, groups of 16\)"):
        LLM(str(stored), quantization="int4")
    config = json.loads((stored / "config.json").read_text())
    for changes, message in (({"desc_act": True}, "desc_act is true"), ({"bits": 3}, "bits is 3, read are 4 and 8")):
        settings = gptq(**{"group": 16, **changes})
        (stored / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(UnsupportedModel, match=message):
            LLM(str(stored))
