"""What top-k, top-p and min-p exclude of logits of which each rank holds a vocabulary range.

A row's tokens stand in order: by how far their logit lies below the row's largest, of equals the lowest id first. What
the limits leave is the first so many of them, so that the ranks need to learn only where the row is cut.

    small top-k     each rank's k best keys meet (workers/keys.py), and everything is decided among them
    top-k or top-p  radix search for the distance at which the sum of counts or masses reaches its limit: four rounds,
                    in each of which 256 sums a row meet. Of tokens at that very distance the lowest ids are kept
    min-p           is a distance from the largest logit, and that is all the ranks have to know

A token's mass is its likelihood in units of the most likely one's 2**-44 or so, an integer: sums are exact in whatever
order they are made, also by a GPU's atomic additions, and a row is cut alike on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parallel.group import TensorParallelGroup
from workers.inputs import to_device
from workers.keys import best_keys, best_of_ranks, make_keys, turned_ids, values_of
from workers.pieces import rows_at_once

SMALL_TOP_K = 1024
_DIGIT = 8  # bits of a distance that a round decides
_BINS = 1 << _DIGIT
_SHIFTS = range(32 - _DIGIT, -1, -_DIGIT)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of the s rows is sampled: [s] arrays on the host. positions: of the tokens to be sampled."""

    seeds: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


class Truncation:
    """All ranks make the same calls. The host never waits for the device.

    own_ids: the range of token ids that this rank's logits are of, not empty. widest: the length of the longest range.
    """

    def __init__(
        self, own_ids: range, widest: int, vocab_size: int, group: TensorParallelGroup, device: torch.device
    ) -> None:
        self.vocab_size, self.group, self.device = vocab_size, group, device
        self.rows_at_once = rows_at_once(max(widest, 2 * _BINS), device)  # on all ranks the same
        self.mass_unit = 2.0 ** (62 - vocab_size.bit_length())  # the sum of a row's masses fits in 63 bits
        self._turned = turned_ids(own_ids.start, own_ids.stop, device)

    def apply(self, logits: torch.Tensor, rows: SamplingRows, chosen: np.ndarray) -> None:
        """Makes -inf of what the limits of the chosen rows, [s] bool, exclude; logits: [s, own ids] fp32.

        Top-k, then top-p of what that leaves, then min-p; at least one token stays. What stays becomes its distance to
        the row's largest logit: numbers near 0 are finer, and no temperature, however small, overflows. Of a row whose
        largest logit is NaN or infinite that is NaN. Temperatures of the chosen rows must be above 0.
        """
        largest = self.group.all_gather(logits.amax(dim=-1, keepdim=True)).amax(dim=0)
        small = chosen & (rows.top_k > 0) & (rows.top_k <= SMALL_TOP_K)
        others = chosen & ~small
        for cut, concerned in [
            (self._among_best, small),
            (self._top_k, others & (rows.top_k > 0)),
            (self._top_p, others & (rows.top_p < 1)),
            (self._min_p, others & (rows.min_p > 0)),
        ]:
            for piece in self._pieces(concerned):
                index = to_device(piece, self.device)
                top = largest[index]
                below = logits[index].sub_(top)
                logits[index] = below.masked_fill_(cut(below, rows, piece) & top.isfinite(), float("-inf"))
                largest[index] = top - top  # 0, or NaN

    def _pieces(self, concerned: np.ndarray) -> Iterator[np.ndarray]:
        places = np.flatnonzero(concerned)
        for at in range(0, len(places), self.rows_at_once):
            yield places[at : at + self.rows_at_once]

    # Each of the following takes [n, own ids] distances, 0 and below, of the rows of a piece, and says what to exclude.

    def _among_best(self, below: torch.Tensor, rows: SamplingRows, piece: np.ndarray) -> torch.Tensor:
        keys = make_keys(below, self._turned)
        width = min(int(rows.top_k[piece].max()), self.vocab_size)
        best = best_of_ranks(self.group.all_gather(best_keys(keys, width)))
        distances, top_p = values_of(best), self._column(rows.top_p, piece)
        in_top_k = torch.arange(width, device=self.device) < self._column(rows.top_k, piece)
        masses = self._masses(distances, rows, piece).masked_fill_(~in_top_k, 0)
        before = masses.cumsum(dim=-1) - masses
        kept = in_top_k & ((before < _share(masses.sum(dim=-1, keepdim=True), top_p)) | (top_p >= 1))
        kept &= distances >= self._furthest(rows, piece)
        return keys < best.gather(-1, kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0))

    def _top_k(self, below: torch.Tensor, rows: SamplingRows, piece: np.ndarray) -> torch.Tensor:
        one = torch.ones(1, 1, dtype=torch.int64, device=self.device)
        search = Search(below, one.expand(below.shape), self.group)
        search.run(self._column(rows.top_k, piece))
        return search.excluded(one)

    def _top_p(self, below: torch.Tensor, rows: SamplingRows, piece: np.ndarray) -> torch.Tensor:
        search = Search(below, self._masses(below.double(), rows, piece), self.group)
        search.run(_share(search.total, self._column(rows.top_p, piece)))
        return search.excluded(self._masses(search.distance, rows, piece))

    def _min_p(self, below: torch.Tensor, rows: SamplingRows, piece: np.ndarray) -> torch.Tensor:
        return below < self._furthest(rows, piece)

    def _furthest(self, rows: SamplingRows, piece: np.ndarray) -> torch.Tensor:
        """[n, 1] fp32: the distance at which a token is min_p times as likely as the most likely one, rounded up."""
        with np.errstate(divide="ignore"):
            exact = rows.temperature[piece] * np.log(rows.min_p[piece])
        near = exact.astype(np.float32)
        near = np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)
        return to_device(near, self.device).unsqueeze(-1)

    def _masses(self, distances: torch.Tensor, rows: SamplingRows, piece: np.ndarray) -> torch.Tensor:
        """Of [n, m] fp64 distances: [n, m] int64."""
        likelihood = (distances / self._column(rows.temperature, piece)).exp_()
        return likelihood.mul_(self.mass_unit).round_().long()

    def _column(self, values: np.ndarray, piece: np.ndarray) -> torch.Tensor:
        return to_device(values[piece], self.device).unsqueeze(-1)


