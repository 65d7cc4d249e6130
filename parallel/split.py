"""Shard arithmetic: which heads, columns and vocabulary ids each rank holds, for any tensor-parallel size.

Nothing needs to divide anything. Ranges are contiguous, so that each rank reads one slice of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

LANE = 64  # columns are dealt out in lanes of at most this many, to keep matrix shapes friendly


class SplitError(ValueError):
    """A tensor-parallel size that leaves a rank without work."""


def deal(total: int, parts: int) -> list[range]:
    """`total` items in `parts` contiguous ranges whose sizes differ by one at most, larger ones first."""
    size, extra = divmod(total, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + size + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges


def deal_lanes(total: int, parts: int) -> list[range]:
    """Like `deal`, but borders are multiples of a lane, which shrinks where lanes would be too few to be even."""
    lane = LANE
    while lane > 1 and total // lane < 8 * parts:
        lane //= 2
    lanes = deal(-(-total // lane), parts)
    return [range(min(r.start * lane, total), min(r.stop * lane, total)) for r in lanes]


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The query and key/value heads of one rank. Each of its KV heads serves an equal number of its query heads.

    q_heads, kv_heads: contiguous ranges of the model's heads.
    """

    q_heads: range
    kv_heads: range


def shard_heads(num_q_heads: int, num_kv_heads: int, size: int) -> list[HeadShard]:
    """Deals a model's heads to `size` ranks. Raises SplitError when there are more ranks than query heads.

    KV heads go out with the query heads they serve, as evenly as they go (8 over 3 ranks: 3, 3, 2). Where there are
    more ranks than KV heads, KV heads are replicated and their query heads are dealt to the ranks that share them
    (3 KV heads of 3 query heads each over 4 ranks: query heads 2, 1, 3, 3).
    """
    group, rest = divmod(num_q_heads, num_kv_heads)
    if rest:
        raise SplitError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if size > num_q_heads:
        raise SplitError(f"tensor-parallel size {size} is larger than the model's {num_q_heads} query heads")
    if size <= num_kv_heads:
        return [HeadShard(range(kv.start * group, kv.stop * group), kv) for kv in deal(num_kv_heads, size)]
    shards = []
    for kv_head, sharers in enumerate(deal(size, num_kv_heads)):
        first = kv_head * group
        for q in deal(group, len(sharers)):
            shards.append(HeadShard(range(first + q.start, first + q.stop), range(kv_head, kv_head + 1)))
    return shards
