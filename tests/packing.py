"""Quantised checkpoints for tests, written from the definitions of AutoGPTQ, AutoAWQ and compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# AutoAWQ: from the lowest bits on, a word holds these of its eight columns.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Grouped:
    """A weight [outputs, inputs] as (q - zero) * scale: q [outputs, inputs], zero and scale [outputs, groups]."""

    q: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """fp32 [outputs, inputs]."""
        size = self.q.shape[1] // self.zero.shape[1]
        zero, scale = (part.repeat_interleave(size, 1) for part in (self.zero, self.scale.float()))
        return (self.q - zero) * scale


def grouped(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> Grouped:
    """Rounded to the nearest. group: -1 for whole rows."""
    outputs, inputs = weight.shape
    parts = weight.float().view(outputs, -1, inputs if group == -1 else group)
    most, half = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scale = parts.abs().amax(-1) / (half - 1)
        zero = torch.full(scale.shape, half)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (high - low) / most
        zero = (-low / scale).round().clamp(0, most).int()
    scale = scale.to(dtype)
    q = (parts / scale.float()[..., None]).round().int() + zero[..., None]
    return Grouped(q.clamp(0, most).view(outputs, inputs).int(), zero.int(), scale)


def words(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers below 1 << bits packed along a dimension, lowest bits first, in int32; what is missing is zero."""
    count = 32 // bits
    moved = numbers.movedim(dim, -1).long()
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % count)).unflatten(-1, (-1, count))
    total = sum(moved[..., column] << (bits * place) for place, column in enumerate(order or range(count)))
    total = torch.where(total >= 1 << 31, total - (1 << 32), total)
    return total.to(torch.int32).movedim(-1, dim).contiguous()


def pack_gptq(weight: Grouped, bits: int, v2: bool = False) -> Tensors:
    inputs, groups = weight.q.shape[1], weight.zero.shape[1]
    return {
        "qweight": words(weight.q.T, bits, 0),
        "qzeros": words((weight.zero - int(not v2)).T, bits, 1),
        "scales": weight.scale.T.contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // groups),
    }


def pack_awq(weight: Grouped) -> Tensors:
    return {
        "qweight": words(weight.q.T, 4, 1, AWQ_ORDER),
        "qzeros": words(weight.zero.T, 4, 1, AWQ_ORDER),
        "scales": weight.scale.T.contiguous(),
    }


def pack_compressed(weight: Grouped, bits: int, symmetric: bool) -> Tensors:
    zero = {} if symmetric else {"weight_zero_point": words(weight.zero, bits, 0)}
    shape = torch.tensor(weight.q.shape)
    return {"weight_packed": words(weight.q, bits, 1), "weight_scale": weight.scale, "weight_shape": shape, **zero}


def gptq(bits: int = 4, group: int = 32, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **settings}


def awq(group: int = 32, **settings: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {**config, "modules_to_not_convert": None, **settings}


def compressed(
    format: str = "int-quantized",
    weights: dict[str, Any] | None = None,
    input_activations: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """As compressed-tensors writes it for int8 weights with a scale for each output, but for the changes."""
    kind = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
        "group_size": None,
    }
    group = {"targets": ["Linear"], "weights": {**kind, **(weights or {})}, "input_activations": input_activations}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head"], "sparsity_config": {}, **settings}


def dynamic(kind: str) -> dict[str, Any]:
    """Activations of 8 bits with a scale for each token."""
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """config: quantization_config. pack: a weight to the tensors of its linear and the numbers that they stand for."""

    config: dict[str, Any]
    pack: Pack


def _gptq(bits: int, group: int, symmetric: bool, v2: bool = False) -> Kind:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = grouped(weight, bits, group, symmetric)
        if not v2:  # which cannot store a zero point of 0
            found = Grouped(found.q, found.zero.clamp(min=1), found.scale)
        return pack_gptq(found, bits, v2), found.numbers()

    version = {"checkpoint_format": "gptq_v2"} if v2 else {}
    return Kind(gptq(bits, group, sym=symmetric, **version), pack)


def _awq(group: int) -> Kind:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = grouped(weight, 4, group, symmetric=False)
        return pack_awq(found), found.numbers()

    return Kind(awq(group), pack)


def _packed(bits: int, group: int, symmetric: bool) -> Kind:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = grouped(weight, bits, group, symmetric, torch.bfloat16)
        return pack_compressed(found, bits, symmetric), found.numbers()

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return Kind(compressed("pack-quantized", {"num_bits": bits, "symmetric": symmetric, **strategy}), pack)


def _w8a8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes * scale.float()


def _fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def _fp8_static(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale[None], "input_scale": torch.tensor([0.01])}
    return tensors, codes.float() * scale


_FLOAT = {"type": "float"}
KINDS: dict[str, Kind] = {
    "gptq": _gptq(4, 16, symmetric=True),
    "gptq asymmetric": _gptq(4, 8, symmetric=False),
    "gptq v2": _gptq(4, 16, symmetric=False, v2=True),
    "gptq rows": _gptq(4, -1, symmetric=False),
    "gptq int8": _gptq(8, 16, symmetric=False),
    "gptq 32": _gptq(4, 32, symmetric=False),
    "awq": _awq(16),
    "awq 32": _awq(32),
    "packed": _packed(4, 16, symmetric=True),
    "packed asymmetric": _packed(4, 8, symmetric=False),
    "packed rows": _packed(4, -1, symmetric=True),
    "packed int8": _packed(8, -1, symmetric=True),
    "w8a8": Kind(compressed("int-quantized", {}, dynamic("int")), _w8a8),
    "fp8": Kind(compressed("float-quantized", _FLOAT, dynamic("float")), _fp8),
    "fp8 static": Kind(
        compressed(
            "float-quantized",
            {**_FLOAT, "strategy": "tensor"},
            {**dynamic("float"), "strategy": "tensor", "dynamic": False},
        ),
        _fp8_static,
    ),
}


def store(folder: Path, kind: Kind, to: Path, left: str = "lm_head") -> tuple[Path, Path]:
    """The checkpoint quantised, and one of the numbers that it then stands for. left: linears that stay as they are."""
    shutil.copytree(folder, to / "stored")
    shutil.copytree(folder, to / "plain")
    tensors = load_file(folder / "model.safetensors")
    quantised = {}
    for name, weight in list(tensors.items()):
        if name.endswith(("proj.weight", "lm_head.weight")) and left not in name:
            parts, numbers = kind.pack(weight)
            assert not torch.equal(numbers, weight)
            linear = name.removesuffix(".weight")
            quantised |= {f"{linear}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            tensors[name] = numbers
        else:
            quantised[name] = weight
    save_file(quantised, to / "stored" / "model.safetensors", {"format": "pt"})
    save_file(tensors, to / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (to / "stored" / "config.json").write_text(json.dumps({**config, "quantization_config": kind.config}))
    return to / "stored", to / "plain"
