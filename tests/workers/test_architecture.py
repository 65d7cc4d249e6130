"""What is read from a model folder's configuration, and which configurations are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from parallel.formats import StoredFormat
from workers.architecture import ARCHITECTURES, Architecture, UnsupportedModel, read_architecture

CONFIGS = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "SmolLM3ForCausalLM": SmolLM3Config,
}
SIZES = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 5,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **{key: value for key, value in SIZES.items() if value is not None}}


def save(folder: Path, name: str, **settings: Any) -> PreTrainedConfig:
    """Saves a small configuration as transformers does."""
    config = CONFIGS[name](architectures=[name], **{**SIZES, **settings})
    config.save_pretrained(folder)
    return config


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, name: str, **settings: Any) -> Architecture:
    save(folder, name, **settings)
    return read_architecture(folder)


def test_the_covered_architectures_are_those_tested_here() -> None:
    assert set(ARCHITECTURES) == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_and_switches_are_as_transformers_saved_them(name: str, tied: bool, tmp_path: Path) -> None:
    settings = {"rms_norm_eps": 3e-5, "tie_word_embeddings": tied, "dtype": "bfloat16"}
    if "head_dim" in CONFIGS[name]().to_dict():
        settings["head_dim"] = 16
    arch = read(tmp_path, name, **settings)
    assert arch.name == name
    assert (arch.vocab_size, arch.hidden_size, arch.intermediate_size) == (301, 48, 40)
    assert (arch.num_layers, arch.num_q_heads, arch.num_kv_heads) == (4, 6, 3)
    assert arch.head_dim == settings.get("head_dim", 8)
    assert arch.max_position_embeddings == 96
    assert arch.rms_norm_eps == 3e-5
    assert arch.tie_word_embeddings is tied
    assert arch.dtype == "bfloat16"
    assert arch.eos_token_ids == {5}
    assert arch.qk_norm is (name == "Qwen3ForCausalLM")
    assert arch.windows == ((4096,) * 4 if name == "MistralForCausalLM" else (None,) * 4)
    assert arch.rotary_layers == ((True, True, True, False) if name == "SmolLM3ForCausalLM" else (True,) * 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str, tmp_path: Path) -> None:
    needed = {**LLAMA, "architectures": [name], "model_type": CONFIGS[name].model_type}
    del needed["eos_token_id"]
    arch, config = read_architecture(write(tmp_path, needed)), AutoConfig.from_pretrained(tmp_path)
    assert arch.tie_word_embeddings == config.tie_word_embeddings
    assert arch.rope.theta == config.rope_parameters["rope_theta"]
    assert arch.rms_norm_eps == config.rms_norm_eps
    assert arch.qkv_bias == getattr(config, "attention_bias", name == "Qwen2ForCausalLM")
    slides = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ["full_attention"] * 4]
    if name == "MistralForCausalLM":
        slides = [True] * 4
    assert arch.windows == tuple(config.sliding_window if slide else None for slide in slides)
    if name == "SmolLM3ForCausalLM":
        assert arch.rotary_layers == tuple(map(bool, config.no_rope_layers))


@pytest.mark.parametrize("name", CONFIGS)
def test_head_counts_that_a_config_leaves_out_are_what_transformers_takes(name: str, tmp_path: Path) -> None:
    needed = {**LLAMA, "architectures": [name], "model_type": CONFIGS[name].model_type, "num_attention_heads": 32}
    needed["hidden_size"] = 512
    del needed["num_key_value_heads"]
    arch, config = read_architecture(write(tmp_path, needed)), AutoConfig.from_pretrained(tmp_path)
    assert arch.num_kv_heads == config.num_key_value_heads
    assert arch.head_dim == (getattr(config, "head_dim", None) or 512 // 32)


@pytest.mark.parametrize(
    ("name", "settings", "biases"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": False}, (True, True, False)),
        ("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("SmolLM3ForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
    ],
)
def test_biases(name: str, settings: dict[str, bool], biases: tuple[bool, ...], tmp_path: Path) -> None:
    arch = read(tmp_path, name, **settings)
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == biases


SLIDING = {"use_sliding_window": True, "sliding_window": 8}
WINDOWS = [
    ("LlamaForCausalLM", {}, (None,) * 4),
    ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
    ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
    ("Qwen2ForCausalLM", {**SLIDING, "max_window_layers": 3}, (None, None, None, 8)),
    ("Qwen2ForCausalLM", {**SLIDING, "max_window_layers": 0}, (8,) * 4),
    ("Qwen3ForCausalLM", {**SLIDING, "max_window_layers": 1}, (None, 8, 8, 8)),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
    ("SmolLM3ForCausalLM", {**SLIDING, "no_rope_layers": [1, 0, 1, 0]}, (None, 8, None, 8)),
    ("SmolLM3ForCausalLM", {"use_sliding_window": False, "sliding_window": 8}, (None,) * 4),
]


@pytest.mark.parametrize(("name", "settings", "windows"), WINDOWS)
@pytest.mark.parametrize("with_layer_types", [True, False])
def test_windows_are_per_layer(
    name: str, settings: dict[str, Any], windows: tuple[int | None, ...], with_layer_types: bool, tmp_path: Path
) -> None:
    """Newer configurations list layer_types, older ones have only the rule."""
    save(tmp_path, name, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    if not with_layer_types:
        config.pop("layer_types", None)
    assert read_architecture(write(tmp_path, config)).windows == windows


def test_layer_types_win_over_the_rule_of_the_architecture(tmp_path: Path) -> None:
    all_full = {**LLAMA, "architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4}
    assert read_architecture(write(tmp_path, {**all_full, "sliding_window": 8})).windows == (None,) * 4
    mixed = ["full_attention", "sliding_attention"] * 2
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "layer_types": mixed, "sliding_window": 8}
    assert read_architecture(write(tmp_path, qwen)).windows == (None, 8, None, 8)


def test_layers_without_rotary_embedding(tmp_path: Path) -> None:
    assert read(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0]).rotary_layers == (False, True, True, False)
    interval = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2}
    assert read_architecture(write(tmp_path, interval)).rotary_layers == (True, False, True, False)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (5, None, {5}),
        ([5, 6], None, {5, 6}),
        (5, {"eos_token_id": [7, 5]}, {5, 7}),
        (None, {"eos_token_id": 9}, {9}),
        (5, {"temperature": 0.6}, {5}),
        (None, None, set()),
    ],
)
def test_end_tokens_of_both_files_count(config: Any, generation: Any, ids: set[int], tmp_path: Path) -> None:
    assert read_architecture(write(tmp_path, {**LLAMA, "eos_token_id": config}, generation)).eos_token_ids == ids


def test_old_names_are_understood(tmp_path: Path) -> None:
    old = {**LLAMA, "torch_dtype": "float16", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    arch = read_architecture(write(tmp_path, old))
    assert (arch.dtype, arch.rope.theta, arch.rope.kind, arch.rope.settings["factor"]) == ("float16", 5e5, "linear", 2)


def test_an_architecture_that_is_not_covered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="is a GPT2LMHeadModel; covered are " + ", ".join(ARCHITECTURES)):
        read_architecture(tmp_path)


def stored(
    weights: dict[str, Any] | None = None, input_activations: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it for int8 weights, but for the changes."""
    kind = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**kind, **(weights or {})}, "input_activations": input_activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        **settings,
    }


