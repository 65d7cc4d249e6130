"""Rotary embedding against transformers, from the same config.json, for every covered type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from workers.architecture import RopeSpec, read_architecture
from workers.rope import RotaryTable, inverse_frequencies, rotate

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default with another theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    "llama3 with a short original context": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn with betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with an attention factor": {**YARN, "attention_factor": 1.25},
    "yarn with mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6},
    "yarn not truncated": {**YARN, "truncate": False, "rope_theta": 150_000.0},
    "yarn that does not stretch": {**YARN, "factor": 1.0},
    "yarn without an original length": {"rope_type": "yarn", "factor": 4.0},
}
HEAD_DIM = 64


@pytest.fixture(params=SETTINGS)
def config(request: pytest.FixtureRequest) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 10_000.0, **SETTINGS[request.param]},
    )


@pytest.fixture
def spec(config: LlamaConfig, tmp_path: Path) -> RopeSpec:
    config.save_pretrained(tmp_path)
    return read_architecture(tmp_path).rope


def test_inverse_frequencies_are_those_of_transformers(config: LlamaConfig, spec: RopeSpec) -> None:
    theirs = LlamaRotaryEmbedding(config)
    frequencies, scale = inverse_frequencies(spec, HEAD_DIM)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-9)


def test_the_table_and_rotation_are_those_of_transformers(config: LlamaConfig, spec: RopeSpec) -> None:
    positions = torch.tensor([0, 1, 2, 17, 1023, 1024, 4095, 3])
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(len(positions), heads, HEAD_DIM, generator=generator) for heads in (4, 2))
    cos, sin = LlamaRotaryEmbedding(config)(query, positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    table = RotaryTable(spec, HEAD_DIM, 4096, torch.float32, torch.device("cpu"))(positions)
    assert table[0].shape == (len(positions), 1, HEAD_DIM)
    for mine, theirs in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(mine, table), theirs[0].transpose(0, 1), rtol=1e-4, atol=2e-4)


def test_the_settings_under_their_old_names_mean_the_same(config: LlamaConfig, spec: RopeSpec, tmp_path: Path) -> None:
    """rope_theta at the top and the rest in rope_scaling, as files were written for years."""
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    scaling = content.pop("rope_parameters")
    content["rope_theta"] = scaling.pop("rope_theta")
    content["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    (tmp_path / "config.json").write_text(json.dumps(content))
    old = read_architecture(tmp_path).rope
    assert torch.equal(inverse_frequencies(old, HEAD_DIM)[0], inverse_frequencies(spec, HEAD_DIM)[0])
    assert inverse_frequencies(old, HEAD_DIM)[1] == inverse_frequencies(spec, HEAD_DIM)[1]


def test_the_table_is_in_the_models_dtype_but_computed_in_fp32() -> None:
    spec = RopeSpec(10_000.0, "default", {})
    wide = RotaryTable(spec, 8, 3000, torch.float32, torch.device("cpu"))
    narrow = RotaryTable(spec, 8, 3000, torch.bfloat16, torch.device("cpu"))
    assert narrow.table.dtype == torch.bfloat16
    assert torch.equal(narrow.table, wide.table.bfloat16())
