"""What top-k, top-p and min-p exclude of logits of which each rank holds a vocabulary range.

A row's tokens stand in order: by distance, which is their logit minus the row's largest, 0 first, and of equals by id.
What the limits leave is the first so many of them, so that the ranks need to learn only where a row is cut: at which
distance, and how many tokens at that very distance stay on each rank.

    small top-k     each rank's k best keys meet (workers/keys.py), and everything is decided among them
    top-k or top-p  radix search for the distance at which the sum of counts or masses reaches its limit: four rounds,
                    in each of which 256 sums a row meet
    min-p           is a distance, and that is all the ranks have to know

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
from workers.kernels import Kernels
from workers.keys import best_of_ranks, ids_of, turned_ids, values_of
from workers.pieces import PIECE_ELEMENTS
from workers.ranges import BINS, DIGIT, CompiledRange, Range, TorchRange, masses, order_of

SMALL_TOP_K = 1024
_SHIFTS = range(32 - DIGIT, -1, -DIGIT)
_ALL = 2**62  # tokens


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of the s rows is sampled: [s] arrays on the host. positions: of the tokens to be sampled."""

    seeds: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    def only(self, places: np.ndarray) -> SamplingRows:
        """Those of the rows."""
        return SamplingRows(*(getattr(self, name)[places] for name in self.__slots__))


Cut = tuple[torch.Tensor, torch.Tensor]  # [n, 1] int32 order of a distance; [n, 1] int64 tokens at it that stay here