def test_int8_weights_of_compressed_tensors_are_covered(tmp_path: Path) -> None:
    dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    for config, activations in ((stored(), False), (stored(input_activations=dynamic), True)):
        found = read_architecture(write(tmp_path, {**LLAMA, "quantization_config": config})).stored
        assert found == StoredFormat("compressed-tensors", "plain", 8, activations=activations)
    assert read_architecture(write(tmp_path, LLAMA)).stored is None


REFUSED = [
    ({"architectures": None}, "model of no stated architecture; covered are Llama"),
    ({"architectures": []}, "model of no stated architecture"),
    ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "by awq .* bits is 3, .* use the unquantised"),
    ({"quantization_config": {"quant_method": "gptq"}}, "incomplete or malformed: .*bits"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised by bitsandbytes"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of 4"),
    ({"num_key_value_heads": -3}, "got -3"),
    ({"num_key_value_heads": "3"}, "'3'|str"),
    ({"head_dim": 7}, "head_dim must be even .* 7"),
    ({"head_dim": -8}, "got -8"),
    ({"vocab_size": 0}, "vocab_size must be an integer from 1 to 16777216, got 0"),
    ({"hidden_size": "48"}, "hidden_size must be an integer from 1 to 16777216, got '48'"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be an integer from 1 to 4096, got True"),
    ({"intermediate_size": 40.0}, r"intermediate_size must be an integer from 1 to 16777216, got 40\.0"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be an integer from 1 to 4096, got 1000000000000"),
    ({"max_position_embeddings": 1 << 40}, "max_position_embeddings must be an integer from 1 to 16777216"),
    ({"rope_theta": 10**400}, "incomplete or malformed: OverflowError"),
    ({"rms_norm_eps": "tiny"}, "incomplete or malformed: .*tiny"),
    ({"eos_token_id": "</s>"}, "incomplete or malformed: .*</s>"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
    ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported; covered"),
    ({"rope_scaling": {"type": "su"}}, "rope type 'su' .*default, linear, llama3, yarn"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
    ({"rope_parameters": "yarn"}, "incomplete or malformed"),
    ({"rope_theta": -1.0}, r"rope_theta must be positive, got -1\.0"),
    ({"rope_theta": float("nan")}, "rope_theta must be positive, got nan"),
    ({"partial_rotary_factor": 0.5}, "partial rotary"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    read_architecture(write(tmp_path, LLAMA))
    with pytest.raises(UnsupportedModel, match=message):
        read_architecture(write(tmp_path, {**LLAMA, **change}))


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json is incomplete or malformed: .*{key}"):
        read_architecture(write(tmp_path, {k: v for k, v in LLAMA.items() if k != key}))


def test_smollm3_flags_for_another_number_of_layers_are_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}
    with pytest.raises(UnsupportedModel, match="no_rope_layers has 2 entries for 4 layers"):
        read_architecture(write(tmp_path, config))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"LlamaForCausalLM"', b"\xff\xfe{}"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UnsupportedModel, match=f"{tmp_path / file}"):
        read_architecture(tmp_path)


def test_a_folder_without_config_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{tmp_path} is not a model folder: it has no config\.json"):
        read_architecture(tmp_path)
