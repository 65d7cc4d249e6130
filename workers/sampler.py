"""Choosing the next tokens from logits of which each rank holds a vocabulary range.

Sampling is Gumbel-max: the token with the largest logit / temperature + Gumbel noise is a sample of the softmax. The
noise of a token id is a hash of (seed, position, id), so a request's tokens depend on nothing else: not on its
neighbours, chunk sizes, ranks, or on how often it was computed anew. Each rank perturbs its own range and only the
winners meet; the full logits are gathered only for rows that truncate the distribution (top-k, top-p, min-p).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from parallel.group import TensorParallelGroup
from parallel.split import deal_lanes
from workers.inputs import to_device

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of the s rows is sampled: [s] arrays on the host. positions: of the tokens to be sampled."""

    seeds: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


class Sampler:
    """Every rank calls `sample` with its own logits and gets the same tokens.

    kernels: the module workers.triton_kernels, to make noise in one launch.
    """

    def __init__(
        self, vocab_size: int, group: TensorParallelGroup, device: torch.device, kernels: ModuleType | None = None
    ) -> None:
        self.noise = gumbel_noise if kernels is None else kernels.gumbel_noise
        ranges = deal_lanes(vocab_size, group.size)
        self.group = group
        self.widths = [len(ids) for ids in ranges]
        self.first_id = ranges[group.rank].start
        self.ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
        self.own_ids = self.ids[self.first_id : ranges[group.rank].stop]

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """logits: [s, own ids] fp32, changed in place. Returns [s] int64 token ids, equal on all ranks."""
        random = rows.temperature > 0
        truncated = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        full = None
        if truncated.any():
            full = self._gather(logits[self._index(truncated)])
        plain = random & ~truncated
        if plain.any():
            index = self._index(plain)
            # argmax(logits / T + noise), times T: no temperature, however small, overflows.
            noise = self.noise(*noise_keys(rows, plain), self.own_ids)
            logits[index] += noise * self._column(rows.temperature[plain]).float()
        tokens = self._argmax(logits)
        if full is not None:
            # From the maximum down and in fp64, so that no temperature, however small, overflows.
            scaled = (full - full.amax(dim=-1, keepdim=True)).double() / self._column(rows.temperature[truncated])
            scores = truncate(scaled, rows, truncated) + self.noise(*noise_keys(rows, truncated), self.ids)
            tokens[self._index(truncated)] = scores.argmax(dim=-1)
        return tokens

    def _argmax(self, scores: torch.Tensor) -> torch.Tensor:
        """The best id over all ranks' ranges; of equals, the lowest."""
        values, local = scores.max(dim=-1)
        ids = local + self.first_id
        if self.group.size == 1:
            return ids
        # Ids below 2**53 are exact in fp64, so that value and id travel in one collective.
        winners = self.group.all_gather(torch.stack((values.double(), ids.double())))  # [ranks, 2, s]
        best = winners[:, 0].argmax(dim=0, keepdim=True)
        return winners[:, 1].gather(0, best)[0].long()

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """[s, own ids] of every rank -> [s, vocabulary]."""
        if self.group.size == 1:
            return logits.clone()
        padded = logits.new_zeros(logits.shape[0], max(self.widths))
        padded[:, : logits.shape[1]] = logits
        parts = self.group.all_gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=-1)

    def _index(self, chosen: np.ndarray) -> torch.Tensor:
        return to_device(np.flatnonzero(chosen), self.ids.device)

    def _column(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self.ids.device).unsqueeze(-1)


def truncate(logits: torch.Tensor, rows: SamplingRows, chosen: np.ndarray) -> torch.Tensor:
    """Masks out of [n, vocabulary] fp64 logits what top-k, then top-p, then min-p of the chosen rows exclude."""
    device = logits.device
    column = lambda values: to_device(values[chosen], device).unsqueeze(-1)  # noqa: E731
    top_k, top_p, min_p = column(rows.top_k), column(rows.top_p), column(rows.min_p)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab, device=device)
    keep = rank < torch.where(top_k > 0, top_k, vocab)
    probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep &= (before < top_p) | (top_p >= 1)
    keep &= probabilities >= min_p * probabilities[:, :1]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), float("-inf"))


def noise_keys(rows: SamplingRows, chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit keys per chosen row from its (seed, position), by SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(rows.seeds[chosen]) ^ rows.positions[chosen].astype(np.uint64))
    high = torch.from_numpy((mixed >> np.uint64(32)).astype(np.int64))
    low = torch.from_numpy((mixed & np.uint64(_MASK32)).astype(np.int64))
    return high, low


def gumbel_noise(high: torch.Tensor, low: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n, ids], fp32: a 32-bit integer hash of each key pair and id, made uniform in (0, 1)."""
    noise = torch.empty(len(high), len(ids), dtype=torch.float32, device=ids.device)
    spread = ids * 0x9E3779B1
    for row, (first, second) in enumerate(zip(high.tolist(), low.tolist(), strict=True)):  # a row fits in a CPU's cache
        x = _mix32((spread + first).bitwise_and_(_MASK32))
        x = _mix32(x.bitwise_xor_(second))
        noise[row] = x.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()
    return noise


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
