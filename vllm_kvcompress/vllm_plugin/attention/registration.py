"""Puts our attention backends in the place of vLLM's."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

_CPU = "vllm_kvcompress.vllm_plugin.attention.cpu.CompressedCPUAttentionBackend"


def use_cpu_backend() -> None:
    """In this worker process, the CPU platform's attention is ours from now on; repeatable.

    The CPU platform always takes the backend registered as CPU_ATTN, whatever
    --attention-backend says, so that member's class path is overridden.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, _CPU)
