"""The block pool: counting, deferred release, and its own consistency check."""

from __future__ import annotations

import pytest

from scheduler.blocks import BlockPool, OutOfBlocks


def test_blocks_are_taken_once_and_come_back() -> None:
    pool = BlockPool(8, 4)
    first, second = pool.take(3), pool.take(5)
    assert sorted(first + second) == list(range(8))
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of 8 free"):
        pool.take(1)
    pool.release(first, last_step=-1, last_ended=-1)
    assert sorted(pool.take(3)) == sorted(first)


def test_blocks_of_a_step_in_flight_come_back_when_it_has_ended() -> None:
    pool = BlockPool(4, 4)
    early, late = pool.take(2), pool.take(2)
    pool.release(early, last_step=5, last_ended=3)
    pool.release(late, last_step=6, last_ended=3)
    assert (pool.num_free, pool.num_pending) == (0, 4)
    pool.step_ended(4)
    assert pool.num_free == 0
    pool.step_ended(5)
    assert (pool.num_free, pool.num_pending) == (2, 2)
    pool.step_ended(6)
    assert (pool.num_free, pool.num_pending) == (4, 0)
    pool.check([])


def test_a_double_release_is_noticed() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.take(1)
    pool.release(blocks, -1, -1)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks, -1, -1)


def test_used_blocks_are_used_again_first() -> None:
    pool = BlockPool(1000, 4)
    for _ in range(50):
        blocks = pool.take(10)
        assert max(blocks) < 10
        pool.release(blocks, -1, -1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_sizes_are_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_blocks} and {block_size}"):
        BlockPool(num_blocks, block_size)


def keep(pool: BlockPool, key: bytes) -> int:
    """A free block with contents that the cache knows as `key`."""
    (block,) = pool.take(1)
    pool.publish(block, key)
    pool.release([block], -1, -1)
    return block


def test_cached_blocks_are_evicted_last_and_the_oldest_first() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.take(2)
    for block, key in zip(blocks, (b"a", b"b"), strict=True):
        pool.publish(block, key)
    pool.release(blocks[:1], -1, -1)
    pool.release(blocks[1:], -1, -1)
    pool.take(2)
    assert pool.lookup([b"a"]) == blocks[:1]
    assert pool.take(1) == blocks[:1]
    assert pool.lookup([b"a"]) == []
    assert pool.lookup([b"b"]) == blocks[1:]


def test_shared_blocks_are_not_evicted_and_count_their_holders() -> None:
    pool = BlockPool(2, 4)
    block = keep(pool, b"a")
    assert pool.num_unused([block]) == 1
    pool.share([block])
    pool.share([block])
    assert (pool.num_free, pool.num_unused([block])) == (1, 0)
    pool.take(1)
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    pool.release([block], -1, -1)
    assert pool.num_free == 0
    pool.release([block], -1, -1)
    assert pool.num_free == 1


def test_a_block_that_steps_in_flight_still_read_may_be_shared_and_released_again() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.release([block], last_step=3, last_ended=1)
    pool.share([block])
    pool.step_ended(3)
    assert pool.num_free == 1
    pool.release([block], last_step=4, last_ended=3)
    pool.step_ended(3)
    assert pool.num_free == 1
    pool.step_ended(4)
    assert pool.num_free == 2
    pool.check([])


def test_a_shared_block_waits_for_the_last_step_of_all_its_holders() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.share([block])
    pool.release([block], last_step=6, last_ended=4)
    pool.release([block], last_step=5, last_ended=4)
    pool.step_ended(5)
    assert (pool.num_free, pool.num_pending) == (1, 1)
    pool.step_ended(6)
    assert (pool.num_free, pool.num_pending) == (2, 0)


def test_a_prefix_ends_at_the_first_block_that_is_not_cached() -> None:
    pool = BlockPool(4, 4)
    first, third = keep(pool, b"1"), keep(pool, b"3")
    assert first != third
    assert pool.lookup([b"1", b"2", b"3"]) == [first]
