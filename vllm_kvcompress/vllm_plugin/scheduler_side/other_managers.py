"""Blocks of the layers beside compressed ones: what they compute behind events is never shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.scheduler_side.state_reuse import StateReuse

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request
else:
    SingleTypeKVCacheManager = object


class LimitedCaching(SingleTypeKVCacheManager):
    """Mixed into a block manager of vLLM: caches only blocks that mean the same to all requests.

    Attributes:
        table: records of all requests. The scheduler sets it, since vLLM builds block managers
            itself and hands them a spec and a pool only.
        states: kept states; set like `table`.
    """

    table: RequestTable
    states: StateReuse

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Caches full blocks up to the last one that `RequestCompression.num_shared` allows."""
        record = self.table[request.request_id]
        num_tokens = record.num_shared(num_tokens, self.table.spec.chunks)
        super().cache_blocks(request, num_tokens, *args, **kwargs)


class DependentSlidingWindowManager(LimitedCaching, SlidingWindowManager):
    """Blocks of sliding-window layers in a model that has compressed layers.

    What a window holds of tokens behind a compression event was computed from compressed
    attention. Such blocks never enter the prefix cache: another request with the same tokens may
    be compressed elsewhere, or not at all.
    """


class DependentChunkedLocalManager(LimitedCaching, ChunkedLocalAttentionManager):
    """Blocks of chunked-local attention layers in a model that has compressed layers."""


class DependentMambaManager(LimitedCaching, MambaManager):
    """States of Mamba and linear-attention layers in a model that has compressed layers.

    A state sums up all tokens before it, so those behind an event are one request's alone. The one
    that a request begins with, or that its context leaves to others, is held until the request's
    end: vLLM lets go of it earlier, and its block would be reused before others.
    """

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adds a prefix hit; vLLM copies a block that ends within it before it is written to."""
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        if self.table[request_id].reuse.beginning is not None:
            self._hold(request_id, new_computed_blocks[-1])

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Allocates a block for the state at the end of the step; holds it at a context's end."""
        new_blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        if num_tokens_main_model == self.table[request_id].context_end:
            self._hold(request_id, self.req_to_blocks[request_id][-1])
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Caches states, unless they come from a kept one, which may depend on events."""
        if self.table[request.request_id].reuse.state is None:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Takes all blocks of a request; those of kept states stay readable."""
        blocks = super().pop_blocks_for_free(request_id)
        held = self.table.recurrent.pop((request_id, self.kv_cache_group_id), None)
        return self.states.kept.release(blocks if held is None else [*blocks, held])

    def _hold(self, request_id: str, block: KVCacheBlock) -> None:
        self.block_pool.touch([block])
        key = request_id, self.kv_cache_group_id
        former = self.table.recurrent.get(key)
        self.table.recurrent[key] = block
        if former is not None:  # of a state that ended within the context
            self.block_pool.free_blocks(self.states.kept.release([former]))


class DraftBlockManager(LimitedCaching, FullAttentionManager):
    """Blocks of draft layers beside a model that has compressed layers; events free none of them.

    They are cached as far as the model's are, since a prefix hit needs both.
    """
