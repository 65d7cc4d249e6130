"""Fixed-size KV blocks with reference counts.

A block that is released may still be read or written by steps in flight, so it passes through a queue of pending
releases and becomes free only when the last step that touches it has ended.
"""

from __future__ import annotations

from collections import deque


class OutOfBlocks(RuntimeError):
    """More blocks were taken than are free; callers check `num_free` first."""


class BlockPool:
    """The blocks of the KV cache. Block ids run from 0 to num_blocks - 1; each holds block_size tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: blocks used last are used again first, so a light load touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._pending: deque[tuple[int, list[int]]] = deque()  # (last step that touches them, blocks)
        self._num_pending = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pending(self) -> int:
        """Blocks that become free once steps in flight have ended."""
        return self._num_pending

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks. Raises OutOfBlocks when there are fewer."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] += 1
        return taken

    def release(self, blocks: list[int], last_step: int, last_ended: int) -> None:
        """Drops one reference of each block; unreferenced ones become free once `last_step` has ended."""
        unused = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            if self._references[block] == 0:
                unused.append(block)
        if last_step <= last_ended:
            self._free.extend(unused)
        elif unused:
            self._pending.append((last_step, unused))
            self._num_pending += len(unused)

    def step_ended(self, step: int) -> None:
        """Frees the blocks that waited for `step` or an earlier one."""
        for _ in range(len(self._pending)):
            last_step, blocks = self._pending.popleft()
            if last_step <= step:
                self._free.extend(blocks)
                self._num_pending -= len(blocks)
            else:
                self._pending.append((last_step, blocks))

    def check(self) -> None:
        """Raises RuntimeError unless every block is exactly one of free, pending and referenced."""
        idle = self._free + [block for _, blocks in self._pending for block in blocks]
        used = [block for block, count in enumerate(self._references) if count > 0]
        if sorted(idle + used) != list(range(self.num_blocks)):
            raise RuntimeError(f"{len(idle)} idle and {len(used)} used blocks do not partition {self.num_blocks}")
