"""How long a step takes, as a function of the work in it.

Five terms, each a cost in seconds per unit, none negative:

    fixed            once a step: reading the weights, launching, the frame's way
    tokens           each token in the linear layers
    sequences        each request in the step: its part of attention, its logits, its sampling
    prefill_pairs    each (query, key) pair of the prefill chunks: chunk x context
    decode_context   each cached token that a decode reads: the sum of the decodes' contexts

The costs are fitted to measured steps by non-negative least squares on relative errors. Steps of every kind are
remembered, a few of each, so that an hour of pure decoding does not wipe out what prefill costs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

SAMPLES_PER_KIND = 6
KINDS = 256
STEPS_PER_FIT = 16  # ... or what half a second's worth of steps is, where steps are long
SECONDS_PER_FIT = 0.5
FEWEST_SAMPLES = 12
RECENT = 15  # steps that tell how fast the machine is now ...
FEWEST_RECENT = 5  # ... from this many on, so that no hiccup passes for its pace
OUTLIER = 1.8  # a step this many times slower than the recent median of its like is a hiccup, not information
RIDGE = 1e-3  # how much the costs of before weigh; only what the samples do not tell is decided by it


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's time depends on.

    tokens: of prefill and decode together. sequences: chunks and decodes. prefill_pairs: (query, key) pairs of the
    chunks. decode_context: tokens that the decodes attend to, each its own included, summed.
    """

    tokens: int
    sequences: int
    prefill_pairs: int
    decode_context: int

    @property
    def is_mixed(self) -> bool:
        """Whether decodes wait in this step for prefill."""
        return self.prefill_pairs > 0 and self.decode_context > 0


def chunk_pairs(start: int, length: int) -> int:
    """(query, key) pairs of a causal chunk of `length` tokens behind `start` others."""
    return length * start + length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds per unit of each term."""

    fixed: float
    tokens: float
    sequences: float
    prefill_pairs: float
    decode_context: float

    def seconds(self, work: StepWork) -> float:
        return (
            self.fixed
            + self.tokens * work.tokens
            + self.sequences * work.sequences
            + self.prefill_pairs * work.prefill_pairs
            + self.decode_context * work.decode_context
        )

    @property
    def smallest(self) -> float:
        """Of a step that decodes one token behind next to no context."""
        return self.fixed + self.tokens + self.sequences + self.decode_context

    def longest_chunk(self, start: int, seconds: float) -> float:
        """Tokens of a chunk behind `start` others that fit in `seconds`: the root of its quadratic cost."""
        half = self.prefill_pairs / 2
        linear = self.tokens + self.prefill_pairs * (start + 0.5)
        if seconds <= 0:
            return 0.0
        if half == 0:
            return seconds / linear if linear else float("inf")
        # The stable form of (-b + sqrt(b^2 + 4ac)) / 2a: no cancellation when the pairs cost next to nothing.
        return 2 * seconds / (linear + (linear * linear + 4 * half * seconds) ** 0.5)


class StepTimeModel:
    """StepCosts that learn.

    costs: None until there were enough steps to fit them.
    drift: how much slower steps are now than `costs` says, the median of the last few; follows a machine that slows
        down at once, while the fit follows slowly.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self.costs = costs
        self.drift = 1.0
        self.outliers = 0
        self.most_tokens = 0  # of a step that was seen
        self._kinds: OrderedDict[tuple[int, ...], deque[tuple[StepWork, float]]] = OrderedDict()
        self._recent: deque[tuple[StepWork, float]] = deque(maxlen=RECENT)
        self._steps_since_fit = 0
        self._seconds_since_fit = 0.0

    def predict(self, work: StepWork) -> float | None:
        """Expected seconds, or None while nothing is known."""
        return None if self.costs is None else self.costs.seconds(work) * self.drift

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a step. One far slower than the recent ones counts only if most become so."""
        if self.costs is not None:
            self._recent.append((work, seconds))
            self._update_drift()
            if seconds > OUTLIER * self.predict(work):
                self.outliers += 1
                return
        self._remember(work, seconds)
        self._steps_since_fit += 1
        self._seconds_since_fit += seconds
        if self._steps_since_fit >= STEPS_PER_FIT or self._seconds_since_fit >= SECONDS_PER_FIT:
            self.fit()

    def learn(self, samples: Iterable[tuple[StepWork, float]]) -> None:
        """Learns from a profile: all of its steps together, so that no kind of step is taken for a hiccup."""
        for work, seconds in samples:
            self._remember(work, seconds)
        self.fit()

    def samples(self) -> Iterator[tuple[StepWork, float]]:
        """The remembered steps and the seconds that they took."""
        return (sample for kind in self._kinds.values() for sample in kind)

    def fit(self) -> None:
        """Fits the costs to the remembered steps, twice, the second time without those that the first finds odd."""
        self._steps_since_fit, self._seconds_since_fit = 0, 0.0
        samples = list(self.samples())
        if len(samples) < FEWEST_SAMPLES:
            return
        costs = _fit(samples, self.costs)
        usual = [(work, seconds) for work, seconds in samples if seconds <= OUTLIER * costs.seconds(work)]
        if len(usual) >= FEWEST_SAMPLES:
            costs = _fit(usual, self.costs)
        self.costs = costs
        self._update_drift()

    def _update_drift(self) -> None:
        ratios = sorted(seconds / max(self.costs.seconds(work), 1e-9) for work, seconds in self._recent)
        self.drift = ratios[len(ratios) // 2] if len(ratios) >= FEWEST_RECENT else 1.0

    def _remember(self, work: StepWork, seconds: float) -> None:
        self.most_tokens = max(self.most_tokens, work.tokens)
        kind = tuple(value.bit_length() for value in _values(work))
        if kind not in self._kinds:
            self._kinds[kind] = deque(maxlen=SAMPLES_PER_KIND)
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        self._kinds[kind].append((work, seconds))


def _values(work: StepWork) -> tuple[int, int, int, int]:
    return work.tokens, work.sequences, work.prefill_pairs, work.decode_context


def _fit(samples: list[tuple[StepWork, float]], before: StepCosts | None) -> StepCosts:
    """Least squares on relative errors, pulled slightly towards the costs of before."""
    seconds = np.array([seconds for _, seconds in samples])
    matrix = np.array([(1, *_values(work)) for work, _ in samples]) / seconds[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    old = np.zeros(5) if before is None else np.array([getattr(before, name) for name in StepCosts.__slots__]) * scale
    pull = (RIDGE * len(samples)) ** 0.5 * np.eye(5) * (1.0 if before is not None else 1e-3)
    rows = np.concatenate([matrix / scale, pull])
    goal = np.concatenate([np.ones(len(samples)), pull @ old])
    return StepCosts(*(float(cost) for cost in _non_negative(rows, goal) / scale))


def _non_negative(rows: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Least squares with no negative solution: what comes out negative is fixed at zero, worst first."""
    active = np.ones(rows.shape[1], bool)
    while True:
        solution = np.zeros(rows.shape[1])
        solution[active] = np.linalg.lstsq(rows[:, active], goal, rcond=None)[0]
        if solution.min() >= 0:
            return solution
        active[np.argmin(solution)] = False
