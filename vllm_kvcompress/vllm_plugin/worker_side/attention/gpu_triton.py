"""vLLM's Triton attention, with compression."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backends import triton_attn

from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBuilder, CompressedImpl
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu import FP32_BYTES, CompressedGPUBackend


class CompressedTritonImpl(CompressedImpl, triton_attn.TritonAttentionImpl):
    """Triton attention, at any head size and type, per head for compressed requests."""

    per_head_class = triton_attn.TritonAttentionImpl

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Writes new tokens to the cache."""
        key, cache = self.stored(layer, key, kv_cache)
        super().do_kv_cache_update(layer, key, value, cache, *args, **kwargs)


class CompressedTritonBuilder(CompressedBuilder, triton_attn.TritonAttentionMetadataBuilder):
    """Builds Triton attention's metadata, with buffers for splits of single heads."""

    _splits: dict[str, Any] | None = None

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """Gives sequences of one head their buffers for splits, sized by vLLM's rule."""
        if self._splits is None:
            *shape, padded = _split_shape(queries_per_kv, head_size)
            options = {"dtype": torch.float32, "device": self.device}
            self._splits = {
                "seq_threshold_3D": shape[0],
                "num_par_softmax_segments": shape[2],
                "softmax_segm_output": torch.empty((*shape, padded), **options),
                "softmax_segm_max": torch.empty(shape, **options),
                "softmax_segm_expsum": torch.empty(shape, **options),
            }
        return self._splits


def _split_shape(queries_per_kv: int, head_size: int) -> tuple[int, int, int, int]:
    """Returns sequences, query heads, splits, and the head size padded to a power of two."""
    max_sequences = triton_attn.MIN_LAUNCH_GRID_SIZE_2D
    segments = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    return max_sequences, queries_per_kv, segments, 1 << (head_size - 1).bit_length()


class CompressedTritonBackend(CompressedGPUBackend, triton_attn.TritonAttentionBackend):
    """Triton attention over a block-major cache whose pages any head may own."""

    impl_class, builder_class = CompressedTritonImpl, CompressedTritonBuilder

    @classmethod
    def scratch_bytes(cls, vllm_config: VllmConfig) -> int:
        """Returns bytes of the outputs, maxima and sums of one cache group's splits."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        queries_per_kv = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
        *shape, padded = _split_shape(queries_per_kv, model.get_head_size())
        return FP32_BYTES * math.prod(shape) * (padded + 2)


class NamedTritonBackend(CompressedTritonBackend):
    """The same by the name that vLLM asks for in layers that see their chunk and the one before."""

    @staticmethod
    def get_name() -> str:
        """Returns the name of vLLM's own backend."""
        return "TRITON_ATTN"
