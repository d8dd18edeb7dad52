"""vLLM's FlashAttention, with compression.

Version 3 divides long sequences among programs, which is what makes heads of unequal length as
fast as equal ones. It does so for batches of up to 992 sequences: in larger ones a step waits for
its longest head. Compressed requests then take this package's own kernels instead.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backends import flash_attn

from vllm_kvcompress.vllm_plugin.compat.layers import attention_layers
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBuilder, CompressedImpl
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu import FP32_BYTES, CompressedGPUBackend

MAX_SPLIT_SEQUENCES = 992
MAX_SPLITS = 32  # per sequence


class CompressedFlashImpl(CompressedImpl, flash_attn.FlashAttentionImpl):
    """FlashAttention, vLLM's default on most NVIDIA GPUs, per head for compressed requests."""

    per_head_class = flash_attn.FlashAttentionImpl

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Writes new tokens to the cache."""
        key, cache = self.stored(layer, key, kv_cache)
        super().do_kv_cache_update(layer, key, value, cache, *args, **kwargs)


class CompressedFlashBuilder(CompressedBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """Builds FlashAttention's metadata for heads whose lengths differ from layer to layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        impl = attention_layers(self.vllm_config, self.layer_names)[0].impl
        self._splits = impl.vllm_flash_attn_version == 3
        if self._splits and not impl.logits_soft_cap:  # this package's kernels cap nothing
            CompressedGPUBackend.compression.max_split_sequences = MAX_SPLIT_SEQUENCES

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """Drops the schedule, which assumes equal lengths in all layers, and limits splits.

        Each split holds an output in fp32 for every row, used or not; the limit keeps their sum
        within `scratch_bytes`.
        """
        splits = max(1, min(MAX_SPLITS, MAX_SPLITS * MAX_SPLIT_SEQUENCES // num_rows))
        return {"scheduler_metadata": None, "max_num_splits": splits if self._splits else 0}


class CompressedFlashBackend(CompressedGPUBackend, flash_attn.FlashAttentionBackend):
    """FlashAttention over a block-major cache whose pages any head may own."""

    impl_class, builder_class = CompressedFlashImpl, CompressedFlashBuilder

    @classmethod
    def scratch_bytes(cls, vllm_config: VllmConfig) -> int:
        """Returns bytes of the outputs and log-sum-exps of version 3's splits."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if flash_attn.get_flash_attn_version(head_size=model.get_head_size()) != 3:
            return 0
        queries_per_kv = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
        row_bytes: int = FP32_BYTES * queries_per_kv * (model.get_head_size() + 1)
        return MAX_SPLITS * MAX_SPLIT_SEQUENCES * row_bytes
