"""Compressed contexts that outlive their request, so that later ones need not read them again.

A context that was compressed before the question about it was known says the same to every
question. Its blocks stay readable when nobody uses them: they go to the end of vLLM's free queue,
as cached prefixes do, and the context is forgotten once one of them is handed out.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvcompress.errors import InvariantError

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(frozen=True, eq=False)
class CompressedContext:
    """What is left of a context.

    Attributes:
        key: its tokens, policy and rule.
        num_blocks: logical blocks that it covers.
        blocks: the blocks that hold what was kept.
    """

    key: Hashable
    num_blocks: int
    blocks: tuple[KVCacheBlock, ...]


class ContextStore:
    """The contexts of one cache group.

    Args:
        block_pool: vLLM's.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self._pool = block_pool
        self._by_key: dict[Hashable, CompressedContext] = {}
        self._by_block: dict[int, CompressedContext] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: Hashable) -> CompressedContext | None:
        """The context of a key, if it is still there."""
        return self._by_key.get(key)

    def knows(self, block: KVCacheBlock) -> bool:
        """Whether a block is part of a context that a request may begin with."""
        return block.block_id in self._by_block

    def keep(self, key: Hashable, num_blocks: int, blocks: list[KVCacheBlock]) -> CompressedContext:
        """Makes a context known, whose blocks a request holds; the former one of the key stays."""
        context = CompressedContext(key, num_blocks, tuple(blocks))
        if key not in self._by_key:
            self._by_key[key] = context
            self._by_block |= {block.block_id: context for block in blocks}
        return context

    def acquire(self, context: CompressedContext) -> None:
        """Holds a context's blocks for one more request."""
        self._pool.touch(context.blocks)

    def release(self, context: CompressedContext) -> None:
        """Ends a request's hold; what nobody holds stays readable until it is reused."""
        if self._by_key.get(context.key) is context:
            self._pool.unpin_blocks(context.blocks, self._forget)
        else:  # forgotten meanwhile, or a second one of its key
            self._pool.free_blocks(reversed(context.blocks))

    def check_integrity(self) -> None:
        """Checks that every block of a known context, and no other, stands for that context.

        Raises:
            InvariantError: one does not, or stands for two.
        """
        expected = {
            block.block_id: context for context in self._by_key.values() for block in context.blocks
        }
        num_blocks = sum(len(context.blocks) for context in self._by_key.values())
        if expected != self._by_block or len(expected) != num_blocks:
            raise InvariantError(
                f"blocks of contexts: expected {num_blocks}, {sorted(expected)}, found "
                f"{sorted(self._by_block)}, or of other contexts."
            )

    def _forget(self, block: KVCacheBlock) -> None:
        """vLLM hands a block out, or empties its cache."""
        context = self._by_block.get(block.block_id)
        if context is not None:
            del self._by_key[context.key]
            for own in context.blocks:
                self._by_block.pop(own.block_id, None)
