"""Workers of the GPU path on a CPU: vLLM's CPU worker, whose attention is a GPU's.

The CPU platform takes whatever is registered as CPU_ATTN; `CompressionGPUWorker` registers CUSTOM
and needs a GPU to start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.vllm_plugin.attention import gpu
from vllm_kvcompress.vllm_plugin.resident_state import WorkerState
from vllm_kvcompress.vllm_plugin.worker import CompressionWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvcompress.config import Settings

FLASH = os.environ.get("KVCOMPRESS_TEST_KERNELS") == "flash"
STOCK = {
    False: "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    True: "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
}[FLASH]
OURS = {
    False: "vllm_kvcompress.vllm_plugin.attention.gpu_triton.CompressedTritonBackend",
    True: "vllm_kvcompress.vllm_plugin.attention.gpu_flash.CompressedFlashBackend",
}[FLASH]


class StockWorker(CPUWorker):
    """vLLM alone, on its Triton attention or FlashAttention."""

    def __init__(self, *args, **kwargs) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, STOCK)
        super().__init__(*args, **kwargs)


class RehearsedGPUWorker(CompressionWorker, StockWorker):
    """Ours; without compression it stays stock."""

    def _make_state(self, vllm_config: VllmConfig, settings: Settings) -> WorkerState:
        state = WorkerState(vllm_config, settings, gpu.page_pool)
        gpu.CompressedGPUBackend.state = state
        register_backend(AttentionBackendEnum.CPU_ATTN, OURS)
        return state

    def compile_or_warm_up_model(self):
        """As `CompressionGPUWorker`."""
        times = super().compile_or_warm_up_model()
        if self.state is not None:
            self.state.warm_up()
        return times
