"""Attention layers: their caches, scales, rotation and projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.relative import calls_relative_kernel

if TYPE_CHECKING:
    import torch

    from vllm_kvcompress.kernels.common.rotary import Rotary


def attention_layers(vllm_config: Any, layer_names: list[str]) -> list[Any]:
    """vLLM's attention modules, by name."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name] for name in layer_names]


def shared_caches(vllm_config: Any) -> dict[str, str]:
    """Returns, for attention layers without a cache of their own, the layer whose cache they read.

    vLLM's cache groups name only layers that own a cache.
    """
    from vllm.model_executor.layers.attention import Attention

    context = vllm_config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if isinstance(layer, Attention)}
    targets = {name: layer.kv_sharing_target_layer_name for name, layer in layers.items()}
    return {name: target for name, target in targets.items() if target is not None}


def latent_size(layer: Any) -> int | None:
    """Returns the elements of an MLA layer's latent vectors; None for other layers."""
    return getattr(layer, "kv_lora_rank", None)


_KIMI_METHODS = "forward_prefill_fused", "decode_concat_cache"


def calls_prefill_kernels(layer: Any) -> bool:
    """Whether an MLA layer calls kernels for prompts by itself, as Kimi's do on NVIDIA's GPUs."""
    return all(hasattr(type(layer), f"_{name}") for name in _KIMI_METHODS)


def write_by_backend(layer: Any) -> None:
    """Has an MLA layer that calls kernels by itself leave its cache and prompts to its backend.

    Replaces two methods, on this layer alone: its own take blocks to be whole, which may be divided
    here, and know nothing of compressed requests. `layer` is one for which `calls_prefill_kernels`
    holds, without rotation.
    """
    import torch

    def write(kv_c: Any, k_pe: Any, slots: Any) -> None:
        of_cache = layer.kv_cache_dtype, layer._k_scale
        layer.impl.do_kv_cache_update(kv_c, k_pe, layer.kv_cache, slots, *of_cache)

    def prefill(
        q: Any, kv_c: Any, k_pe: Any, _: Any, __: Any, slots: Any, metadata: Any, out: Any
    ) -> None:
        write(kv_c, k_pe, slots)
        layer.impl.forward_mha(q, kv_c, k_pe, layer.kv_cache, metadata, layer._k_scale, out)

    def decode(latent: Any, rest: Any, kv_c: Any, k_pe: Any, _: Any, __: Any, slots: Any) -> Any:
        write(kv_c, k_pe, slots)
        return torch.cat((latent, rest), dim=-1)

    layer._forward_prefill_fused, layer._decode_concat_cache = prefill, decode


def up_project(layer: Any, latent: torch.Tensor, output: torch.Tensor) -> None:
    """Projects [T, heads, rank] sums of latent vectors to [T, heads * v_head_dim] outputs."""
    layer._v_up_proj(latent, out=output)


