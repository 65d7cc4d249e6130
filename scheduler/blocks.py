"""Fixed-size KV blocks: reference counts, and a prefix cache by chained block hash with LRU eviction.

    taken ──release──► pending ──its last step has ended──► free ──take──► taken
                          └──────────── cached ones may be shared from either ───────────┘

A block that is released may still be read or written by steps in flight, so it is free only when the last step that
touches it has ended. A full block whose contents have been computed may be published under a key that stands for its
tokens and all tokens before them; it then keeps its contents while it is free, until it is needed for something else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable


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
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free blocks with contents worth keeping, oldest first
        self._references = [0] * num_blocks
        self._free_after = [-1] * num_blocks  # the last step that touches a block
        self._pending: deque[tuple[int, int]] = deque()  # (last step that touches it, block), in order of release
        self._waiting_blocks: set[int] = set()  # unreferenced blocks that steps in flight still touch
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_pending(self) -> int:
        """Blocks that become free once steps in flight have ended."""
        return len(self._waiting_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks, evicting the least recently used cached ones last. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free")
        taken = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            self._references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Iterable[int], last_step: int, last_ended: int) -> None:
        """Drops one reference of each block; unreferenced ones become free once `last_step` has ended."""
        for block in reversed(list(blocks)):  # the end of a prefix is evicted before its beginning
            self._references[block] -= 1
            if self._references[block] < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._free_after[block] = max(self._free_after[block], last_step)
            if self._references[block] == 0:
                if self._free_after[block] <= last_ended:
                    self._make_free(block)
                else:
                    self._pending.append((self._free_after[block], block))
                    self._waiting_blocks.add(block)

    def step_ended(self, step: int) -> None:
        """Frees the blocks that waited for `step` or an earlier one."""
        for _ in range(len(self._pending)):
            last_step, block = self._pending.popleft()
            if last_step > step:
                self._pending.append((last_step, block))
            elif block in self._waiting_blocks and self._free_after[block] <= step:
                self._waiting_blocks.remove(block)
                self._make_free(block)

    # ---- the prefix cache

    def publish(self, block: int, key: bytes) -> None:
        """Makes a full, computed block findable; where its contents are cached already, the first one stays."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Makes taken blocks unknown to the cache again."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `keys`; they are not taken yet."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are free, and no longer will be once they are shared."""
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Takes cached blocks, adding one reference each."""
        for block in blocks:
            self._cached.pop(block, None)
            self._waiting_blocks.discard(block)
            self._references[block] += 1

    def _make_free(self, block: int) -> None:
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check(self, held: Iterable[int]) -> None:
        """Raises RuntimeError unless reference counts are those of `held`, every holder's blocks one after another,
        and every other block is exactly one of blank, cached and pending."""
        counts = Counter(held)
        if any(self._references[block] != counts[block] for block in range(self.num_blocks)):
            raise RuntimeError(f"reference counts {self._references} are not those of the holders, {dict(counts)}")
        idle = [*self._blank, *self._cached, *self._waiting_blocks]
        if sorted([*idle, *counts]) != list(range(self.num_blocks)):
            raise RuntimeError(f"{len(idle)} idle and {len(counts)} held blocks do not make {self.num_blocks}")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise RuntimeError("the prefix cache's two maps disagree")
