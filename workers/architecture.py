"""A model's shape, read from its config.json. Pure Python: the driver reads it too, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.formats import StoredFormat, UnsupportedFormat, read_format

# What distinguishes the covered architectures beyond what their configuration says by itself.
_QKV_BIAS = {"Qwen2ForCausalLM"}
_QK_NORM = {"Qwen3ForCausalLM"}
# What transformers takes for fields that a config.json leaves out, where it is not the family's common default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "SmolLM3ForCausalLM": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
}
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
# Memory is taken by these sizes before a tensor could contradict them.
LARGEST_SIZE = 1 << 24
_LARGEST = {"num_hidden_layers": 1 << 12}
# The covered rope types, each with the numbers that it needs.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


class UnsupportedModel(ValueError):
    """A model that this program does not cover, or a configuration that contradicts itself."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base theta, the rope type, and that type's own settings."""

    theta: float
    kind: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of one decoder.

    windows: per layer the sliding window in tokens, or None for full attention.
    rotary_layers: per layer whether rotary embedding is applied (SmolLM3 leaves some layers without).
    eos_token_ids: end tokens from config.json and generation_config.json together.
    stored: how the checkpoint has quantised its linears, None where it has not.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rotary_layers: tuple[bool, ...]
    dtype: str
    eos_token_ids: frozenset[int]
    stored: StoredFormat | None = None


def read_architecture(folder: Path) -> Architecture:
    """Reads config.json and, where there is one, generation_config.json.

    Raises UnsupportedModel for a folder without a readable config.json or an architecture that is not covered.
    """
    config = _read_json(folder / "config.json")
    names = config.get("architectures")
    names = names if isinstance(names, list) else []
    name = next((n for n in names if n in ARCHITECTURES), None)
    if name is None:
        raise UnsupportedModel(
            f"{folder} is a {', '.join(map(str, names)) or 'model of no stated architecture'}; "
            f"covered are {', '.join(ARCHITECTURES)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported; covered is 'silu'")
    generation = folder / "generation_config.json"
    try:
        return _build(
            name, {**_DEFAULTS.get(name, {}), **config}, _read_json(generation) if generation.is_file() else {}
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"{folder / 'config.json'} is incomplete or malformed: {error!r}") from error


def _build(name: str, config: dict[str, Any], generation: dict[str, Any]) -> Architecture:
    num_layers = _size(config, "num_hidden_layers")
    rotary_layers = _rotary_layers(name, config, num_layers)
    num_q_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", default=num_q_heads)
    head_dim = _size(config, "head_dim", default=_size(config, "hidden_size") // num_q_heads)
    if num_q_heads % num_kv_heads:
        raise UnsupportedModel(f"{num_q_heads} attention heads are not a multiple of {num_kv_heads} key/value heads")
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim must be even for rotary embedding, got {head_dim}")
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        name=name,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=name in _QKV_BIAS or attention_bias,
        output_bias=attention_bias and name not in _QKV_BIAS,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=name in _QK_NORM,
        windows=_windows(name, config, rotary_layers),
        rotary_layers=rotary_layers,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
        stored=_stored(config.get("quantization_config")),
    )


def _stored(quantization: Any) -> StoredFormat | None:
    try:
        return read_format(quantization)
    except UnsupportedFormat as error:
        raise UnsupportedModel(str(error)) from error


def _windows(name: str, config: dict[str, Any], rotary_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Per layer the window: as layer_types says, else by the rule of the architecture."""
    num_layers = len(rotary_layers)
    types = config.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise UnsupportedModel(f"layer_types has {len(types)} entries for {num_layers} layers")
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedModel(f"layer types {sorted(unknown)} are not supported")
        slides = [kind == "sliding_attention" for kind in types]
    elif name == "MistralForCausalLM":
        slides = [config["sliding_window"] is not None] * num_layers
    elif not config.get("use_sliding_window"):
        slides = [False] * num_layers
    elif name == "SmolLM3ForCausalLM":
        slides = [config.get("sliding_window") is not None and not rotary for rotary in rotary_layers]
    else:
        slides = [layer >= config["max_window_layers"] for layer in range(num_layers)]
    if not any(slides):
        return (None,) * num_layers
    window = _size(config, "sliding_window")
    return tuple(window if slide else None for slide in slides)


def _rotary_layers(name: str, config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    if name != "SmolLM3ForCausalLM":
        return (True,) * num_layers
    flags = config.get("no_rope_layers")  # despite its name, 1 means that the layer has rotary embedding
    if flags is None:
        interval = config.get("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(flags) != num_layers:
        raise UnsupportedModel(f"no_rope_layers has {len(flags)} entries for {num_layers} layers")
    return tuple(map(bool, flags))


def _rope(config: dict[str, Any]) -> RopeSpec:
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _ROPE_NUMBERS:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; covered are {', '.join(_ROPE_NUMBERS)}")
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial rotary embedding is not supported")
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if not (math.isfinite(theta) and theta > 0):
        raise UnsupportedModel(f"rope_theta must be positive, got {theta}")
    settings.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    for key in _ROPE_NUMBERS[kind]:
        value = settings.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UnsupportedModel(f"rope type {kind!r} needs a positive {key}, got {value!r}")
    return RopeSpec(theta, kind, settings)


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer within reason, since memory is taken by it; one with a default may be missing or null."""
    value = config[key] if default is None else config.get(key) or default
    most = _LARGEST.get(key, LARGEST_SIZE)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModel(f"{key} must be an integer from 1 to {most}, got {value!r}")
    return value


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(map(int, value if isinstance(value, list) else [value]))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object")
    return content