def of_cached_values(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Returns [heads, head_size, M] projections of cached values, given those of heads' values.

    They are the same except in MLA layers, whose [heads, v_head_dim, M] follow the projection of
    the latent vector to a head's value, and which leave out the row's rotated key.
    """
    import torch

    if latent_size(layer) is None:
        return weight
    projected = torch.bmm(layer.W_UV, weight.to(layer.W_UV.dtype))
    return torch.nn.functional.pad(projected, (0, 0, 0, layer.head_size - projected.shape[1]))


def cache_scales(layers: list[Any]) -> list[tuple[float, float]]:
    """Returns the key and value scales of layers with an fp8 cache, once weights are loaded.

    Raises:
        UnsupportedError: a layer has a scale per head.
    """
    for layer in layers:
        if layer._k_scale.numel() != 1:
            raise UnsupportedError(
                f"expected one fp8 scale per layer, found {layer._k_scale.numel()} at "
                f"{layer.layer_name}; use --kv-cache-dtype auto."
            )
    return [(layer._k_scale_float, layer._v_scale_float) for layer in layers]


def int4_rotates_back(layer: Any) -> Any:
    """Returns the [D, D] fp32 matrix that undoes the rotation of keys and values in int4.

    A rotation of signs, by vLLM's own operator; rounded, since it computes in bfloat16 on GPUs.
    """
    import torch
    from vllm.utils.math_utils import largest_power_of_2_divisor
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    size = layer.head_size
    signs = single_rht(torch.eye(size, device=layer._k_scale.device), inverse=True).round()
    return signs / largest_power_of_2_divisor(size)


def view_scales(layers: list[Any], cache_of_one_head: Any) -> None:
    """Has layers look for scales per token in the caches that they have now.

    vLLM does so at a layer's first step, and sets all scales of the cache to 1, which would change
    tokens that an event in another layer has written there before.
    """
    per_head = [layer.impl._per_head for layer in layers]
    for impl in (*(layer.impl for layer in layers), *per_head):
        forget_scales(impl)
    per_head[0]._ensure_scale_caches(cache_of_one_head)
    for layer, impl in zip(layers, per_head, strict=True):
        layer.impl._ensure_scale_caches(layer.kv_cache)
        impl._k_scale_cache = per_head[0]._k_scale_cache
        impl._v_scale_cache = per_head[0]._v_scale_cache


def forget_scales(impl: Any) -> None:
    """Has attention look for scales per token anew in the next cache that it is given."""
    impl._k_scale_cache = impl._v_scale_cache = None


# Rotary embeddings with one axis, whose frequencies do not depend on the length.
_PLAIN_ROTARY = (
    *("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding"),
    *("NTKScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding"),
    "DeepseekScalingRotaryEmbedding",
)


def rotary_embedding(model: Any, layer: Any) -> Rotary:
    """Returns the rotation of an attention layer's keys, or of its latent rows.

    Raises:
        UnsupportedError: the module has no rotary embedding, or one whose frequencies depend on
            the length or that has several axes.
    """
    import torch

    from vllm_kvcompress.kernels.common.rotary import Rotary

    layer_name = layer.layer_name
    parent_name = layer_name.rpartition(".")[0]
    rotary: Any = getattr(model.get_submodule(parent_name), "rotary_emb", None)
    if type(rotary).__name__ not in _PLAIN_ROTARY:
        raise UnsupportedError(
            f"keys or queries as before RoPE need a rotary embedding beside {layer_name} whose "
            f"frequencies do not depend on the length, found {type(rotary).__name__}; choose "
            "another policy, or add --kv-param merge_space=rotated (policies that merge) or "
            "keys=rotated (leverage and spans)."
        )
    cos, sin = rotary._compute_cos_sin_cache()[1].float().chunk(2)
    device = next(model.parameters()).device
    frequencies = torch.atan2(sin, cos).to(device)
    return Rotary(frequencies, halves=rotary.is_neox_style, first=latent_size(layer) or 0)


def key_bias(model: Any, layer: Any) -> torch.Tensor | None:
    """Returns the [H, D] bias of an attention layer's keys, on this rank; None: there is none.

    Of keys that are normalised behind their projection none is known.
    """
    attention, impl = model.get_submodule(layer.layer_name.rpartition(".")[0]), layer.impl
    bias = getattr(getattr(attention, "qkv_proj", None), "bias", None)
    if bias is None or hasattr(attention, "k_norm"):
        return None
    first = impl.num_heads * impl.head_size
    keys: torch.Tensor = bias[first : first + impl.num_kv_heads * impl.head_size]
    return keys.detach().view(impl.num_kv_heads, impl.head_size)


def output_projection(model: Any, layer_name: str, in_features: int) -> torch.Tensor:
    """Returns [hidden, in_features] o_proj weight of an attention layer, on this rank, no adapters.

    On GPUs an unquantized weight is returned itself, without a copy. Elsewhere kernels may have
    packed or quantised it, so the layer projects the identity, which gives its columns exactly.

    Raises:
        UnsupportedError: the attention module has no o_proj beside it.
    """
    import torch

    parent_name = layer_name.rpartition(".")[0]
    try:
        parent = model.get_submodule(parent_name)
        layer: Any = getattr(parent, layer_name.rpartition(".")[2], None)
        if calls_relative_kernel(layer):
            projection = layer.wo_ud
        else:
            projection = layer.o_proj if calls_prefill_kernels(layer) else parent.o_proj
    except AttributeError:
        raise UnsupportedError(
            f"criticalkv needs the output projection beside {layer_name}, expected at "
            f"{parent_name}.o_proj and found none in this model; use the policy without "
            "+criticalkv."
        ) from None
    projection = getattr(projection, "base_layer", projection)  # LoRA forwards public names
    dtype = projection.params_dtype
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    weight = getattr(projection, "weight", None)
    is_plain = type(projection.quant_method) is UnquantizedLinearMethod  # [out, in], as it is
    if weight is not None and weight.is_cuda and is_plain:
        return weight
    identity = torch.eye(in_features, dtype=dtype, device=next(model.parameters()).device)
    return projection.quant_method.apply(projection, identity, bias=None).t().contiguous()
