"""The worker of vLLM's CUDA builds, with compression."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvcompress.vllm_plugin.startup.registration import kernels_for, use_gpu_backend
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu_warm_up import warm_up_heads
from vllm_kvcompress.vllm_plugin.worker_side.memory import reserved_bytes
from vllm_kvcompress.vllm_plugin.worker_side.worker import CompressionWorker
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

logger = init_logger(f"vllm.plugins.{__name__}")


class CompressionGPUWorker(CompressionWorker):
    """vLLM's GPU worker, with compressed attention when the settings ask for it.

    Attributes:
        left_bytes: memory that compression needs, which did not become KV cache.
    """

    left_bytes = 0

    def use_compressed_backend(self, compression: WorkerCompression) -> None:
        """Has vLLM choose our backend for the kernels that --kv-attention asks for."""
        kernels = kernels_for(compression.vllm_config, compression.settings.attention)
        use_gpu_backend(compression.vllm_config, kernels)
        logger.info("Attention with compression, on vLLM's %s kernels.", kernels)
        if compression.reason_for_pieces is None:
            logger.info("Decode steps use this package's kernels, in full CUDA graphs.")
        else:
            logger.info("CUDA graphs are piecewise: %s.", compression.reason_for_pieces)

    def use_stock_backend(self, vllm_config: VllmConfig) -> None:
        """Clears the backend CUSTOM where no backend is registered under this name."""
        config = vllm_config.attention_config
        if config.backend is AttentionBackendEnum.CUSTOM and not config.backend.is_overridden():
            config.backend = None

    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache: vLLM's figure less what compression needs.

        A size that the user has set is left alone. One that vLLM remembers from an earlier start
        (its start-up plan) was written down before anything was taken off.
        """
        chosen = self.cache_config.kv_cache_memory_bytes  # vLLM puts its plan's in the same place
        compression = self.compression
        with nullcontext() if compression is None else compression.profiling(self.model_runner):
            available: int = super().determine_available_memory()
        if self.compression is None or chosen:
            return available
        with torch.inference_mode():
            model, specs = self.model_runner.model, self.get_kv_cache_spec()
            reserved = reserved_bytes(self.compression, model, specs, available)
        backend = AttentionBackendEnum.CUSTOM.get_class()
        reserved += int(backend.scratch_bytes(self.vllm_config))
        self.left_bytes = reserved
        logger.info(
            "Of %.2f GiB for the KV cache, %.2f are reserved for compression events and tables.",
            available / 2**30,
            reserved / 2**30,
        )
        return available - reserved

    def compile_or_warm_up_model(self) -> Any:
        """Compiles our kernels, then vLLM's; after it vLLM reports what Triton compiles."""
        if self.compression is not None:
            with torch.inference_mode():  # as in steps: its tensors may change only in this mode
                self.compression.warm_up()
                # Otherwise vLLM's kernels never see single heads.
                if not self.compression.takes_own_kernels():
                    warm_up_heads(self.compression, self.model_runner)
        return super().compile_or_warm_up_model()
