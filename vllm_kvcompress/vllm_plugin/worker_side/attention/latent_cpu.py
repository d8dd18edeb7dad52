"""vLLM's MLA on CPUs, with compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla import cpu_mla

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.vllm_plugin.worker_side.attention.latent import (
    CompressedLatentBackend,
    CompressedLatentBuilder,
    CompressedLatentImpl,
)


class CompressedCPULatentImpl(CompressedLatentImpl, cpu_mla.CPUMLAImpl):
    """vLLM's CPU MLA over pages."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,  # of vLLM 0.33, for quantized caches
    ) -> None:
        """Writes latent rows to a block-major cache, which vLLM's method cannot view as rows."""
        if not kv_cache.numel():
            return
        kv_cache = self.parts_of(kv_cache)
        slots, size = slot_mapping.flatten().long(), kv_cache.shape[1]
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1).to(kv_cache.dtype)
        is_token = slots >= 0  # the others are padding
        slots, rows = slots[is_token], rows[: len(slots)][is_token]
        kv_cache[slots // size, slots % size] = rows


class CompressedCPULatentBuilder(CompressedLatentBuilder):
    """Builds metadata for kernels that read whole prompts only, and contiguous tables."""

    reads_contexts = False

    def layer_fields(self, batch: ResidentBatch, query_start_loc: Tensor) -> list[dict[str, Any]]:
        """Returns fields of vLLM's decode metadata by layer, with tables copied side by side."""
        return [
            {"block_table": pages.contiguous(), "seq_lens": lengths}
            for pages, lengths in batch.layers
        ]


class CompressedCPULatentBackend(CompressedLatentBackend, cpu_mla.CPUMLABackend):
    """vLLM's reference backend for CPUs."""

    impl_class, builder_class = CompressedCPULatentImpl, CompressedCPULatentBuilder
