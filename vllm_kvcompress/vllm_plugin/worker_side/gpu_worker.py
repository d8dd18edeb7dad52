"""The worker of CUDA builds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvcompress.vllm_plugin.startup.registration import kernels_for, use_gpu_backend
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu_warm_up import warm_up_heads
from vllm_kvcompress.vllm_plugin.worker_side.memory import reserved_bytes
from vllm_kvcompress.vllm_plugin.worker_side.worker import CompressionWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvcompress.config import Settings

logger = init_logger(f"vllm.plugins.{__name__}")


class CompressionGPUWorker(CompressionWorker, Worker):
    """vLLM's GPU worker, with compressed attention when the settings ask for it.

    Attributes:
        left_bytes: left out of the KV cache for compression.
    """

    left_bytes = 0

    def take_our_attention(self, vllm_config: VllmConfig, settings: Settings) -> None:
        """As `CompressionWorker.take_our_attention`."""
        kernels = kernels_for(vllm_config, settings.attention)
        use_gpu_backend(vllm_config, kernels)
        logger.info("Attention with compression, on vLLM's %s kernels.", kernels)
        reason = self.compression.reason_for_pieces
        if reason is None:
            logger.info("Steps of single tokens take this package's, as whole CUDA graphs.")
        else:
            logger.info("No CUDA graph is of a whole decode step: %s.", reason)

    def leave_attention(self, vllm_config: VllmConfig) -> None:
        """As if the backend CUSTOM, which is nobody's then, had not been asked for."""
        config = vllm_config.attention_config
        if config.backend is AttentionBackendEnum.CUSTOM and not config.backend.is_overridden():
            config.backend = None

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """vLLM's, less what compression needs beside the cache.

        A size that the user has set is left alone. One that vLLM remembers from an earlier start
        (its start-up plan) was written down before anything was taken off.
        """
        chosen = self.cache_config.kv_cache_memory_bytes  # vLLM puts its plan's in the same place
        compression = self.compression
        with nullcontext() if compression is None else compression.profiling(self.model_runner):
            available: int = super().determine_available_memory()
        if self.compression is None or chosen:
            return available
        model, specs = self.model_runner.model, self.get_kv_cache_spec()
        reserved = reserved_bytes(self.compression, model, specs, available)
        reserved += AttentionBackendEnum.CUSTOM.get_class().scratch_bytes(self.vllm_config)
        self.left_bytes = reserved
        logger.info(
            "Of %.2f GiB for the KV cache, %.2f are left for compression events and page tables.",
            available / 2**30,
            reserved / 2**30,
        )
        return available - reserved

    def compile_or_warm_up_model(self):
        """Ours, and vLLM's, at whose end vLLM begins to report what Triton compiles."""
        if self.compression is not None:
            with torch.inference_mode():  # as steps do: what is made in it changes in it alone
                self.compression.warm_up()
                # Otherwise vLLM's kernels never see single heads.
                if not self.compression.takes_own_kernels():
                    warm_up_heads(self.compression, self.model_runner)
        return super().compile_or_warm_up_model()
