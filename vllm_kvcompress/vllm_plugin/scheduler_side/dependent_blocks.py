"""Blocks of layers that are not compressed themselves, in a model that has compressed ones.

What a sliding window holds of tokens behind a compression event was computed from compressed
attention. Such blocks never enter the prefix cache, as little as those of compressed layers do:
another request with the same tokens may be compressed elsewhere, or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.vllm_plugin.spec import (
    DependentChunkedLocalSpec,
    DependentSlidingWindowSpec,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable


class LimitedCaching:
    """Mixed into a block manager of vLLM: only blocks that mean the same to all are cached.

    Attributes:
        table: the requests' records. The scheduler sets it, since vLLM builds managers itself and
            hands them a spec and a pool only.
    """

    table: RequestTable

    def cache_blocks(self, request: Request, num_tokens: int, *args, **kwargs) -> None:
        """Caches full blocks, as far as `RequestTable.num_shared` says."""
        num_tokens = self.table.num_shared(request.request_id, num_tokens)
        super().cache_blocks(request, num_tokens, *args, **kwargs)


class DependentSlidingWindowManager(LimitedCaching, SlidingWindowManager):
    """For sliding windows."""


class DependentChunkedLocalManager(LimitedCaching, ChunkedLocalAttentionManager):
    """For attention within chunks."""


KVCacheSpecRegistry.register(
    DependentSlidingWindowSpec,
    DependentSlidingWindowManager,
    uniform_type_base_spec=SlidingWindowSpec,
)
KVCacheSpecRegistry.register(
    DependentChunkedLocalSpec,
    DependentChunkedLocalManager,
    uniform_type_base_spec=ChunkedLocalAttentionSpec,
)
