"""Puts our attention backends where vLLM looks for backends."""

from __future__ import annotations

import pkgutil

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.config import has_latents, looks_back, takes_alibi_roots
from vllm_kvcompress.vllm_plugin.compat.relative import leave_to_backend, relative_layers
from vllm_kvcompress.vllm_plugin.startup.quantized import is_quantized

_PACKAGE = "vllm_kvcompress.vllm_plugin.worker_side.attention"
_CPU = f"{_PACKAGE}.cpu.CompressedCPUBackend"
_CPU_LATENT = f"{_PACKAGE}.latent_cpu.CompressedCPULatentBackend"
_GPU = {
    "flash": f"{_PACKAGE}.gpu_flash.CompressedFlashBackend",
    "triton": f"{_PACKAGE}.gpu_triton.CompressedTritonBackend",
    "triton-mla": f"{_PACKAGE}.latent_gpu.CompressedTritonLatentBackend",
}
_RELATIVE = f"{_PACKAGE}.gpu_relative:CompressedRelativeBackend"
_NAMED_TRITON = f"{_PACKAGE}.gpu_triton.NamedTritonBackend"


def use_cpu_backend() -> None:
    """In this worker process, the CPU platform's attention is ours from now on; repeatable.

    The CPU platform always takes the backend registered as CPU_ATTN, or as CPU_MLA, whatever
    --attention-backend says, so the class paths of these members are overridden.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, _CPU)
    register_backend(AttentionBackendEnum.CPU_MLA, _CPU_LATENT)


def use_gpu_backend(vllm_config: VllmConfig, kernels: str) -> None:
    """In this worker process, CUSTOM is our backend with these kernels of vLLM's; repeatable.

    Raises:
        UnsupportedError: another kind of GPU; or the configuration names another backend, or none.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise UnsupportedError(
            f"compression on GPUs was made for CUDA, and this is {current_platform.device_type}; "
            "serve without --kv-policy."
        )
    config = vllm_config.attention_config
    chosen = set(config.backend_per_kind.values()) | {config.backend}
    if chosen != {AttentionBackendEnum.CUSTOM}:
        named = ", ".join(sorted("none" if each is None else each.name for each in chosen))
        raise UnsupportedError(
            f"compression on GPUs is an attention backend of its own, CUSTOM, and vLLM was told "
            f"to take {named}; add --attention-backend CUSTOM, or start with `vllm-kvcompress "
            "serve`."
        )
    looking_back = looks_back(vllm_config.model_config)
    register_backend(AttentionBackendEnum.CUSTOM, _NAMED_TRITON if looking_back else _GPU[kernels])


def use_relative_backend(vllm_config: VllmConfig) -> None:
    """Gives our backend to Inkling's full-attention layers, which ask vLLM for none; repeatable.

    To be called when layers exist, and before vLLM asks for their cache specs.
    """
    for layer in relative_layers(vllm_config):
        backend = pkgutil.resolve_name(_RELATIVE)
        sizes = layer.num_heads, layer.head_dim, layer.scaling, layer.num_kv_heads
        leave_to_backend(layer, backend, backend.impl_class(*sizes))


def backend_paths() -> dict[str, str]:
    """By kernels, the attention backends that serving may take on vLLM's platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"cpu": _CPU}
    return {name: path for name, path in _GPU.items() if name != "flash" or _has_flash()}


def kernels_for(vllm_config: VllmConfig, wanted: str) -> str:
    """The kernels that vLLM would take for this model, of those that take our pages.

    Unless flash or triton is wanted: FlashAttention where it can be, else Triton, which takes every
    model. Of those for MLA it is Triton's.
    """
    if has_latents(vllm_config.model_config):
        return "triton-mla"
    if wanted in _GPU:
        return wanted
    # FlashAttention takes queries in fp8 alone, or no such cache; few of its versions take tokens
    # that see later ones, and none chunks with a look-back, or takes roots of distances.
    model = vllm_config.model_config
    takes_triton = model.is_mm_prefix_lm or looks_back(model) or takes_alibi_roots(model)
    if is_quantized(vllm_config) or takes_triton:
        return "triton"
    return "flash" if _takes_flash(vllm_config) else "triton"


def _takes_flash(vllm_config: VllmConfig) -> bool:
    """Whether FlashAttention is there, and takes the model's heads and type on this GPU."""
    if not _has_flash():
        return False
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    model = vllm_config.model_config
    return not FlashAttentionBackend.validate_configuration(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
        block_size=None,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=current_platform.get_device_capability(),
        attn_type="decoder",
    )


def _has_flash() -> bool:
    """Whether vLLM was built with FlashAttention."""
    try:
        from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend  # noqa: F401
    except ImportError:
        return False
    available: bool = is_flash_attn_varlen_func_available()
    return available
