"""Shard arithmetic: every item goes to exactly one rank, as evenly as it goes, for any size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.split import LANE, SplitError, deal, deal_lanes, shard_heads

totals = st.integers(0, 200_000)
parts = st.integers(1, 64)


def _assert_covers(ranges: list[range], total: int, count: int) -> None:
    """`count` contiguous ranges in order, without gap or overlap, from 0 to `total`."""
    assert len(ranges) == count
    assert ranges[0].start == 0
    assert ranges[-1].stop == total
    for left, right in itertools.pairwise(ranges):
        assert left.stop == right.start
    assert all(r.start <= r.stop and r.step == 1 for r in ranges)


@given(totals, parts)
def test_deal_covers_everything_once_and_evenly(total: int, count: int) -> None:
    ranges = deal(total, count)
    _assert_covers(ranges, total, count)
    sizes = [len(r) for r in ranges]
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(totals, parts)
def test_deal_lanes_covers_everything_once(total: int, count: int) -> None:
    ranges = deal_lanes(total, count)
    _assert_covers(ranges, total, count)
    assert sum(map(len, ranges)) == total


@given(totals, parts)
def test_lanes_differ_by_one_beside_the_last_lane_that_may_be_cut(total: int, count: int) -> None:
    """A lane is never wider than an eighth of a rank's share, so that no rank has much more than another."""
    widest_lane = min(LANE, max(1, total // (8 * count)))
    sizes = [len(r) for r in deal_lanes(total, count)]
    assert max(sizes) - min(sizes) < 2 * widest_lane
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) <= widest_lane


@given(st.integers(1, 64), st.integers(8, 40))
def test_wide_layers_are_cut_at_whole_lanes(count: int, lanes_each: int) -> None:
    total = LANE * lanes_each * count + 17
    assert all(r.start % LANE == 0 for r in deal_lanes(total, count))


@given(st.integers(2, 64), st.data())
def test_fewer_items_than_lanes_are_still_dealt_one_by_one(count: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(count, 8 * count))
    assert deal_lanes(total, count) == deal(total, count)


def test_odd_vocabulary_over_two_ranks() -> None:
    assert deal_lanes(301, 2) == [range(0, 160), range(160, 301)]


def test_eight_kv_heads_over_three_ranks() -> None:
    shards = shard_heads(32, 8, 3)
    assert [len(s.kv_heads) for s in shards] == [3, 3, 2]
    assert [len(s.q_heads) for s in shards] == [12, 12, 8]


def test_kv_heads_are_replicated_where_ranks_outnumber_them() -> None:
    shards = shard_heads(9, 3, 4)
    assert [len(s.q_heads) for s in shards] == [2, 1, 3, 3]
    assert [s.kv_heads for s in shards] == [range(0, 1), range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("size", range(1, 10))
def test_nine_query_and_three_kv_heads_over_any_size(size: int) -> None:
    _assert_heads(9, 3, size)


@given(st.integers(1, 16), st.integers(1, 8), st.data())
def test_heads_over_any_size(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_kv_heads * group))
    _assert_heads(num_kv_heads * group, num_kv_heads, size)


def _assert_heads(num_q_heads: int, num_kv_heads: int, size: int) -> None:
    group = num_q_heads // num_kv_heads
    shards = shard_heads(num_q_heads, num_kv_heads, size)
    _assert_covers([s.q_heads for s in shards], num_q_heads, size)
    for shard in shards:
        assert len(shard.q_heads) > 0
        local_group, rest = divmod(len(shard.q_heads), len(shard.kv_heads))
        assert rest == 0
        # A backend reads the rank's KV head i // local_group for its query head i: that must be the model's own pair.
        served_by = [shard.kv_heads[i // local_group] for i in range(len(shard.q_heads))]
        assert served_by == [q // group for q in shard.q_heads]
    kv_loads = [len(s.kv_heads) for s in shards]
    assert max(kv_loads) - min(kv_loads) <= 1


@pytest.mark.parametrize(("q", "kv", "size"), [(9, 3, 10), (1, 1, 2), (32, 8, 64), (4, 4, 5)])
def test_more_ranks_than_query_heads_are_refused_with_both_numbers(q: int, kv: int, size: int) -> None:
    with pytest.raises(SplitError, match=rf"size {size} .*{q} query heads"):
        shard_heads(q, kv, size)


def test_query_heads_that_are_no_multiple_of_kv_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(SplitError, match="10 query heads are not a multiple of 4 key/value heads"):
        shard_heads(10, 4, 2)
