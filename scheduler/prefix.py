"""Which blocks of a request's prefix are cached, and which of its own may be.

A block's key is chained: it stands for the tokens in the block and all tokens before it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from scheduler.blocks import BlockPool
from scheduler.request import Request


class PrefixCache:
    """Finds and publishes the full blocks of requests in a block pool."""

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self.pool = pool
        self.enabled = enabled

    def find(self, request: Request) -> list[int]:
        """The cached blocks that the request can start from; its last token is always computed.

        So are the prompt tokens whose successors' log probabilities are asked for and not known yet.
        """
        if not self.enabled:
            return []
        known = len(request.tokens) if request.is_scored else len(request.prompt_logprobs)
        return self.pool.lookup(self._keys(request, (known - 1) // self.pool.block_size))

    def publish(self, request: Request, computed: int) -> None:
        """Offers the request's full blocks to the cache; its first `computed` tokens have been computed."""
        if not self.enabled:
            return
        full = computed // self.pool.block_size
        keys = self._keys(request, full)
        for index in range(request.published, full):
            self.pool.publish(request.blocks[index], keys[index])
        request.published = max(request.published, full)

    def withdraw(self, request: Request) -> None:
        """Takes back what the request has published: its contents are not to be trusted."""
        self.pool.withdraw(request.blocks[: request.published])

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """The chained keys of the request's first `count` blocks, all of whose tokens are known."""
        keys, size = request.block_keys, self.pool.block_size
        while len(keys) < count:
            parent = keys[-1] if keys else root_key(request.params.cache_salt)
            keys.append(chain_key(parent, request.tokens[len(keys) * size : (len(keys) + 1) * size]))
        return keys[:count]


def root_key(salt: str | None) -> bytes:
    """The key that a request's first block chains from; requests with different salts share nothing."""
    text = "none" if salt is None else f"salt:{salt}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that holds `tokens` after the block with key `parent`.

    A 128-bit BLAKE2b digest, so that nobody can make a prompt that meets another's blocks.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()
