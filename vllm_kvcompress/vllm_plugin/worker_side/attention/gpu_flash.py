"""vLLM's FlashAttention, with compression.

Version 3 divides long sequences among programs, which is what makes heads of unequal length as
fast as equal ones. It does so for batches of up to 992 sequences: in larger ones a step waits for
its longest head. Compressed requests then take this package's own kernels instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends import flash_attn

from vllm_kvcompress.vllm_plugin.startup import compat
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBuilder, CompressedImpl
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu import FP32_BYTES, CompressedGPUBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MOST_SEQUENCES = 992
MOST_SPLITS = 32  # of one sequence


class CompressedFlashImpl(CompressedImpl, flash_attn.FlashAttentionImpl):
    """What vLLM takes by default on most NVIDIA GPUs."""

    per_head_class = flash_attn.FlashAttentionImpl


class CompressedFlashBuilder(CompressedBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """vLLM's, whose schedules made ahead are for layers of equally long heads."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        impl = compat.attention_layers(self.vllm_config, self.layer_names)[0].impl
        self._splits = impl.vllm_flash_attn_version == 3
        if self._splits and not impl.logits_soft_cap:  # this package's kernels cap nothing
            CompressedGPUBackend.compression.most_sequences = MOST_SEQUENCES

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """No schedule made ahead, since lengths differ by layer; and a bound for splits.

        Each split holds an output in fp32 for every row, used or not. What that takes together
        stays what `scratch_bytes` says.
        """
        splits = max(1, min(MOST_SPLITS, MOST_SPLITS * MOST_SEQUENCES // num_rows))
        return {"scheduler_metadata": None, "max_num_splits": splits if self._splits else 0}


class CompressedFlashBackend(CompressedGPUBackend, flash_attn.FlashAttentionBackend):
    """FlashAttention over a block-major cache, of which heads may own pages."""

    impl_class, builder_class = CompressedFlashImpl, CompressedFlashBuilder

    @classmethod
    def scratch_bytes(cls, vllm_config: VllmConfig) -> int:
        """Outputs and log-sum-exps of the splits of version 3."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if flash_attn.get_flash_attn_version(head_size=model.get_head_size()) != 3:
            return 0
        queries_per_kv = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
        row = FP32_BYTES * queries_per_kv * (model.get_head_size() + 1)
        return MOST_SPLITS * MOST_SEQUENCES * row
