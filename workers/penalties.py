"""Penalties of one row on this rank's vocabulary range: only tokens of its prompt and output are looked at.

    seen    | places of the prompt's distinct tokens | of the output's tokens, one each | room ...
    counts  [ids], how often each token is in the output

A place may stand in `seen` many times: each time it gets the same new value. The host knows how long `seen` is without
knowing what is in it, so nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from scheduler.plan import Extras
from workers.inputs import to_device

_LARGEST = 1e30  # what a penalty close to 0 may make of a logit
_ROOM = 64


class Penalties:
    def __init__(self, extras: Extras, tokens: Sequence[int], own_ids: range, device: torch.device) -> None:
        """tokens: prompt and output so far. own_ids: not empty."""
        self._extras, self._own_ids = extras, own_ids
        ids = np.asarray(tokens, np.int64) - own_ids.start
        is_own = (ids >= 0) & (ids < len(own_ids))
        prompt = np.unique(ids[: extras.num_prompt][is_own[: extras.num_prompt]])
        output = ids[extras.num_prompt :][is_own[extras.num_prompt :]]
        if extras.repetition_penalty == 1:
            prompt = prompt[:0]
        self._counts = to_device(np.bincount(output, minlength=len(own_ids)).astype(np.float32), device)
        in_prompt = np.zeros(len(own_ids), bool)
        in_prompt[prompt] = True
        self._in_prompt = to_device(in_prompt, device)
        self._seen = to_device(np.concatenate([prompt, np.unique(output)]), device)
        self._length = len(self._seen)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes [own ids] fp32 logits in place."""
        extras, seen = self._extras, self._seen[: self._length]
        before, counts = scores[seen], self._counts[seen]
        is_said = counts > 0
        after = before
        if extras.repetition_penalty != 1:
            factor = extras.repetition_penalty
            after = torch.where(before > 0, before / factor, before * factor).clamp_(-_LARGEST, _LARGEST)
            after = torch.where(is_said | self._in_prompt[seen], after, before)
        scores[seen] = after - counts * extras.frequency_penalty - is_said * extras.presence_penalty

    def add(self, token: torch.Tensor) -> None:
        """token: [1] int64 id that the row goes on with. One of another rank's range changes nothing."""
        place = token - self._own_ids.start
        is_own = (place >= 0) & (place < len(self._own_ids))
        place = place.clamp(0, len(self._own_ids) - 1)
        self._counts.index_add_(0, place, is_own.float())
        if self._length == len(self._seen):
            self._seen = torch.cat((self._seen, self._seen.new_zeros(max(_ROOM, self._length))))
        self._seen[self._length : self._length + 1] = place
        self._length += 1
