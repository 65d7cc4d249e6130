"""What the few rows that ask for it do to their logits before a token is chosen: bias, penalties, fewest tokens,
guides.

Each rank adjusts its own vocabulary range. What a row has said is kept beside it on the device and counted when a token
is sampled, so that a step which was planned before the driver knew the last token sees that token all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scheduler.plan import Admission, Extras
from workers.grammar import GuideMaker
from workers.guides import GuideState
from workers.inputs import to_device
from workers.penalties import Penalties


@dataclass(slots=True)
class AdjustedRow:
    """One row's wishes, as tensors of this rank's range.

    bias_ids, end_ids: [n] int64 places in the range; biases: [n] fp32.
    penalties, guide: None where there are none.
    """

    extras: Extras
    bias_ids: torch.Tensor
    biases: torch.Tensor
    end_ids: torch.Tensor
    penalties: Penalties | None
    guide: GuideState | None


Asking = Sequence[tuple[int, AdjustedRow]]  # places among a step's sampled rows, and their wishes


class Adjustments:
    """own_ids: the range of token ids that this rank's logits are of. guides: makes their matchers."""

    def __init__(self, own_ids: range, vocab_size: int, device: torch.device, guides: GuideMaker) -> None:
        self.own_ids, self.vocab_size, self.device, self._guides = own_ids, vocab_size, device, guides
        self._rows: dict[int, AdjustedRow] = {}

    def admit(self, admissions: Iterable[Admission]) -> None:
        """Rows start, and what their numbers stood for before is forgotten."""
        for admission in admissions:
            self._rows.pop(admission.row, None)
            if admission.extras is not None:
                self._rows[admission.row] = self._row(admission.tokens, admission.extras)

    def asking(self, sampled_rows: np.ndarray) -> Asking:
        """The step's sampled rows that ask for anything."""
        if not self._rows:
            return []
        return [(place, self._rows[row]) for place, row in enumerate(sampled_rows.tolist()) if row in self._rows]

    def apply(self, logits: torch.Tensor, asking: Asking, next_positions: np.ndarray) -> None:
        """Changes the asking rows of [s, own ids] fp32 logits in place. next_positions: as in StepInputs."""
        for place, row in asking:
            scores, extras = logits[place], row.extras
            if len(row.bias_ids):
                scores.index_add_(0, row.bias_ids, row.biases)
            if row.penalties is not None:
                row.penalties.apply(scores)
            may_end = int(next_positions[place]) - extras.num_prompt >= extras.min_tokens
            if row.guide is not None:
                self._follow(scores, row.guide, may_end)
            elif not may_end:
                scores[row.end_ids] = float("-inf")

    def _follow(self, scores: torch.Tensor, guide: GuideState, may_end: bool) -> None:
        allowed = guide.allowed(self.vocab_size, may_end)[self.own_ids.start : self.own_ids.stop]
        scores.masked_fill_(to_device(~allowed, self.device), float("-inf"))

    def count(self, tokens: torch.Tensor, asking: Asking) -> None:
        """Takes in the step's sampled tokens, [s] int64, without waiting for them."""
        for place, row in asking:
            token = tokens[place : place + 1]
            if row.guide is not None:
                row.guide.expect(token)
            if row.penalties is not None:
                row.penalties.add(token)

    def _row(self, tokens: Sequence[int], extras: Extras) -> AdjustedRow:
        own = [at for at, token_id in enumerate(extras.bias_ids) if token_id in self.own_ids]
        penalties = guide = None
        if self.own_ids and (extras.frequency_penalty or extras.presence_penalty or extras.repetition_penalty != 1):
            penalties = Penalties(extras, tokens, self.own_ids, self.device)
        if extras.guide is not None:
            guide = GuideState(self._guides, extras.guide, tokens[extras.num_prompt :], extras.end_ids)
        return AdjustedRow(
            extras,
            self._places([extras.bias_ids[at] for at in own]),
            to_device(np.array([extras.biases[at] for at in own], np.float32), self.device),
            self._places([token_id for token_id in extras.end_ids if token_id in self.own_ids]),
            penalties,
            guide,
        )

    def _places(self, token_ids: Sequence[int]) -> torch.Tensor:
        return to_device(np.array([i - self.own_ids.start for i in token_ids], np.int64), self.device)
