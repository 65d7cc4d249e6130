"""Log probabilities of chosen tokens and of the most likely ones, from logits of which each rank holds a range.

Of each rank only its part of the softmax's sum and the keys (workers/keys.py) of a few tokens have to meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parallel.group import TensorParallelGroup
from scheduler.frame import StepExtras
from scheduler.logprobs import LEAST_LOGPROB, TokenLogprobs
from scheduler.plan import StepPlan
from workers.inputs import to_device
from workers.keys import LOWEST, best_keys, best_of_ranks, ids_of, make_keys, turned_ids, values_of
from workers.pieces import PIECE_ELEMENTS, rows_at_once
from workers.state import Rows


@dataclass(frozen=True, slots=True)
class Scores:
    """Of n tokens: [n] ids int64 and log probabilities fp64; [n, k] those of the most likely. On the host."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def entries(self, widths: list[int]) -> list[TokenLogprobs]:
        """widths: how many of the most likely each token is given with. To be called once the device is done."""
        columns = (self.token_ids.tolist(), self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        return [
            TokenLogprobs(token_id, logprob, list(zip(ids[:width], top[:width], strict=True)))
            for width, token_id, logprob, ids, top in zip(widths, *columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt tokens whose predecessors a chunk computes: token_ids from index `first` of their row's tokens on.

    chunk: which of the plan's. hidden: where in the step's tokens the predecessor of the first one lies.
    """

    chunk: int
    first: int
    hidden: int
    token_ids: torch.Tensor
    width: int


@dataclass(slots=True)
class PendingExtras:
    """What a step's result holds besides tokens, not read from the device yet."""

    places: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    sampled: Scores | None = None
    prompts: list[tuple[ScoredChunk, list[Scores]]] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def read(self) -> StepExtras | None:
        """To be called once the device is done."""
        if self.sampled is None and not self.prompts and not self.failures:
            return None
        entries = self.sampled.entries(self.widths) if self.sampled else []
        return StepExtras(
            list(zip(self.places, entries, strict=True)),
            [
                (
                    one.chunk,
                    one.first,
                    [entry for part in parts for entry in part.entries([one.width] * len(part.token_ids))],
                )
                for one, parts in self.prompts
            ],
            self.failures,
        )


class Scorer:
    """own_ids: the range of token ids that this rank's logits are of. All ranks make the same calls."""

    def __init__(self, own_ids: range, vocab_size: int, group: TensorParallelGroup, device: torch.device) -> None:
        self.own_ids, self.vocab_size, self.group = own_ids, vocab_size, group
        self._turned = turned_ids(own_ids.start, own_ids.stop, device)

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> Scores:
        """logits: [n, own ids] fp32; token_ids: [n] int64, on the device. width: most likely tokens to tell of."""
        width = min(width, self.vocab_size)
        size = rows_at_once(len(self.own_ids), logits.device)
        parts = zip(logits.split(size), token_ids.split(size), strict=True)
        ranks = self.group.all_gather(torch.cat([self._found(*part, width) for part in parts]))
        total = ranks[:, :, 0].view(torch.float64).logsumexp(dim=0)
        chosen = ranks[:, :, 1].amax(dim=0)
        top = best_of_ranks(ranks[:, :, 2:])
        logprobs = (values_of(chosen) - total).clamp_(min=LEAST_LOGPROB)
        top_logprobs = (values_of(top) - total.unsqueeze(-1)).clamp_(min=LEAST_LOGPROB)
        return Scores(*map(_on_host, (token_ids, logprobs, ids_of(top), top_logprobs)))

    @property
    def prompt_piece(self) -> int:
        """Tokens of a prompt whose logits are made at once."""
        return max(1, PIECE_ELEMENTS // self.vocab_size)

    def score_prompt(
        self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], chunk: ScoredChunk
    ) -> list[Scores]:
        """hidden: the step's [tokens, hidden]; head: makes logits of some. A few tokens at a time bound the memory."""
        piece, parts = self.prompt_piece, []
        for at in range(0, len(chunk.token_ids), piece):
            token_ids = chunk.token_ids[at : at + piece]
            start = chunk.hidden + at
            parts.append(self.score(head(hidden[start : start + len(token_ids)]), token_ids, chunk.width))
        return parts

    def _found(self, logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> torch.Tensor:
        """[n, 2 + width] int64: what this rank adds to the sum, as fp64 bits, the tokens' keys, and its best ones."""
        total = logits.double().logsumexp(dim=-1, keepdim=True)
        found = [total.view(torch.int64), self._keys(logits, token_ids)]
        if width:
            found.append(best_keys(make_keys(logits, self._turned), width))
        return torch.cat(found, dim=-1)

    def _keys(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, 1] keys of these tokens, the lowest where another rank has them."""
        if not self.own_ids:
            return torch.full((len(logits), 1), LOWEST, dtype=torch.int64, device=logits.device)
        local = (token_ids - self.own_ids.start).unsqueeze(-1)
        is_own = (local >= 0) & (local < len(self.own_ids))
        local = local.clamp(0, len(self.own_ids) - 1)
        return torch.where(is_own, make_keys(logits.gather(-1, local), self._turned[local]), LOWEST)


def scored_chunks(plan: StepPlan, rows: Rows, device: torch.device) -> list[ScoredChunk]:
    """The plan's chunks whose prompt tokens' log probabilities are asked for and not known yet."""
    found, offset = [], 0
    for index, chunk in enumerate(plan.chunks):
        extras = rows.extras[chunk.row]
        if extras is not None and extras.prompt_logprobs is not None:
            first = max(chunk.start + 1, extras.scored)
            stop = min(chunk.start + chunk.length + 1, extras.num_prompt)
            if first < stop:
                token_ids = to_device(rows.tokens[chunk.row][first:stop], device)
                hidden = offset + first - 1 - chunk.start
                found.append(ScoredChunk(index, first, hidden, token_ids, extras.prompt_logprobs))
        offset += chunk.length
    return found


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
