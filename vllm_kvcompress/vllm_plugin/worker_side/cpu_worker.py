"""The worker of the CPU build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvcompress.vllm_plugin.startup import compat
from vllm_kvcompress.vllm_plugin.startup.registration import use_cpu_backend
from vllm_kvcompress.vllm_plugin.worker_side.worker import CompressionWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvcompress.config import Settings


class CompressionCPUWorker(CompressionWorker, CPUWorker):
    """vLLM's CPU worker, with compressed attention when the settings ask for it."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        compat.allow_amx()

    def take_our_attention(self, vllm_config: VllmConfig, settings: Settings) -> None:
        """As `CompressionWorker.take_our_attention`."""
        use_cpu_backend()

    def compile_or_warm_up_model(self):
        """vLLM's, and what is compiled for choosing pages."""
        if self.compression is not None:
            self.compression.warm_up_readers()
        return super().compile_or_warm_up_model()
