"""What the driver tells every rank about one step.

A plan is a delta. Workers keep each running request in a numbered row (its tokens, computed count, block table and
sampling parameters), and the set of decoding rows persists from step to step. In steady decode a plan therefore says
only "the same rows again", plus the rows whose context grew into a new block.

The order of a step's tokens is fixed by the plan: prefill chunks in plan order, then decoding rows in the order in
which they joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MASK = 2**32 - 1
_COMPUTED_WEIGHT = 0x9E3779B1  # odd constants, so that no count or block id can vanish modulo 2**32
_BLOCK_WEIGHT = 0x85EBCA6B


class PlanMismatch(RuntimeError):
    """A worker's rows are not what the plan assumes; computing on would give wrong tokens."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What few requests ask of sampling, as in SamplingParams; what is not asked is None, 0 or empty.

    num_prompt: how many of the admission's tokens are the prompt; the others are output.
    bias_ids, biases: as many of each. end_ids: what is kept out until there are min_tokens output tokens.
    prompt_logprobs: how many, for the prompt's tokens from index `scored` on.
    guide: its kind and its text.
    """

    num_prompt: int
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    min_tokens: int = 0
    end_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scored: int = 0
    guide: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A row (re)starts: all tokens known so far, and how they are to be sampled.

    computed: leading tokens whose keys and values are in the row's first blocks already.
    extras: None for nearly all requests.
    """

    row: int
    tokens: list[int]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    computed: int = 0
    extras: Extras | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill of `length` tokens of `row` from position `start`; `sample`: it reaches the last known one."""

    row: int
    start: int
    length: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """One step, as broadcast.

    epoch, step: a worker takes only the step that follows the one it took last in this epoch.
    leave: rows that leave the decoding set; applied first, since an admission may use the row again at once.
    admissions: rows that start or start again.
    new_blocks: (row, block ids) appended to the row's block table.
    chunks: the prefill part.
    join: rows that enter the decoding set.
    num_decodes: size of the decoding set after the deltas; every row in it computes one token.
    checksum: `rows_checksum` over the decoding rows after the deltas, before the step.
    agreed: (step, CRC-32 of its sampled tokens) of the newest result the driver has, for every rank to compare.
    """

    epoch: int
    step: int
    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    join: list[int] = field(default_factory=list)
    num_decodes: int = 0
    checksum: int = 0
    agreed: tuple[int, int] = (-1, 0)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes


def row_weight(row: int, computed: int, block_sum: int) -> int:
    """One row's share of the checksum. Linear in both counts, so a sum over rows can be kept incrementally."""
    return (row + 1) * (computed * _COMPUTED_WEIGHT + block_sum * _BLOCK_WEIGHT)


def rows_checksum(weights: int) -> int:
    """The checksum of a set of rows from the sum of their weights."""
    return weights & _MASK


def block_weight(index: int, block: int) -> int:
    """The share of the block at `index` of a block table in that table's sum."""
    return (index + 1) * (block + 1) & _MASK
