"""Choosing the next tokens from logits of which each rank holds a vocabulary range.

Sampling is Gumbel-max: the token with the largest logit / temperature + Gumbel noise is a sample of the softmax. The
noise of a token id is a hash of (seed, position, id), so a request's tokens depend on nothing else: not on its
neighbours, chunk sizes, ranks, or on how often it was computed anew. Each rank perturbs its own range and only the
winners meet. Before, rows that truncate the distribution (top-k, top-p, min-p) lose what that excludes (truncation.py).
"""

from __future__ import annotations

import numpy as np
import torch

from parallel.group import TensorParallelGroup
from parallel.split import deal_lanes
from workers.inputs import to_device
from workers.kernels import Kernels
from workers.noise import MakeNoise, gumbel_noise, noise_keys
from workers.picking import CompiledPicking, Noisy, TorchPicking
from workers.truncation import SamplingRows, Truncation

NOT_FINITE = -1


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
        self.group, self.device = group, device
        self.own_range = ranges[group.rank]
        looked_at = self.own_range or range(vocab_size, vocab_size + 1)  # see `sample`
        self.first_id = looked_at.start
        own_ids = torch.arange(looked_at.start, looked_at.stop, dtype=torch.int64, device=device)
        self.picking = CompiledPicking(kernels, own_ids) if kernels else TorchPicking(own_ids, noise)
        self.truncation = Truncation(looked_at, max(map(len, ranges)), vocab_size, group, device, kernels)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """logits: [s, own ids] fp32, changed in place. Returns [s] int64 token ids, equal on all ranks.

        NOT_FINITE stands for the token of a row whose logits hold NaN or whose largest one is infinite.
        """
        if not self.own_range:  # one token that nobody can choose, so that there is something to look at
            logits = logits.new_full((len(logits), 1), float("-inf"))
        random = rows.temperature > 0
        truncated = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        if truncated.any():
            self.truncation.apply(logits, rows, truncated)
        return self._agree(*self.picking.pick(logits, self._noisy(rows, random)))

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

    def _index(self, chosen: np.ndarray) -> torch.Tensor:
        return to_device(np.flatnonzero(chosen), self.device)

    def _column(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self.device).unsqueeze(-1)
