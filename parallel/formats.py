"""How the linears of a quantised checkpoint are stored, as its `quantization_config` says. Pure Python.

Read are the formats of AutoGPTQ and GPTQModel (quant_method `gptq`), of AutoAWQ (`awq`) and of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED = (
    "GPTQ and AWQ in their usual layouts and compressed-tensors in int4, int8 and fp8 are (see docs/quantised.md); "
    "else use the unquantised checkpoint, maybe with quantization int8, int4 or fp8"
)
_ACTIVATION_ORDERS = ("group", "dynamic", True)  # of compressed-tensors: those whose groups are no runs of inputs


class UnsupportedFormat(ValueError):
    """Quantised weights that this program does not read; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """What a checkpoint's quantised linears are; those without these tensors are plain.

    layout: `gptq` and `awq` (qweight, qzeros, scales), `packed` (weight_packed, weight_scale), or `plain` (weight in
        int8 or fp8, weight_scale).
    bits: 4 or 8. is_float: fp8 (e4m3). group: inputs that share a scale; 0 where an output's whole row does.
    symmetric: no zero points are stored. zero_shift: what stored zero points are too small by.
    activations: they are to be quantised too, to the kind of the weights.
    """

    method: str
    layout: str
    bits: int
    group: int = 0
    is_float: bool = False
    symmetric: bool = True
    zero_shift: int = 0
    activations: bool = False

    def __str__(self) -> str:
        kind = f"fp{self.bits}" if self.is_float else f"int{self.bits}"
        return f"{kind} ({self.method}{f', groups of {self.group}' if self.group else ''})"

    @property
    def tensor(self) -> str:
        """The tensor that only a quantised linear has."""
        return {"packed": "weight_packed", "plain": "weight_scale"}.get(self.layout, "qweight")


def read_format(quantization: Any) -> StoredFormat | None:
    """The format that a config.json's quantization_config tells of; None where there is none.

    Raises UnsupportedFormat, or KeyError, TypeError or AttributeError for one that is malformed.
    """
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise UnsupportedFormat(f"quantization_config must be an object, got {quantization!r}")
    method = quantization.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise _refused(method or "a method that it does not name", "this method is not read")
    return readers[method](quantization)


def _gptq(quantization: Mapping[str, Any]) -> StoredFormat:
    name, bits = "gptq", _whole(quantization["bits"])
    version = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if bits not in (4, 8):
        raise _refused(name, f"bits is {bits!r}, read are 4 and 8")
    if version not in ("gptq", "gptq_v2"):
        raise _refused(name, f"checkpoint_format is {version!r}, read are 'gptq' and 'gptq_v2'")
    if quantization.get("desc_act"):
        raise _refused(name, "desc_act is true, so inputs that share a scale lie apart, and no kernel here takes that")
    if quantization.get("is_marlin_format"):
        raise _refused(name, "is_marlin_format is true, which is a layout for one kernel")
    if quantization.get("dynamic"):
        raise _refused(name, "dynamic gives some linears settings of their own")
    if quantization.get("pack_dtype", "int32") != "int32":
        raise _refused(name, f"pack_dtype is {quantization['pack_dtype']!r}, read is 'int32'")
    shift = int(version == "gptq")  # which stores zero points less one
    return StoredFormat(name, "gptq", bits, _group(name, quantization["group_size"]), False, False, shift)


def _awq(quantization: Mapping[str, Any]) -> StoredFormat:
    name, bits = "awq", _whole(quantization["bits"])
    version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    if bits != 4:
        raise _refused(name, f"bits is {bits!r}, read is 4")
    if version != "gemm" or quantization.get("backend") == "llm-awq":
        raise _refused(name, f"version is {version!r} of {quantization.get('backend', 'autoawq')}, read is 'gemm'")
    if quantization.get("zero_point", True) is not True:
        raise _refused(name, "zero_point is false")
    return StoredFormat(name, "awq", bits, _group(name, quantization["group_size"]), symmetric=False)


def _compressed_tensors(quantization: Mapping[str, Any]) -> StoredFormat:
    name, layout = "compressed-tensors", quantization.get("format")
    layouts = {"int-quantized": "plain", "float-quantized": "plain", "naive-quantized": "plain"}
    if layout not in {**layouts, "pack-quantized": "packed"}:
        raise _refused(name, f"format is {layout!r}, read are {', '.join(layouts)} and pack-quantized")
    if (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused(name, "sparsity_config asks for sparse weights")
    for key in ("transform_config", "kv_cache_scheme"):
        if quantization.get(key):
            raise _refused(name, f"it has a {key}")
    formats = {_scheme(name, layouts.get(layout, "packed"), group) for group in quantization["config_groups"].values()}
    if len(formats) != 1:
        raise _refused(name, f"config_groups asks for {len(formats)} kinds of weights, one is read")
    return formats.pop()


def _scheme(name: str, layout: str, scheme: Mapping[str, Any]) -> StoredFormat:
    weights, activations = scheme["weights"], scheme.get("input_activations")
    bits, kind, strategy, symmetric = (weights[key] for key in ("num_bits", "type", "strategy", "symmetric"))
    what = f"weights are {kind}{bits} with a scale for each {strategy}{'' if symmetric else ' and zero points'}"
    packed, bits = layout == "packed", _whole(bits)
    if packed:
        fits = kind == "int" and bits in (4, 8) and strategy in ("group", "channel")
    else:
        fits = kind in ("int", "float") and bits == 8 and strategy in ("channel", "tensor") and symmetric
    if not fits:
        raise _refused(name, f"{what}, which are not read in this format")
    if weights.get("actorder") in _ACTIVATION_ORDERS:
        raise _refused(name, f"actorder is {weights['actorder']!r}, so inputs that share a scale lie apart")
    if activations and (packed or (activations["num_bits"], activations["type"]) != (bits, kind)):
        raise _refused(name, f"{what}, but activations are {activations['type']}{activations['num_bits']}")
    group = _group(name, weights["group_size"]) if strategy == "group" else 0
    return StoredFormat(name, layout, bits, group, kind == "float", bool(symmetric), activations=bool(activations))


def _whole(number: Any) -> Any:
    """Numbers that are no integers are equal to none of those that are read."""
    return number if type(number) is int else repr(number)


def _group(name: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and (size < 8 or size % 8)):
        raise _refused(name, f"group_size is {size!r}, read are multiples of 8, and -1 for whole rows")
    return max(size, 0)


def _refused(method: str, reason: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"the checkpoint is quantised by {method} in a way that is not supported: {reason}; {SUPPORTED}"
    )
