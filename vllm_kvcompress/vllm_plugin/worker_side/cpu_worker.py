"""The worker of vLLM's CPU build, with compression."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.kernels.common.tiles import keep_freed_memory
from vllm_kvcompress.vllm_plugin.compat.worker import allow_amx
from vllm_kvcompress.vllm_plugin.startup.registration import use_cpu_backend
from vllm_kvcompress.vllm_plugin.worker_side.worker import CompressionWorker
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression


class CompressionCPUWorker(CompressionWorker, CPUWorker):
    """vLLM's CPU worker, with compressed attention when the settings ask for it."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        allow_amx()
        keep_freed_memory()

    def use_compressed_backend(self, compression: WorkerCompression) -> None:
        """Has vLLM choose our attention backend in the place of its only one."""
        use_cpu_backend()

    def compile_or_warm_up_model(self) -> Any:
        """Compiles what vLLM does, and the kernels that choose pages."""
        if self.compression is not None:
            self.compression.warm_up_readers()
        return super().compile_or_warm_up_model()
