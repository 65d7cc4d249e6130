"""Log probabilities of tokens, and how they travel: as columns of packed numbers, checked when they come in."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST_LOGPROB = -9999.0  # what smaller ones are given as, since JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's natural log probability in the model's own distribution, before temperature and everything else.

    top: the most likely tokens' ids with theirs, the likeliest first, of equals the lowest id.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


def pack_logprobs(entries: Sequence[TokenLogprobs]) -> list[bytes]:
    """Entries with equally many top tokens, as little-endian int32 and fp32 columns."""
    tops = [pair for entry in entries for pair in entry.top]
    return [
        pack("i", [entry.token_id for entry in entries]),
        pack("f", [entry.logprob for entry in entries]),
        pack("i", [token_id for token_id, _ in tops]),
        pack("f", [logprob for _, logprob in tops]),
    ]


def unpack_logprobs(columns: Any) -> list[TokenLogprobs]:
    """Raises ValueError or TypeError for what `pack_logprobs` does not make."""
    if not isinstance(columns, list) or len(columns) != 4:
        raise ValueError("log probabilities must come as four columns")
    token_ids, logprobs, top_ids, top = (unpack(kind, column) for kind, column in zip("ifif", columns, strict=True))
    count = len(token_ids)
    if len(logprobs) != count or len(top_ids) != len(top) or (len(top) % count if count else len(top)):
        raise ValueError(f"columns of {count}, {len(logprobs)}, {len(top_ids)} and {len(top)} do not fit together")
    width = len(top) // count if count else 0
    pairs = list(zip(top_ids, top, strict=True))
    return [
        TokenLogprobs(token_id, logprob, pairs[at * width : (at + 1) * width])
        for at, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    ]


def pack(kind: str, numbers: Sequence[float]) -> bytes:
    """Numbers as little-endian `i` int32 or `f` fp32."""
    packed = array.array(kind, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(kind: str, data: Any) -> list[Any]:
    """Raises TypeError for what are no bytes, and ValueError for bytes that are no whole numbers."""
    if not isinstance(data, bytes):
        raise TypeError(f"expected bytes, got {type(data).__name__}")
    packed = array.array(kind)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