class Search:
    """Where the weights of a row's tokens, added up in the tokens' order over all ranks, reach a limit.

    below: [n, own ids] fp32, 0 and below. weights: [n, own ids] int64, 0 and above.
    """

    def __init__(self, below: torch.Tensor, weights: torch.Tensor, group: TensorParallelGroup) -> None:
        self.weights, self.group = weights, group
        self.order = below.abs().view(torch.int32)  # sorts as the distances do, the nearest first
        self.cut = self.order.new_zeros(len(below), 1)  # the order of the token that reaches the limit, so far as known
        self.before = weights.new_zeros(len(below), 1)  # the weight of all that lie before it
        self.sums = self._sums(_SHIFTS[0])
        self.total = self.sums.sum(dim=-1, keepdim=True)

    @property
    def distance(self) -> torch.Tensor:
        """[n, 1] fp64 of the token that reaches the limit."""
        return -self.cut.view(torch.float32).double()

    def run(self, limit: torch.Tensor) -> None:
        """limit: [n, 1] int64, above 0. Where the total is less, all tokens are kept."""
        self.limit = torch.minimum(limit, self.total)
        for shift in _SHIFTS:
            sums = self.sums if shift == _SHIFTS[0] else self._sums(shift)
            before = self.before + sums.cumsum(dim=-1) - sums
            digit = (before < self.limit).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
            self.before = before.gather(-1, digit)
            self.cut = self.cut << _DIGIT | digit.int()

    def excluded(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: [n, 1] int64 of a token at the cut. Tokens before the cut are kept, and of those at it so many of the
        lowest ids that the limit is reached."""
        at_cut = self.order == self.cut
        quota = ((self.limit - self.before - 1) // weight.clamp(min=1) + 1).clamp_(min=1)
        if self.group.size > 1:
            counts = self.group.all_gather(at_cut.sum(dim=-1, keepdim=True))
            quota -= counts[: self.group.rank].sum(dim=0)
        return (self.order > self.cut) | (at_cut & (at_cut.cumsum(dim=-1, dtype=torch.int32) > quota))

    def _sums(self, shift: int) -> torch.Tensor:
        """[n, bins] int64 over all ranks: weights of tokens whose order begins with the cut, by their next digit."""
        digits = (self.order >> shift).sub_((self.cut << _DIGIT) - 1).clamp_(0, _BINS + 1)  # others: first and last bin
        sums = self.weights.new_zeros(len(digits), _BINS + 2).scatter_add_(-1, digits.long(), self.weights)
        return self.group.all_gather(sums[:, 1:-1]).sum(dim=0)


def _share(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, 1] int64: a sum of masses is below top_p of the total if it is below this."""
    return (total * top_p).ceil_().long().clamp_(min=1)
