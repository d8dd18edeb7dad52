"""vLLM's CPU attention, with compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.page_order import Packing, find_packing
from vllm_kvcompress.cache.pages import PackedPagePool, PagePool, flat_pages
from vllm_kvcompress.cache.quantization import FP8_TYPES, random_codes
from vllm_kvcompress.vllm_plugin.startup.quantized import key_dtype, quantization_of
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import (
    CompressedBackend,
    CompressedBuilder,
    CompressedImpl,
)


class CompressedCPUImpl(CompressedImpl, cpu_attn.CPUAttentionBackendImpl):
    """vLLM's CPU attention, per head for compressed requests."""

    per_head_class = cpu_attn.CPUAttentionBackendImpl

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Writes new tokens to the cache."""
        key, cache = self.stored(layer, key, kv_cache)
        super().do_kv_cache_update(layer, key, value, cache, *args, **kwargs)


class CompressedCPUBuilder(CompressedBuilder, cpu_attn.CPUAttentionMetadataBuilder):
    """Builds metadata with the schedules that vLLM's CPU kernels need."""

    def build_all(self, common: CommonAttentionMetadata) -> Any:
        """Builds metadata without a schedule, since no kernel runs over all requests."""
        return cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )

    def layer_fields(self, batch: ResidentBatch, query_start_loc: Tensor) -> list[dict[str, Any]]:
        """Adds a schedule for each layer, or one for all if lengths are the same."""
        by_layer = super().layer_fields(batch, query_start_loc)
        num_schedules = 1 if batch.same_in_all_layers else len(by_layer)
        schedules = [
            self._schedule(fields["seq_lens"], query_start_loc)
            for fields in by_layer[:num_schedules]
        ]
        for index, fields in enumerate(by_layer):
            fields["scheduler_metadata"] = schedules[index % num_schedules]
        return by_layer

    def _schedule(self, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
        """Makes the schedule of sequences with one KV head."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seq_lens.numel(),
            num_heads=self.num_heads // self.num_kv_heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=seq_lens,
            dtype=self.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class CompressedCPUBackend(CompressedBackend, cpu_attn.CPUAttentionBackend):
    """The CPU build's only backend."""

    impl_class, builder_class = CompressedCPUImpl, CompressedCPUBuilder

    @classmethod
    def page_pool(cls, layers: list[Any], caches: list[Tensor], spec: AttentionSpec) -> PagePool:
        """Lays pages over the caches, in the order that a probe finds inside them."""
        config = cls.compression.vllm_config
        flat = flat_pages(caches)
        return PackedPagePool(
            pages=flat.pages,
            pages_per_block=flat.per_block,
            layer_offsets=torch.tensor(flat.layer_offsets),
            num_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            head_size=spec.head_size,
            packings=probe_packings(layers[0], spec, key_dtype(spec, config)),
            quantization=quantization_of(layers, config),
        )


def probe_packings(layer: Any, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Packing, Packing]:
    """Finds how this kernel orders keys and values inside a page, by writing a probe.

    The probe goes through vLLM's own cache-write op into a page of its own, with a different
    bit pattern in every element; in fp8, where there are too few, with patterns drawn at random.

    Raises:
        UnsupportedError: the kernel uses an order that is not known.
    """
    size, head_size, cache_dtype = spec.block_size, spec.head_size, layer.kv_cache_dtype
    if spec.dtype == torch.uint8:
        expected = random_codes(size, head_size)
        rows = expected.view(FP8_TYPES[cache_dtype]).float()
    else:
        integer = {2: torch.int16, 4: torch.int32}[spec.dtype.itemsize]
        expected = torch.arange(1, size * head_size + 1).to(integer).view(size, head_size)
        rows = expected.view(spec.dtype)
    page = torch.zeros(1, 1, 2 * size, head_size, dtype=spec.dtype)
    keys, values = page.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        rows[:, None].to(dtype),
        rows[:, None].to(dtype),
        keys,
        values,
        torch.arange(size),
        layer.isa,
        kv_cache_dtype=cache_dtype,
    )
    packed = page.view(2, size * head_size).view(expected.dtype)
    return find_packing(packed[0], expected, "keys"), find_packing(packed[1], expected, "values")
