"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the scalings of Llama 3 and YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from workers.architecture import RopeSpec


class RotaryTable(torch.nn.Module):
    """Cosines and sines of every position, looked up once per step.

    `forward(positions [n])` -> (cos, sin), each [n, 1, head_dim] in the model's dtype. gather: what looks rows up.
    """

    def __init__(
        self,
        spec: RopeSpec,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        gather: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.Tensor.__getitem__,
    ) -> None:
        super().__init__()
        frequencies, scale = inverse_frequencies(spec, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        both = torch.stack((angles.cos(), angles.sin()), dim=1) * scale
        self.table = both.unsqueeze(2).to(device=device, dtype=dtype)  # [positions, 2, 1, head_dim]
        self.gather = gather

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.gather(self.table, positions).unbind(1)
        return cos, sin


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates x [n, heads, head_dim]; halves are paired, as in Hugging Face's Llama weights."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """The [head_dim / 2] fp32 inverse frequencies and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / float(spec.settings["factor"]), 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(plain, spec, head_dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Low frequencies are slowed by the factor, high ones kept, those between blended (Llama 3.1)."""
    factor, low, high, original = (
        float(spec.settings[key])
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelengths = 2 * math.pi / plain
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: torch.Tensor, spec: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    settings = spec.settings
    factor = float(settings["factor"])
    original = float(settings["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension(float(settings.get("beta_fast") or 32))
    high = dimension(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = settings.get("attention_factor")
    if scale is None:
        mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        scale = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return frequencies, float(scale)
