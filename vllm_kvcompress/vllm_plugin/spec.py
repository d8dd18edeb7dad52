"""The KV-cache spec of layers that are compressed: full attention plus the user's rule."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_kvcompress.config import Settings
from vllm_kvcompress.ledger import CompressionRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec(FullAttentionSpec):
    """Full attention whose requests are compressed by `rule`.

    Attributes:
        settings: the user's settings.
        window_size: queries that the policy observes at an event.
        least_blocks: blocks that an event leaves at least.
    """

    settings: Settings
    window_size: int
    least_blocks: int

    @classmethod
    def from_full_attention(
        cls, spec: FullAttentionSpec, settings: Settings, window_size: int, least_blocks: int
    ) -> Self:
        """The same layer, compressed."""
        fields = {name: getattr(spec, name) for name in type(spec).__dataclass_fields__}
        return cls(**fields, settings=settings, window_size=window_size, least_blocks=least_blocks)

    @cached_property
    def rule(self) -> CompressionRule:
        """When requests are compressed, for this spec's block size."""
        return self.settings.rule(self.block_size, self.window_size, self.least_blocks)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for a group of layers, which must agree in everything."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise AssertionError("all layers of a compressed group must have the same spec")
        return copy.deepcopy(specs[0])

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of this layer's cache for a request of the maximum length.

        Before the pool's size is known vLLM asks whether one such request fits: that is its peak,
        while it is read. Afterwards it asks, for its report, how many requests fit: then it is
        the pool's share of one, of which the others hold only what is left of them.
        """
        max_model_len = vllm_config.model_config.max_model_len
        pool_blocks = vllm_config.cache_config.num_gpu_blocks
        if pool_blocks is None:
            return self.rule.admission_blocks(max_model_len) * self.page_size_bytes
        share = pool_blocks / self.rule.concurrency(max_model_len, pool_blocks)
        return math.ceil(share) * self.page_size_bytes


def is_compressible(spec: AttentionSpec) -> bool:
    """Whether a layer's spec is plain full attention."""
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )
