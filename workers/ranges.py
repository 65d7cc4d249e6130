"""What truncation has to know of some rows' logits on this rank's vocabulary range, and the cut itself.

All is about a token's distance: its logit minus the row's largest, 0 and below. Without their sign, the bits of fp32
distances are integers that sort alike, their order: the nearest come first.
"""

from __future__ import annotations

from typing import Protocol

import torch

from attention.native import call, float_bits
from workers.kernels import Kernels
from workers.keys import LOWEST, best_keys, make_keys

DIGIT = 8  # bits of an order that sums are told apart by
BINS = 1 << DIGIT


def order_of(distances: torch.Tensor) -> torch.Tensor:
    """int32 of fp32."""
    return distances.abs().view(torch.int32)


def masses(distances: torch.Tensor, temperatures: torch.Tensor, unit: float) -> torch.Tensor:
    """[n, m] int64 of fp64: how likely tokens are, the most likely one weighing `unit`. temperatures: [n, 1] fp64."""
    return (distances / temperatures).exp_().mul_(unit).round_().long()


class Range(Protocol):
    """[n] rows of logits [s, own ids], fp32."""

    def nearest(self, width: int) -> torch.Tensor:
        """[n, width] int64: keys (workers/keys.py) of the nearest tokens' distances, the highest first."""

    def weigh(self, cut: torch.Tensor, shift: int, temperatures: torch.Tensor | None, unit: float) -> torch.Tensor:
        """[n, BINS] int64: weights of tokens whose order, shifted right, begins with the row's cut, by the digit that
        follows it. A token weighs its mass, or without temperatures 1. cut: [n, 1] int32."""

    def cut(self, order: torch.Tensor, quota: torch.Tensor) -> None:
        """Makes distances of the logits, and -inf of those that come after an order, [n, 1] int32, or are at it and not
        among the first so many, [n, 1] int64. Where the row's largest logit is NaN or infinite, no number is left."""


class TorchRange:
    """index: [n] int64, which rows. top: [n, 1] fp32, their largest logits of all ranks. turned: as in `make_keys`."""

    def __init__(self, logits: torch.Tensor, index: torch.Tensor, top: torch.Tensor, turned: torch.Tensor) -> None:
        self.logits, self.index, self.top, self.turned = logits, index, top, turned
        self.distances = logits[index].sub_(top)
        self.order = order_of(self.distances)
        self._weights: torch.Tensor | None = None

    def nearest(self, width: int) -> torch.Tensor:
        return best_keys(make_keys(self.distances, self.turned), width)

    def weigh(self, cut: torch.Tensor, shift: int, temperatures: torch.Tensor | None, unit: float) -> torch.Tensor:
        if temperatures is None:
            weights = cut.new_ones(1, 1, dtype=torch.int64).expand(self.order.shape)
        else:
            if self._weights is None:
                self._weights = masses(self.distances.double(), temperatures, unit)
            weights = self._weights
        # All others go into a first and a last bin.
        digits = (self.order >> shift).sub_((cut << DIGIT) - 1).clamp_(0, BINS + 1).long()
        return weights.new_zeros(len(digits), BINS + 2).scatter_add_(-1, digits, weights)[:, 1:-1]

    def cut(self, order: torch.Tensor, quota: torch.Tensor) -> None:
        is_at = self.order == order
        is_out = (self.order > order) | (is_at & (is_at.cumsum(dim=-1, dtype=torch.int32) > quota))
        self.logits[self.index] = self.distances.masked_fill_(is_out, float("-inf"))


class CompiledRange:
    """The same in truncation.cpp. first_id: of the range. logits must be contiguous."""

    def __init__(
        self, kernels: Kernels, logits: torch.Tensor, index: torch.Tensor, top: torch.Tensor, first_id: int
    ) -> None:
        self.kernels, self.count, self.first_id = kernels, len(index), first_id
        self._tensors = (index, logits, top)
        self._range = (torch.get_num_threads(), len(index), index.data_ptr(), logits.shape[1])
        self._range += (logits.data_ptr(), top.data_ptr())

    def nearest(self, width: int) -> torch.Tensor:
        keys = torch.empty((self.count, width), dtype=torch.int64)
        call(self.kernels.nearest, *self._range, self.first_id, width, keys.data_ptr(), LOWEST)
        return keys

    def weigh(self, cut: torch.Tensor, shift: int, temperatures: torch.Tensor | None, unit: float) -> torch.Tensor:
        sums = torch.empty((self.count, BINS), dtype=torch.int64)
        heat = 0 if temperatures is None else temperatures.data_ptr()
        call(self.kernels.weigh, *self._range, heat, float_bits(unit), cut.data_ptr(), shift, sums.data_ptr())
        return sums

    def cut(self, order: torch.Tensor, quota: torch.Tensor) -> None:
        call(self.kernels.cut, *self._range, order.data_ptr(), quota.data_ptr())
