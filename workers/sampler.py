"""Choosing the next tokens from logits of which each rank holds a vocabulary range.

Sampling is Gumbel-max: the token with the largest logit / temperature + Gumbel noise is a sample of the softmax. The
noise of a token id is a hash of (seed, position, id), so a request's tokens depend on nothing else: not on its
neighbours, chunk sizes, ranks, or on how often it was computed anew. Each rank perturbs its own range and only the
winners meet; the full logits are gathered only for rows that truncate the distribution (top-k, top-p, min-p).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from parallel.group import TensorParallelGroup
from parallel.split import deal_lanes
from workers.inputs import to_device
from workers.kernels import Kernels
from workers.noise import MakeNoise, gumbel_noise, noise_keys
from workers.picking import CompiledPicking, Noisy, TorchPicking

NOT_FINITE = -1


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
    """Every rank calls `sample` with its own logits and gets the same tokens. The host never waits for the device.

    noise: what makes noise for whole rows.
    """

    def __init__(
        self,
        vocab_size: int,
        group: TensorParallelGroup,
        device: torch.device,
        kernels: Kernels | None = None,
        noise: MakeNoise = gumbel_noise,
    ) -> None:
        ranges = deal_lanes(vocab_size, group.size)
        self.group = group
        self.widths = [len(ids) for ids in ranges]
        self.own_range = ranges[group.rank]
        self.first_id = self.own_range.start
        self.ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
        own_ids = self.ids[self.first_id : self.own_range.stop]
        self.picking = CompiledPicking(kernels, own_ids) if kernels else TorchPicking(own_ids, noise)
        self.noise = noise

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """logits: [s, own ids] fp32, changed in place. Returns [s] int64 token ids, equal on all ranks.

        NOT_FINITE stands for the token of a row whose logits hold NaN or whose largest one is infinite.
        """
        random = rows.temperature > 0
        truncated = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        full = None
        if truncated.any():
            full = self._gather(logits[self._index(truncated)])
        tokens = self._agree(*self.picking.pick(logits, self._noisy(rows, random & ~truncated)))
        if full is not None:
            # From the maximum down and in fp64, so that no temperature, however small, overflows.
            scaled = (full - full.amax(dim=-1, keepdim=True)).double() / self._column(rows.temperature[truncated])
            scores = truncate(scaled, rows, truncated) + self.noise(
                *noise_keys(rows.seeds[truncated], rows.positions[truncated]), self.ids
            )
            tokens[self._index(truncated)] = scores.argmax(dim=-1).where(full.amax(dim=-1).isfinite(), NOT_FINITE)
        return tokens

    def _noisy(self, rows: SamplingRows, chosen: np.ndarray) -> Noisy | None:
        if not chosen.any():
            return None
        keys = noise_keys(rows.seeds[chosen], rows.positions[chosen])
        return Noisy(self._index(chosen), *keys, self._column(rows.temperature[chosen]).float())

    def _agree(self, values: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """The id with the best value over all ranks' ranges; of equals, the lowest."""
        ids = local + self.first_id
        if self.group.size == 1:
            return ids.where(values.isfinite(), NOT_FINITE)
        # Ids below 2**53 are exact in fp64, so that value and id travel in one collective.
        winners = self.group.all_gather(torch.stack((values.double(), ids.double())))  # [ranks, 2, s]
        best = winners[:, 0].argmax(dim=0, keepdim=True)  # NaN, where there is any
        return winners[:, 1].gather(0, best)[0].long().where(winners[:, 0].gather(0, best)[0].isfinite(), NOT_FINITE)

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
