"""Model files with anything in them: an error that names the file, no crash, and no memory taken by their word."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from parallel.loader import SINGLE_FILE, Checkpoint, CheckpointError
from workers.architecture import Architecture, UnsupportedModel, read_architecture
from workers.gguf import ConversionError, converted_folder
from workers.gguf_header import HeaderError, read_header

CONFIG = {
    "architectures": ["SmolLM3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "layer_types": ["full_attention"] * 4,
    "no_rope_layers": [1, 1, 1, 0],
    "no_rope_layer_interval": 4,
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
    "eos_token_id": [1, 2],
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
MEMORY = 8 << 20  # bytes; what a header may take, whatever it says

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**12, 10**400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
anything = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def damage(data: bytes, patches: list[tuple[int, bytes]], length: int | None) -> bytes:
    """data with some bytes replaced, at places counted from its end's fraction, and cut off."""
    changed = bytearray(data)
    for at, patch in patches:
        place = at % len(changed)
        changed[place : place + len(patch)] = patch[: len(changed) - place]
    return bytes(changed[:length])


@contextmanager
def read_or_refused(kind: type[Exception], names: str = "") -> Iterator[None]:
    """The only error that may come, with what its message names; little memory may be taken."""
    tracemalloc.start()
    said = names or "some message"
    try:
        yield
    except kind as refused:
        said = str(refused)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert names in said
    assert said
    assert peak < MEMORY


patches = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=9) | st.just(b"\xff" * 8)), max_size=3
)
lengths = st.none() | st.integers(0, 2000)


@anything
@given(key=st.sampled_from(sorted(CONFIG)), value=junk)
def test_any_configuration_is_read_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    with read_or_refused(UnsupportedModel):
        assert isinstance(read_architecture(tmp_path), Architecture)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "\0", "[]", "1e999"])
def test_a_configuration_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_architecture(tmp_path)


@anything
@given(patches=patches, length=lengths)
def test_any_safetensors_file_is_read_or_refused(tmp_path: Path, patches: list[tuple[int, bytes]], length: int) -> None:
    path = tmp_path / SINGLE_FILE
    save_file({"a.weight": torch.ones(8, 4), "b.weight": torch.zeros(3, dtype=torch.bfloat16)}, path)
    content = path.read_bytes()
    path.write_bytes(damage(content, patches, length))
    with read_or_refused(CheckpointError, str(tmp_path)), Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("a.weight", (8, 4)).shape == (8, 4)


# ---- GGUF


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A llama of two layers, whole but for its tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{at}" for at in range(40)])
    shapes = {"token_embd": (40, 32), "output_norm": (32,)}
    for layer in range(2):
        blocks = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)}
        blocks |= {"attn_output": (32, 32), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in blocks.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_header_says_what_is_in_the_file(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(model)
    header = read_header(path)
    header.check_sizes()
    assert header.strings["general.architecture"] == b"llama"
    assert header.numbers["llama.block_count"] == 2
    assert header.lengths["tokenizer.ggml.tokens"] == 40
    assert header.tensors["blk.1.ffn_gate.weight"] == (32, 48)
    assert len(header.tensors) == 20


@anything
@given(patches=patches, length=lengths)
def test_any_header_is_read_or_refused(
    tmp_path: Path, model: bytes, patches: list[tuple[int, bytes]], length: int
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damage(model, [(at % 2600, patch) for at, patch in patches], length))
    with read_or_refused(HeaderError):
        read_header(path).check_sizes()


def number(name: str, value: int) -> tuple[bytes, bytes]:
    """The bytes of a field and those of the same field with another value."""
    key = struct.pack("<Q", len(name)) + name.encode()
    return key, key + struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("llama.block_count", 1 << 30, "block_count is 1073741824, while the tensors say 2"),
        ("llama.embedding_length", 1 << 31, "embedding_length is 2147483648, while the tensors say 32"),
        ("llama.feed_forward_length", 1 << 31, "feed_forward_length is 2147483648, while the tensors say 48"),
        ("llama.attention.head_count", 0, "head_count is 0, which does not divide the 32 rows of attn_q"),
        ("llama.attention.head_count_kv", 3, "head_count_kv is 3, which does not divide the 16 rows of attn_k"),
    ],
)
def test_a_size_that_is_not_the_tensors_is_refused_before_anything_is_made_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes, name: str, value: int, message: str
) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    key, changed = number(name, value)
    at = model.index(key)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(model[:at] + changed + model[at + len(changed) :])
    with pytest.raises(ConversionError, match=f"cannot read GGUF file {path}: .*{message}"):
        converted_folder(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "ends too early"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "ends too early"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "ends too early"),
        # An array of 2^60 bytes: a reader that takes its items one by one would never end.
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 1 << 60), "ends too early"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<II", 99, 0), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "of version 9"),
    ],
)
def test_counts_beyond_the_file_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=message):
        read_header(path)
