"""What a quantization_config may say."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.formats import StoredFormat, UnsupportedFormat, read_format
from tests.packing import awq, compressed, dynamic, gptq

FP8 = {"type": "float"}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
GROUP = compressed()["config_groups"]["group_0"]
ACTIVATED = compressed("int-quantized", {}, dynamic("int"))["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gptq(4, 128), StoredFormat("gptq", "gptq", 4, 128, symmetric=False, zero_shift=1)),
        (gptq(8, -1, checkpoint_format="gptq_v2"), StoredFormat("gptq", "gptq", 8, 0, symmetric=False)),
        (awq(64), StoredFormat("awq", "awq", 4, 64, symmetric=False)),
        (awq(64, version="GEMM"), StoredFormat("awq", "awq", 4, 64, symmetric=False)),
        (compressed(), StoredFormat("compressed-tensors", "plain", 8)),
        (
            compressed("int-quantized", {}, dynamic("int")),
            StoredFormat("compressed-tensors", "plain", 8, activations=True),
        ),
        (
            compressed("float-quantized", FP8, dynamic("float")),
            StoredFormat("compressed-tensors", "plain", 8, is_float=True, activations=True),
        ),
        (compressed("pack-quantized", INT4), StoredFormat("compressed-tensors", "packed", 4, 128)),
        (
            compressed("pack-quantized", {**INT4, "symmetric": False, "actorder": "static"}),
            StoredFormat("compressed-tensors", "packed", 4, 128, symmetric=False),
        ),
        (None, None),
        ({}, None),
    ],
)
def test_formats_that_are_read(config: dict[str, Any] | None, expected: StoredFormat | None) -> None:
    assert read_format(config) == expected


def test_a_format_says_what_it_is() -> None:
    assert str(read_format(awq(64))) == "int4 (awq, groups of 64)"
    assert str(read_format(compressed("float-quantized", FP8))) == "fp8 (compressed-tensors)"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([8], r"must be an object, got \[8\]"),
        ({"load_in_8bit": True}, "by a method that it does not name .* this method is not read"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "by fp8"),
        (gptq(bits=3), "by gptq .*: bits is 3, read are 4 and 8; .* use the unquantised checkpoint"),
        (gptq(bits=4.0), r"bits is '4\.0', read are 4 and 8"),
        (gptq(group=20), "group_size is 20"),
        (gptq(group="128"), "group_size is '128'"),
        (gptq(desc_act=True), "desc_act is true, so inputs that share a scale lie apart"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin', read are 'gptq' and 'gptq_v2'"),
        (gptq(is_marlin_format=True), "is_marlin_format"),
        (gptq(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic gives some linears settings of their own"),
        (gptq(pack_dtype="int8"), "pack_dtype is 'int8'"),
        (awq(bits=8), "by awq .*: bits is 8, read is 4"),
        (awq(version="gemv"), "version is 'gemv' .* read is 'gemm'"),
        (awq(version="gemv_fast"), "version is 'gemv_fast'"),
        (awq(backend="llm-awq"), "llm-awq"),
        (awq(zero_point=False), "zero_point is false"),
        (compressed("marlin-24"), "format is 'marlin-24', read are int-quantized, .* and pack-quantized"),
        (compressed("int-quantized", {"num_bits": 4}), "weights are int4 .*, which are not read in this format"),
        (compressed("int-quantized", {"strategy": "group"}), "int8 with a scale for each group"),
        (compressed("int-quantized", {"symmetric": False}), "a scale for each channel and zero points"),
        (compressed("float-quantized", {**FP8, "strategy": "block"}), "float8 with a scale for each block"),
        (compressed("pack-quantized", {**INT4, "num_bits": 3}), "int3"),
        (compressed("pack-quantized", INT4, dynamic("int")), "int4 .* but activations are int8"),
        (compressed("int-quantized", {}, dynamic("float")), "int8 .* but activations are float8"),
        (compressed("pack-quantized", {**INT4, "actorder": "group"}), "actorder is 'group'"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(transform_config={"config_groups": {}}), "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        (compressed(config_groups={"a": GROUP, "b": ACTIVATED}), "config_groups asks for 2 kinds of weights"),
    ],
)
def test_formats_that_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        read_format(config)


@pytest.mark.parametrize("config", [{"quant_method": "gptq"}, {**compressed(), "config_groups": {"group_0": {}}}])
def test_fields_that_are_missing(config: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        read_format(config)