class Truncation:
    """All ranks make the same calls. The host never waits for the device.

    own_ids: the range of token ids that this rank's logits are of, not empty. widest: the length of the longest range.
    """

    def __init__(
        self,
        own_ids: range,
        widest: int,
        vocab_size: int,
        group: TensorParallelGroup,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self.own_ids, self.vocab_size, self.group, self.device = own_ids, vocab_size, group, device
        self.kernels = kernels
        self.rows_at_once = max(1, PIECE_ELEMENTS // max(widest, 2 * BINS))  # on all ranks the same
        self.mass_unit = 2.0 ** (62 - vocab_size.bit_length())  # the sum of a row's masses fits in 63 bits
        self._turned = turned_ids(own_ids.start, own_ids.stop, device)

    def apply(self, logits: torch.Tensor, rows: SamplingRows, chosen: np.ndarray) -> None:
        """Makes -inf of what the limits of the chosen rows, [s] bool, exclude; logits: [s, own ids] fp32.

        Top-k, then top-p of what that leaves, then min-p; at least one token stays. What stays becomes its distance:
        numbers near 0 are finer, and no temperature, however small, overflows. Of a row whose largest logit is NaN or
        infinite no number is left. Temperatures of the chosen rows must be above 0.
        """
        largest = self.group.all_gather(logits.amax(dim=-1, keepdim=True)).amax(dim=0)
        small = chosen & (rows.top_k > 0) & (rows.top_k <= SMALL_TOP_K)
        others = chosen & ~small
        for find, concerned in [
            (self._among_best, small),
            (self._top_k, others & (rows.top_k > 0)),
            (self._top_p, others & (rows.top_p < 1)),
            (self._min_p, others & (rows.min_p > 0)),
        ]:
            for places in self._pieces(concerned):
                index = to_device(places, self.device)
                top = largest[index]
                some = self._range(logits, index, top)
                some.cut(*find(some, rows.only(places)))
                largest[index] = top - top  # 0, or NaN

    def _pieces(self, concerned: np.ndarray) -> Iterator[np.ndarray]:
        places = np.flatnonzero(concerned)
        for at in range(0, len(places), self.rows_at_once):
            yield places[at : at + self.rows_at_once]

    def _range(self, logits: torch.Tensor, index: torch.Tensor, top: torch.Tensor) -> Range:
        if self.kernels and logits.is_contiguous():
            return CompiledRange(self.kernels, logits, index, top, self.own_ids.start)
        return TorchRange(logits, index, top, self._turned)

    def _among_best(self, some: Range, rows: SamplingRows) -> Cut:
        width = min(int(rows.top_k.max()), self.vocab_size)
        best = best_of_ranks(self.group.all_gather(some.nearest(width)))
        distances, top_p = values_of(best), self._column(rows.top_p)
        place = torch.arange(width, device=self.device)
        is_top_k = place < self._column(rows.top_k)
        mass = masses(distances, self._column(rows.temperature), self.mass_unit).masked_fill_(~is_top_k, 0)
        before = mass.cumsum(dim=-1) - mass
        kept = is_top_k & ((before < _share(mass.sum(dim=-1, keepdim=True), top_p)) | (top_p >= 1))
        kept &= distances >= self._column(_furthest(rows))
        count = kept.sum(dim=-1, keepdim=True).clamp_(min=1)
        last, ids = best.gather(-1, count - 1), ids_of(best)
        is_own = (ids >= self.own_ids.start) & (ids < self.own_ids.stop)
        stays = (place < count) & (best >> 32 == last >> 32) & is_own
        return order_of(values_of(last).float()), stays.sum(dim=-1, keepdim=True)

    def _top_k(self, some: Range, rows: SamplingRows) -> Cut:
        search = Search(some, self.group, self._column(rows.top_k), None, 1)
        return search.cut, search.quota(1)

    def _top_p(self, some: Range, rows: SamplingRows) -> Cut:
        temperatures = self._column(rows.temperature)
        search = Search(some, self.group, self._column(rows.top_p), temperatures, self.mass_unit)
        distance = -search.cut.view(torch.float32).double()
        return search.cut, search.quota(masses(distance, temperatures, self.mass_unit).clamp_(min=1))

    def _min_p(self, some: Range, rows: SamplingRows) -> Cut:
        order = order_of(self._column(_furthest(rows)))
        return order, torch.full(order.shape, _ALL, device=self.device)

    def _column(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self.device).unsqueeze(-1)


class Search:
    """Where the weights of a row's tokens, added up in order over all ranks, reach a limit.

    limits: [n, 1] above 0, int64 if each token weighs 1, or else fp64 shares of the total.
    cut: [n, 1] int32, the order of the token that reaches it. before: [n, 1] int64, the weight of all that come before.
    """

    def __init__(
        self,
        some: Range,
        group: TensorParallelGroup,
        limits: torch.Tensor,
        temperatures: torch.Tensor | None,
        unit: float,
    ) -> None:
        self.some, self.group = some, group
        self.cut = torch.zeros_like(limits, dtype=torch.int32)
        self.before = torch.zeros_like(limits, dtype=torch.int64)
        for shift in _SHIFTS:
            sums = group.all_gather(some.weigh(self.cut, shift, temperatures, unit)).sum(dim=0)
            if shift == _SHIFTS[0]:
                total = sums.sum(dim=-1, keepdim=True)
                self.limit = torch.minimum(limits if temperatures is None else _share(total, limits), total)
            before = self.before + sums.cumsum(dim=-1) - sums
            digit = (before < self.limit).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
            self.before = before.gather(-1, digit)
            self.cut = self.cut << DIGIT | digit.int()

    def quota(self, weight: torch.Tensor | int) -> torch.Tensor:
        """[n, 1] int64: how many tokens at the cut stay on this rank, lowest ids first; weight: of each of them."""
        quota = ((self.limit - self.before - 1) // weight + 1).clamp_(min=1)
        if self.group.size > 1:
            last = self.some.weigh(self.cut >> DIGIT, 0, None, 1).gather(-1, (self.cut & BINS - 1).long())
            quota -= self.group.all_gather(last)[: self.group.rank].sum(dim=0)
        return quota


def _share(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, 1] int64: a sum of masses is below top_p of the total if it is below this."""
    return (total * top_p).ceil_().long().clamp_(min=1)


def _furthest(rows: SamplingRows) -> np.ndarray:
    """[n] fp32: the distance at which a token is min_p times as likely as the most likely one, rounded up."""
    with np.errstate(divide="ignore"):
        exact = rows.temperature * np.log(rows.min_p)
    near = exact.astype(np.float32)
    return np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)
