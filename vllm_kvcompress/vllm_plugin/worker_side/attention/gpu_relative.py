"""Inkling's attention, with compression.

Its kernel, FlashAttention 4 with a bias for each distance below an extent, counts distances by the
entries of a sequence. Every head keeps the last tokens up to the extent (`Pipeline.num_near`), so
that entries this near are tokens this near, and what lies behind has no bias.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.cache.pages import PagePool, flat_pages
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.relative import attend_by_distance, reads_rows
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import (
    CompressedBuilder,
    CompressedImpl,
    Subset,
    compressed_of,
)
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu import CompressedGPUBackend
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression

_BIASES = "kvcompress_biases"  # on vLLM's metadata while a layer attends: those of its queries


class RelativeImpl(AttentionImpl[Any]):
    """Attention by vLLM's kernel, with the biases that its metadata holds."""

    alibi_slopes = sinks = logits_soft_cap = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, scale

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Attends to the cache; `key` and `value` are there already."""
        biases = getattr(attn_metadata, _BIASES)
        attend_by_distance(layer, query, biases, kv_cache, attn_metadata, output)
        return output


class CompressedRelativeImpl(CompressedImpl, RelativeImpl):
    """The same, per head for compressed requests."""

    per_head_class = RelativeImpl
    _biases: Tensor | None = None

    def attend(
        self, layer: Any, queries: Tensor, biases: Tensor, metadata: Any, output: Tensor
    ) -> None:
        """Computes a layer's attention, then its part of every event.

        Args:
            layer: the layer.
            queries: [T, heads, head_size].
            biases: [T, heads, extent] by distance.
            metadata: vLLM's.
            output: [T, heads, head_size], written to.
        """
        compressed, self._biases = compressed_of(metadata), biases
        given = [(metadata, biases)]
        if compressed is not None:
            given += [(some.metadata, biases[some.where]) for some in compressed.uncompressed]
        for each, its_biases in given:
            setattr(each, _BIASES, its_biases)
        try:
            self.forward(layer, queries, queries, queries, layer.kv_cache, metadata, output)
        finally:  # they take eight times as much as queries, and metadata lives as long as the step
            self._biases = None
            for each, _ in given:
                delattr(each, _BIASES)

    def attend_per_head(
        self,
        layer: Any,
        subset: Subset,
        index: int,
        group: GroupCompression,
        rows: Tensor,
        out_rows: Tensor,
    ) -> None:
        """Attends for compressed requests, with the biases of their rows by KV head."""
        biases = self._biases
        if biases is None:  # where kernels warm up
            biases = rows.new_zeros(*rows.shape[:2], layer.rel_extent)
        group_size = self.num_heads // self.num_kv_heads
        by_head = biases[: len(rows)].reshape(-1, group_size, biases.shape[-1])
        setattr(subset.metadata, _BIASES, by_head[subset.where])
        super().attend_per_head(layer, subset, index, group, rows, out_rows)
        delattr(subset.metadata, _BIASES)


class CompressedRelativeBuilder(CompressedBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """Builds FlashAttention's metadata for heads whose lengths differ from layer to layer."""

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """Drops the schedule, which the kernel does not read."""
        return {"scheduler_metadata": None}


class CompressedRelativeBackend(CompressedGPUBackend, flash_attn.FlashAttentionBackend):
    """FlashAttention over a block-major cache whose pages any head may own."""

    impl_class, builder_class = CompressedRelativeImpl, CompressedRelativeBuilder

    @classmethod
    def page_pool(cls, layers: list[Any], caches: list[Tensor], spec: AttentionSpec) -> PagePool:
        """Lays pages over the caches, which the layers write by themselves."""
        if not reads_rows(layers[0], caches[0]):
            raise UnsupportedError(
                f"{layers[0].layer_name}: expected a layer that writes rows of a key and its "
                "value, by head, found another order, in which compression would destroy them; "
                "serve this model without --kv-policy."
            )
        return cls.pool_over(layers, spec, flat_pages(caches))
