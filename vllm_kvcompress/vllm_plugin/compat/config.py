"""What vLLM's configuration says of a model, its cache and the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


MIN_WORDS = 36  # of a vocabulary whose tokens show which of them are words
CPU_MLA_BLOCK = 16  # tokens, which vLLM sets by itself where its configuration tells of MLA
NULL_BLOCK = 0  # stands in block tables where a request holds no block; its tokens are not read


def reasoning_end_ids(config: VllmConfig) -> tuple[int, ...]:
    """Returns the tokens that end a model's reasoning, as --reasoning-config names them."""
    reasoning = config.reasoning_config
    if reasoning is None:
        return ()
    natural = getattr(reasoning, "natural_reasoning_end_token_ids", None)  # since 0.32
    return tuple(natural or reasoning.reasoning_end_token_ids or ())


def kv_cache_groups(vllm_config: VllmConfig, specs: dict[str, Any]) -> list[Any]:
    """Returns the cache groups that vLLM makes of layers with these cache specs."""
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    except ImportError:  # since 0.33
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
    register_all_kvcache_specs(vllm_config)  # as an engine does before
    return list(get_kv_cache_groups(vllm_config, specs))


def reason_against_cpu_cache(
    cache_dtype: str, dtype: torch.dtype, block_size: int, head_size: int
) -> str | None:
    """Returns vLLM's words on why this CPU's attention takes no such cache; None: it does."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    known = CPUAttentionBackend.supported_kv_cache_dtypes
    if cache_dtype not in known:
        return f"attention on CPUs has no kernel for it, only for {', '.join(known)}"
    try:
        _get_attn_isa(dtype, block_size, head_size, cache_dtype)
    except NotImplementedError as error:
        return str(error)
    return None


def uses_alibi(model: Any) -> bool:
    """Whether a model uses ALiBi; vLLM's own answer leaves out Step 1."""
    return bool(model.uses_alibi) or takes_alibi_roots(model)


def takes_alibi_roots(model: Any) -> bool:
    """Whether a model's biases grow with square roots of distances, as Step 1's do."""
    return "Step1ForCausalLM" in model.architectures


def looks_back(model: Any) -> bool:
    """Whether layers attend within chunks of tokens and the chunk before, as Rnj 1's do."""
    types = getattr(model.hf_text_config, "layer_types", None) or ()
    return "Rnj1ForCausalLM" in model.architectures and "chunked_attention" in types


def has_latents(model: Any) -> bool:
    """Whether a model has MLA layers; vLLM's own answer leaves out Sarvam's."""
    return bool(model.use_mla) or "SarvamMLAForCausalLM" in model.architectures


def has_indexer(model: Any) -> bool:
    """Whether a model's MLA layers read only the tokens that an indexer of theirs chooses."""
    return hasattr(model.hf_text_config, "index_topk")


def takes_cpu_kernels(config: VllmConfig) -> bool:
    """Whether attention is vLLM's for CPUs.

    There tokens of an image do not see each other, no layer looks back into the chunk before, and
    MLA layers read blocks of 16 tokens only.
    """
    on_cpu: bool = config.device_config.device_type == "cpu"
    return on_cpu


def needs_cpu_mla_block(config: VllmConfig) -> bool:
    """Whether MLA layers of which vLLM's configuration does not tell got blocks of another size."""
    size = config.cache_config.block_size
    return takes_cpu_kernels(config) and not config.model_config.use_mla and size != CPU_MLA_BLOCK


def takes_amx_mla(vllm_config: Any) -> bool:
    """Whether vLLM's MLA on this CPU takes kernels for AMX, as its CPU platform decides."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = vllm_config.attention_config.backend
    is_amx: bool = current_platform.is_cpu() and torch.cpu._is_amx_tile_supported()
    return is_amx and chosen is not AttentionBackendEnum.CPU_MLA


def cache_bytes_per_token(vllm_config: Any) -> int:
    """Returns KV cache bytes per token on all ranks, as if no layer had a sliding window."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    rows = 1 if has_latents(model) else 2  # a latent row, or a key and a value
    numbers = rows * model.get_total_num_kv_heads() * model.get_head_size()
    return int(model.get_total_num_hidden_layers() * numbers * dtype.itemsize)


def vocabulary(model_config: Any) -> tuple[list[int], list[int]]:
    """Returns tokens that are words, and those that prompts begin with.

    Without a tokenizer, or where its tokens do not show words, all ordinary tokens are.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer, size = cached_tokenizer_from_config(model_config), model_config.get_vocab_size()
    if tokenizer is None:
        return list(range(size)), []
    special = {*tokenizer.all_special_ids}
    ids = {
        text: number
        for text, number in tokenizer.get_vocab().items()
        if number not in special and number < size
    }
    words = sorted(
        number
        for text, number in ids.items()
        if (plain := str(text).lstrip("\u2581\u0120 ")).isascii() and plain.isalnum()
    )
    start = getattr(tokenizer, "bos_token_id", None)
    enough = words if len(words) >= MIN_WORDS else sorted(ids.values())
    return enough, [] if start is None else [start]
