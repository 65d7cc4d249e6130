"""EngineConfig's bounds, and what is checked about a model before anything starts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from driver.config import ConfigError, EngineConfig
from driver.llm import LLM
from driver.setup import read_model
from driver.tokenizer import TokenizerError
from tests.models import END, END_ID, make_byte_tokenizer
from workers.architecture import UnsupportedModel
from workers.source import ModelNotFound

# Field, refused value, and what the message must contain besides the field's name.
REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("model", "", ("''",)),
    ("model", None, ("None",)),
    ("model", 5, ("5",)),
    ("tensor_parallel_size", 0, ("between 1 and 1024", "got 0")),
    ("tensor_parallel_size", -2, ("between 1 and 1024", "-2")),
    ("tensor_parallel_size", 1025, ("between 1 and 1024", "1025")),
    ("tensor_parallel_size", 2.0, ("between 1 and 1024", "2.0")),
    ("tensor_parallel_size", True, ("between 1 and 1024", "True")),
    ("tensor_parallel_size", None, ("between 1 and 1024", "None")),
    ("executor", "threads", ("auto, inline, ray", "'threads'")),
    ("device", "tpu", ("auto, cpu, cuda", "'tpu'")),
    ("dtype", "int8", ("auto, float32, bfloat16, float16", "'int8'")),
    ("quantization", "int2", ("None, int8, int4, fp8", "'int2'")),
    ("quantization", "", ("None, int8, int4, fp8", "''")),
    ("max_num_batched_tokens", 0, ("between 1 and 1048576", "got 0")),
    ("max_num_batched_tokens", 2**20 + 1, ("between 1 and 1048576", "1048577")),
    ("max_num_seqs", 0, ("between 1 and 65536", "got 0")),
    ("max_num_seqs", 2**16 + 1, ("between 1 and 65536", "65537")),
    ("max_num_seqs", None, ("between 1 and 65536", "None")),
    ("max_model_len", 1, ("between 2 and 16777216", "got 1")),
    ("max_model_len", 2**24 + 1, ("between 2 and 16777216", "16777217")),
    ("max_model_len", "64", ("between 2 and 16777216", "'64'")),
    ("block_size", 0, ("between 1 and 4096", "got 0")),
    ("block_size", 4097, ("between 1 and 4096", "4097")),
    ("async_depth", -1, ("between 0 and 2", "-1")),
    ("async_depth", 3, ("between 0 and 2", "got 3")),
    ("num_kv_blocks", 0, ("between 1 and 1073741824", "got 0")),
    ("num_kv_blocks", 2**30 + 1, ("between 1 and 1073741824", "1073741825")),
    ("kv_cache_gib", 0, ("(0, 1e+06", "got 0")),
    ("kv_cache_gib", -1.5, ("(0, 1e+06", "-1.5")),
    ("kv_cache_gib", math.nan, ("(0, 1e+06", "nan")),
    ("kv_cache_gib", math.inf, ("(0, 1e+06", "got inf")),
    ("kv_cache_gib", "2", ("(0, 1e+06", "'2'")),
    ("kv_cache_gib", True, ("(0, 1e+06", "True")),
    ("gpu_memory_utilization", 0.0, ("(0, 1]", "0.0")),
    ("gpu_memory_utilization", 1.01, ("(0, 1]", "1.01")),
    ("gpu_memory_utilization", math.nan, ("(0, 1]", "nan")),
    ("start_timeout_seconds", 0, ("(0, 1e+06", "got 0")),
    ("start_timeout_seconds", math.nan, ("(0, 1e+06", "nan")),
    ("start_timeout_seconds", math.inf, ("(0, 1e+06", "got inf")),
    ("step_timeout_seconds", -1, ("(0, 1e+06", "-1")),
    ("step_timeout_seconds", math.nan, ("(0, 1e+06", "nan")),
    ("step_timeout_seconds", math.inf, ("(0, 1e+06", "got inf")),
    ("step_timeout_seconds", None, ("(0, 1e+06", "None")),
]

ALLOWED: list[tuple[str, Any]] = [
    ("tensor_parallel_size", 1024),
    ("max_num_batched_tokens", None),
    ("max_num_batched_tokens", 1),
    ("max_num_seqs", 1),
    ("max_model_len", 2),
    ("block_size", 1),
    ("async_depth", 0),
    ("async_depth", 2),
    ("num_kv_blocks", 1),
    ("kv_cache_gib", 0.001),
    ("kv_cache_gib", 3),
    ("gpu_memory_utilization", 1),
    ("step_timeout_seconds", 0.5),
]


@pytest.mark.parametrize(("name", "value", "parts"), REFUSED, ids=repr)
def test_bad_setting_is_refused_by_name_value_and_limit(name: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}\b") as caught:
        EngineConfig(**{"model": "m", name: value})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("name", "value"), ALLOWED, ids=repr)
def test_good_setting_is_kept(name: str, value: Any) -> None:
    assert getattr(EngineConfig(model="m", **{name: value}), name) == value


def test_inline_runs_one_rank() -> None:
    with pytest.raises(ConfigError, match="inline executor runs one rank, but tensor_parallel_size is 2"):
        EngineConfig(model="m", executor="inline", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("executor", "size", "uses_ray"),
    [("auto", 1, False), ("auto", 2, True), ("inline", 1, False), ("ray", 1, True), ("ray", 3, True)],
)
def test_auto_takes_ray_for_several_ranks(executor: str, size: int, uses_ray: bool) -> None:
    assert EngineConfig(model="m", executor=executor, tensor_parallel_size=size).uses_ray is uses_ray


def test_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"unknown option tensor_paralel_size; known: .*'tensor_parallel_size'"):
        LLM("m", start=False, tensor_paralel_size=2)


# ---- read_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
LLAMA3_WITHOUT_FACTOR = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write_config(folder: Path, **changes: Any) -> str:
    """A model folder of a config.json alone; a value of None removes the key."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    model = read_model(EngineConfig(model=write_config(tmp_path, dtype="bfloat16", eos_token_id=[7, 9])))
    assert (model.folder, model.tokenizer, model.max_model_len) == (tmp_path, None, 512)
    assert (model.dtype, model.end_token_ids) == ("bfloat16", {7, 9})
    assert (model.arch.num_q_heads, model.arch.num_kv_heads, model.arch.head_dim) == (6, 3, 8)


