"""Where a row stands in its guide, and which tokens may come next.

Every rank follows the guide for itself, on the tokens that all ranks sampled alike. The newest token is taken in only
when the next mask is wanted, after that step's forward pass was launched, so that a device never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher

from workers.grammar import GuideError, GuideMaker, checked
from workers.inputs import to_host


class GuideState:
    """failure: why the guide can no longer be followed; then only end tokens are allowed."""

    def __init__(
        self, maker: GuideMaker, guide: tuple[str, str], output: Sequence[int], end_ids: Sequence[int]
    ) -> None:
        """output: tokens that the request has already."""
        self.failure: str | None = None
        self._end_ids = list(end_ids)
        self._matcher: LLMatcher | None = None
        self._newest: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        try:
            self._matcher = maker.matcher(*guide)
            self._matcher.consume_tokens(list(output))
            checked(self._matcher)
        except GuideError as error:
            self.failure = str(error)

    def expect(self, token: torch.Tensor) -> None:
        """token: [1] int64, the row's next one, which the device may still be computing."""
        self._newest, self._arrived = to_host(token)

    def allowed(self, vocab_size: int, may_end: bool) -> np.ndarray:
        """[vocabulary] bool. may_end: otherwise end tokens are left out, unless nothing else is possible."""
        mask = np.zeros(vocab_size, bool)
        try:
            bits = np.frombuffer(self._bits(), np.uint8)
            mask |= np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
        except GuideError as error:
            self.failure = str(error)
            mask[self._end_ids] = True
            return mask
        if not may_end:
            longer = mask.copy()
            longer[self._end_ids] = False
            if longer.any():
                return longer
        return mask

    def _bits(self) -> bytes:
        """Raises GuideError."""
        if self.failure is not None:
            raise GuideError(self.failure)
        if self._newest is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._matcher.consume_token(int(self._newest))
            self._newest = None
        bits = checked(self._matcher).compute_bitmask()
        checked(self._matcher)
        return bits
