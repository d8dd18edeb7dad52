"""vLLM's Triton attention, with compression."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends import triton_attn

from vllm_kvcompress.vllm_plugin.attention.base import CompressedBuilder, CompressedImpl
from vllm_kvcompress.vllm_plugin.attention.gpu import CompressedGPUBackend


class CompressedTritonImpl(CompressedImpl, triton_attn.TritonAttentionImpl):
    """Runs wherever Triton does, at any head size and in fp32 too."""

    per_head_class = triton_attn.TritonAttentionImpl


class CompressedTritonBuilder(CompressedBuilder, triton_attn.TritonAttentionMetadataBuilder):
    """Has, beside vLLM's, room for the splits of sequences of one KV head."""

    _splits: dict[str, Any] | None = None

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """Few sequences are split among more programs, by the same rule as vLLM's."""
        if self._splits is None:
            most, segments = (
                triton_attn.MIN_LAUNCH_GRID_SIZE_2D,
                triton_attn.NUM_PAR_SOFTMAX_SEGMENTS,
            )
            shape = (most, queries_per_kv, segments)
            padded = 1 << (head_size - 1).bit_length()
            options = {"dtype": torch.float32, "device": self.device}
            self._splits = {
                "seq_threshold_3D": most,
                "num_par_softmax_segments": segments,
                "softmax_segm_output": torch.empty((*shape, padded), **options),
                "softmax_segm_max": torch.empty(shape, **options),
                "softmax_segm_expsum": torch.empty(shape, **options),
            }
        return self._splits


class CompressedTritonBackend(CompressedGPUBackend, triton_attn.TritonAttentionBackend):
    """Triton attention over a block-major cache, of which heads may own pages."""

    impl_class, builder_class = CompressedTritonImpl, CompressedTritonBuilder