def test_settings_come_before_the_model(tmp_path: Path) -> None:
    folder = write_config(tmp_path, dtype="bfloat16")
    model = read_model(EngineConfig(model=folder, dtype="float16", max_model_len=64))
    assert (model.dtype, model.max_model_len) == ("float16", 64)


def test_end_tokens_come_from_all_three_places(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    make_byte_tokenizer(tmp_path, eos_token=END)
    assert read_model(EngineConfig(model=str(tmp_path))).end_token_ids == {7, 8, 9, END_ID}


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    assert read_model(EngineConfig(model=folder, max_model_len=512)).max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len 513 is beyond the 512 positions"):
        read_model(EngineConfig(model=folder, max_model_len=513))


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    read_model(EngineConfig(model=folder, tensor_parallel_size=6))
    with pytest.raises(ConfigError, match="size 7 is larger than the model's 6 query heads"):
        read_model(EngineConfig(model=folder, tensor_parallel_size=7))


def test_a_dtype_that_cannot_be_computed_is_refused_unless_another_is_chosen(tmp_path: Path) -> None:
    folder = write_config(tmp_path, dtype="float64")
    with pytest.raises(ConfigError, match="'float64' is not one of float32, bfloat16, float16"):
        read_model(EngineConfig(model=folder))
    assert read_model(EngineConfig(model=folder, dtype="float32")).dtype == "float32"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no such folder", "a/b/c", "  "])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelNotFound, match=name.strip() or "''|'  '"):
        read_model(EngineConfig(model=name))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"model\.bin is a file, but not a \.gguf file"):
        read_model(EngineConfig(model=str(path)))


def test_a_folder_without_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
        read_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_damaged_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*covered are LlamaForCausalLM"),
        ({"architectures": None}, "no stated architecture"),
        ({"architectures": 5}, "architecture"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1 to 16777216, got 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer from 1 to 4096, got '2'"),
        ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of 4"),
        ({"num_key_value_heads": -3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": -8}, "head_dim"),
        ({"eos_token_id": "x"}, "malformed"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be positive"),
        ({"rope_parameters": LLAMA3_WITHOUT_FACTOR}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
    ids=repr,
)
def test_a_model_that_is_not_covered_says_why(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_model(EngineConfig(model=write_config(tmp_path, **changes)))


def test_a_damaged_tokenizer_stops_the_start(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        read_model(EngineConfig(model=str(tmp_path)))
