"""Gumbel noise of a token id: a hash of (seed, position, id), and so the same wherever and however often it is made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

MakeNoise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # as gumbel_noise does

_MASK32 = 0xFFFFFFFF


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit keys, int64, for each (seed, position), by SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seeds) ^ positions.astype(np.uint64))
    high = torch.from_numpy((mixed >> np.uint64(32)).astype(np.int64))
    low = torch.from_numpy((mixed & np.uint64(_MASK32)).astype(np.int64))
    return high, low


def gumbel_noise(high: torch.Tensor, low: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n, ids], fp32: a 32-bit integer hash of each key pair and id, made uniform in (0, 1)."""
    noise = torch.empty(len(high), len(ids), dtype=torch.float32, device=ids.device)
    for row, (first, second) in enumerate(zip(high.tolist(), low.tolist(), strict=True)):  # a row fits in a CPU's cache
        noise[row] = noise_of(first, second, ids)
    return noise


def noise_of(high: int | torch.Tensor, low: int | torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same for ids that have their own keys, in fp64; shapes are broadcast."""
    x = _mix32((ids * 0x9E3779B1 + high).bitwise_and_(_MASK32))
    x = _mix32(x.bitwise_xor_(low))
    return x.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """The finaliser "lowbias32" (C. Wellons, hash-prospector) on 32-bit values held in int64, in place."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_MASK32)
    return x.bitwise_xor_(x >> 16)
