"""The KV cache's dtype by its name, and the scales that a checkpoint has for a cache in fp8."""

from __future__ import annotations

import logging
import math

import torch

from attention.cache import Scales
from parallel.loader import Checkpoint, CheckpointError

logger = logging.getLogger("quadriga.worker")

_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# As compressed-tensors names them, and as ModelOpt does.
_NAMES = {
    "key": ("k_scale", "k_proj.k_scale"),
    "value": ("v_scale", "v_proj.v_scale"),
    "query": ("q_scale", "q_proj.q_scale"),
}


def cache_dtype(name: str) -> torch.dtype | None:
    """name: one of workers.spec.KV_CACHE_DTYPES. None for the model's dtype."""
    return None if name == "auto" else _DTYPES[name]


def read_scales(checkpoint: Checkpoint, num_layers: int, wanted: bool) -> list[Scales] | None:
    """Every layer's scales, 1 for what the checkpoint has none for; None when they are not wanted.

    They are read in any case, since a checkpoint may not have tensors that nobody reads. Raises CheckpointError for a
    scale that is not a positive number.
    """
    scales = [_layer(checkpoint, f"model.layers.{layer}.self_attn") for layer in range(num_layers)]
    if not wanted:
        return None
    found = sum(bool({"key", "value"} & one.keys()) for one in scales)
    if found < num_layers:
        logger.info(
            "the checkpoint has scales for the fp8 KV cache of %d of %d layers; the others keep keys and values with a "
            "scale of 1, which cuts off what exceeds fp8's range",
            found,
            num_layers,
        )
    return [Scales(**one) for one in scales]


def _layer(checkpoint: Checkpoint, prefix: str) -> dict[str, float]:
    found = {}
    for kind, names in _NAMES.items():
        for name in (f"{prefix}.{name}" for name in names):
            if name not in checkpoint:
                continue
            scale = checkpoint.read_scalar(name)
            if not (math.isfinite(scale) and scale > 0):
                raise CheckpointError(f"{name} is {scale}, but a scale is a positive number")
            found[kind] = scale
    return found
