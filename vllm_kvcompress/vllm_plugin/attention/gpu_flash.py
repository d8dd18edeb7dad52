"""vLLM's FlashAttention, with compression."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends import flash_attn

from vllm_kvcompress.vllm_plugin.attention.gpu import (
    CompressedGPUBackend,
    CompressedGPUBuilder,
    CompressedGPUImpl,
)


class CompressedFlashImpl(CompressedGPUImpl, flash_attn.FlashAttentionImpl):
    """What vLLM takes by default on most NVIDIA GPUs."""

    per_head_class = flash_attn.FlashAttentionImpl


class CompressedFlashBuilder(CompressedGPUBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """vLLM's, whose schedules made ahead are for layers of equally long heads."""

    def ragged_changes(self, num_sequences: int, group: int, head_size: int) -> dict[str, Any]:
        """No schedule made ahead: lengths differ by layer; splits as the kernel sees fit."""
        return {"scheduler_metadata": None, "max_num_splits": 0}


class CompressedFlashBackend(CompressedGPUBackend, flash_attn.FlashAttentionBackend):
    """FlashAttention over a block-major cache, of which heads may own pages."""

    @staticmethod
    def get_impl_cls() -> type[CompressedFlashImpl]:
        """The attention implementation."""
        return CompressedFlashImpl

    @staticmethod
    def get_builder_cls() -> type[CompressedFlashBuilder]:
        """The metadata builder."""
        return CompressedFlashBuilder
