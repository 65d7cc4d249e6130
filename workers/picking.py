"""Each row's best token of this rank's vocabulary range: with noise for rows that are sampled, without for others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.native import call
from workers.kernels import Kernels
from workers.noise import MakeNoise, gumbel_noise, noise_of
from workers.pieces import rows_at_once

MOST_CANDIDATES = 256  # of a row; where one has more, all of its tokens get their noise


@dataclass(frozen=True, slots=True)
class Noisy:
    """The rows that noise decides: [n] int64 which, [n] int64 their keys, on the host, [n, 1] fp32 temperatures."""

    index: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    temperatures: torch.Tensor

    def split(self, size: int) -> list[Noisy]:
        """So many rows at a time."""
        columns = (self.index, self.high, self.low, self.temperatures)
        return [Noisy(*part) for part in zip(*(column.split(size) for column in columns), strict=True)]

    def of(self, chosen: torch.Tensor) -> Noisy:
        """Those of the rows for which [n] bool `chosen` is true."""
        return Noisy(self.index[chosen], self.high[chosen], self.low[chosen], self.temperatures[chosen])


class TorchPicking:
    """Noise for every token. own_ids: [ids] int64, this rank's."""

    def __init__(self, own_ids: torch.Tensor, noise: MakeNoise = gumbel_noise) -> None:
        self.own_ids, self.noise = own_ids, noise

    def pick(self, logits: torch.Tensor, noisy: Noisy | None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [s, ids] fp32, changed in place. Returns the best score and its place in the range, [s] each."""
        if noisy is not None:
            # argmax(logits / T + noise), times T: no temperature, however small, overflows.
            for some in noisy.split(rows_at_once(len(self.own_ids), logits.device)):
                logits[some.index] += self.noise(some.high, some.low, self.own_ids) * some.temperatures
        values, local = logits.max(dim=-1)
        return values, local


class CompiledPicking:
    """Noise for the few tokens that can win (sampling.cpp). Scores are what TorchPicking makes of them."""

    def __init__(self, kernels: Kernels, own_ids: torch.Tensor) -> None:
        self.kernels, self.own_ids = kernels, own_ids
        self.plain = TorchPicking(own_ids)

    def pick(self, logits: torch.Tensor, noisy: Noisy | None) -> tuple[torch.Tensor, torch.Tensor]:
        count, size = logits.shape
        if size == 0 or not logits.is_contiguous():
            return self.plain.pick(logits, noisy)
        values, local = torch.empty(count, dtype=torch.float32), torch.empty(count, dtype=torch.int64)
        arguments = (torch.get_num_threads(), count, size, logits.data_ptr())
        call(self.kernels.best, *arguments, values.data_ptr(), local.data_ptr())
        if noisy is not None:
            ids, is_full = self._candidates(logits, noisy)
            if is_full.any():
                # Flat rows, or those of which a guide leaves nothing in this range; the others do not pay for them.
                full, noisy, ids = noisy.of(is_full), noisy.of(~is_full), ids[~is_full]
                places = torch.arange(len(full.index))
                scores = logits[full.index]
                values[full.index], local[full.index] = self.plain.pick(scores, replace(full, index=places))
            if len(noisy.index) == 0:
                return values, local
            noise = noise_of(noisy.high.unsqueeze(-1), noisy.low.unsqueeze(-1), ids + self.own_ids[0]).float()
            scores = logits[noisy.index.unsqueeze(-1), ids] + noise * noisy.temperatures
            best, place = scores.max(dim=-1)  # candidates ascend, so that of equals the lowest comes first
            values[noisy.index] = best.where(~values[noisy.index].isnan(), float("nan"))
            local[noisy.index] = ids.gather(1, place.unsqueeze(-1)).squeeze(-1)
        return values, local

    def _candidates(self, logits: torch.Tensor, noisy: Noisy) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, candidates] places in the range, a row's first one again behind its last; [n] whether they are too many,
        so that the row's places mean nothing."""
        rows = len(noisy.index)
        ids, counts = torch.empty((rows, MOST_CANDIDATES), dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        call(
            self.kernels.candidates,
            *(torch.get_num_threads(), rows, noisy.index.data_ptr(), logits.shape[1], int(self.own_ids[0])),
            *(logits.data_ptr(), noisy.high.data_ptr(), noisy.low.data_ptr(), noisy.temperatures.data_ptr()),
            *(MOST_CANDIDATES, ids.data_ptr(), counts.data_ptr()),
        )
        return ids[:, : max(0, int(counts.max()))], counts < 0
