"""Accounting of the paged KV cache: reference counts, free blocks, the prefix cache, forks."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from ingot.runtime.scheduling.request import Request


class BlockManager:
    """Hands out cache blocks.

    A block that holds a full run of tokens is known by its hash: of its tokens, of the inputs that they stand
    for, the hash of the block before and the request's cache key. A freed block keeps its content until it is
    reused, oldest first, so that later requests (or the same one after a preemption) find it.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def may_reuse(self, request: Request) -> bool:
        """Whether a request looks for its prefix at all."""
        return self.prefix_reuse and not (request.all_logits or request.all_hidden)

    def reuse_prefix(self, request: Request) -> int:
        """Give a request that holds nothing the blocks of its known prefix; returns the tokens gained.

        The last token is never taken from the cache, nor is that of a probe: their logits are wanted.
        """
        assert not request.blocks
        if not self.may_reuse(request):
            return 0
        wanted = request.num_tokens - 1 if request.probe is None else request.probe.place
        for index in range(wanted // self.block_size):
            block = self._by_hash.get(self._block_hash(request, index))
            if block is None:
                break
            self._take(block)
            request.blocks.append(block)
        request.num_computed = len(request.blocks) * self.block_size
        return request.num_computed

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the request's blocks hold ``num_tokens``; False, without a change: too few are free."""
        wanted = self.blocks_for(num_tokens) - len(request.blocks)
        if wanted > len(self._free):
            return False
        for _ in range(wanted):
            block = next(iter(self._free))
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._by_hash[digest]
            self._take(block)
            request.blocks.append(block)
        return True

    def release(self, request: Request) -> None:
        """Take all blocks back; the request starts over if it is scheduled again."""
        for block in reversed(request.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
        request.blocks.clear()
        request.num_computed = request.num_published = 0

    def publish(self, request: Request) -> None:
        """Make the request's full, computed blocks findable, as far as their tokens are known."""
        if not self.prefix_reuse:
            return
        full = min(request.num_computed, request.num_known) // self.block_size
        for index in range(request.num_published, full):
            block = request.blocks[index]
            if block in self._hash_of:
                continue
            digest = self._block_hash(request, index)
            if digest not in self._by_hash:
                self._by_hash[digest] = block
                self._hash_of[block] = digest
        request.num_published = full

    def fork(self, parent: Request, child: Request) -> tuple[int, int] | None:
        """Let ``child`` continue from what ``parent`` has computed.

        Full blocks are shared. A last block that is not full gets a copy: the pair (from, to) that the runner
        must copy is returned. When no block is free for it, the child starts before that block.
        """
        full = parent.num_computed // self.block_size
        for block in parent.blocks[:full]:
            self._take(block)
        child.blocks = parent.blocks[:full]
        child.num_computed = full * self.block_size
        child.block_hashes = parent.block_hashes[:full]
        if parent.num_computed % self.block_size == 0 or not self.grow(child, parent.num_computed):
            return None
        child.num_computed = parent.num_computed
        return parent.blocks[full], child.blocks[full]

    def _take(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _block_hash(self, request: Request, index: int) -> bytes:
        """Hash of full block ``index``, chained to the blocks before; kept on the request."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            digest = hashlib.blake2b(hashes[-1] if hashes else request.cache_key, digest_size=16)
            digest.update(array("q", request.tokens(start, start + self.block_size)).tobytes())
            for given in request.inputs:
                if given.tokens and given.is_read_by(start, start + self.block_size):
                    digest.update(given.digest + given.place.to_bytes(8, "little"))
            hashes.append(digest.digest())
        return hashes[index]
