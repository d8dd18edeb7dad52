"""Inkling's attention: biases by distance, added by a kernel that its layers call themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def relative_extent(model: Any) -> int:
    """Returns how many distances have a bias of their own in a model's attention; 0: none."""
    is_inkling = any(name.startswith("Inkling") for name in model.architectures)
    return int(model.hf_text_config.rel_extent) if is_inkling else 0


def calls_relative_kernel(layer: Any) -> bool:
    """Whether a layer attends with biases by distance, of full attention or a sliding window."""
    kind = type(layer)
    return kind.__name__ == "InklingAttention" and ".nvidia." in kind.__module__


def relative_layers(vllm_config: Any) -> list[Any]:
    """Returns the full-attention layers with biases by distance."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if calls_relative_kernel(layer) and not layer.is_local]


def leave_to_backend(layer: Any, backend: Any, impl: Any) -> None:
    """Has a layer with biases by distance take its cache and attention from a backend.

    Replaces methods of this layer alone. It goes on to write its cache by itself.

    Args:
        layer: one of `relative_layers`.
        backend: the attention backend, a class.
        impl: attends, by a method `attend(layer, queries, biases, metadata, output)`.
    """
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.forward_context import get_forward_context

    own_spec = type(layer).get_kv_cache_spec

    def attend(queries: Any, biases: Any, output: Any) -> None:
        metadata = get_forward_context().attn_metadata[layer.prefix]
        impl.attend(layer, queries, biases, metadata, output)

    layer.layer_name, layer.impl = layer.prefix, impl
    layer._attention = eager_break_during_capture(attend)
    layer.get_attn_backend = lambda: backend
    layer.get_kv_cache_spec = lambda config: backend.customize_spec(own_spec(layer, config))


def reads_rows(layer: Any, cache: torch.Tensor) -> bool:
    """Whether a layer takes its cache for rows of a key and its value, in blocks by head.

    `cache` is the layer's, [blocks, heads, tokens, elements].
    """
    keys, values = (part[-1, -1, -1].data_ptr() for part in layer._split_kv_cache())
    last = cache[-1, -1, -1]
    return (keys, values) == (last.data_ptr(), last[layer.head_dim :].data_ptr())


def attend_by_distance(
    layer: Any,
    queries: torch.Tensor,
    biases: torch.Tensor,
    cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
) -> None:
    """Runs vLLM's kernel for a layer.

    Args:
        layer: one of `relative_layers`.
        queries: [T, heads, head_size].
        biases: [T, heads, extent] for each distance below the extent; there is none beyond.
        cache: [blocks, KV heads, tokens, 2 * head_size].
        metadata: vLLM's.
        output: [T, heads, head_size], written to.
    """
    from vllm.models.inkling.nvidia import attention
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    parts = cache.transpose(1, 2).split(layer.head_dim, dim=-1)
    keys, values = (canonicalize_singleton_dim_strides(part) for part in parts)
    num_tokens = metadata.num_actual_tokens
    longest = attention.bucket_max_seqlen_q(metadata.max_query_len)
    num_splits = attention.inkling_fa4_num_splits(
        is_local=False,
        batch_size=len(metadata.seq_lens),
        max_query_len=longest,
        num_heads=queries.shape[1],
        num_kv_heads=cache.shape[1],
        max_kv_len=layer._max_kv_len,
    )
    attention._INKLING_FA4_REL_ATTENTION_KERNEL(
        queries[:num_tokens],
        keys,
        values,
        block_table=metadata.block_table,
        cache_seqlens=metadata.seq_lens,
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=longest,
        softmax_scale=layer.scaling,
        causal=True,
        window_size=layer.window_size,
        rel_extent=layer.rel_extent,
        rel_logits=biases[:num_tokens],
        num_splits=num_splits,
        out=output[:num_tokens],
    )
