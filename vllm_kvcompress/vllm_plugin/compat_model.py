"""Every private name of vLLM's models and their layers that this package relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_kvcompress.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from vllm_kvcompress.kernels.common.rotary import Rotary


def attention_modules(worker: Any) -> list[Any]:
    """The model's attention layers."""
    from vllm.model_executor.layers.attention import Attention

    return [each for each in worker.model_runner.model.modules() if isinstance(each, Attention)]


def attention_layers(vllm_config: Any, layer_names: list[str]) -> list[Any]:
    """vLLM's attention modules, by name."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name] for name in layer_names]


def shared_caches(vllm_config: Any) -> dict[str, str]:
    """Attention layers without a cache of their own, and the layers whose caches they read.

    vLLM's cache groups name only layers that own a cache.
    """
    from vllm.model_executor.layers.attention import Attention

    context = vllm_config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if isinstance(layer, Attention)}
    targets = {name: layer.kv_sharing_target_layer_name for name, layer in layers.items()}
    return {name: target for name, target in targets.items() if target is not None}


# Rotary embeddings whose frequencies are the same whatever the length, and for one axis.
_PLAIN_ROTARY = (
    *("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding"),
    *("NTKScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding"),
)


def rotary_embedding(model: Any, layer_name: str) -> Rotary:
    """How an attention layer's keys are rotated.

    Raises:
        UnsupportedError: there is no rotary embedding beside it, or its frequencies depend on the
            length or on several axes.
    """
    import torch

    from vllm_kvcompress.kernels.common.rotary import Rotary

    parent_name = layer_name.rpartition(".")[0]
    rotary = getattr(model.get_submodule(parent_name), "rotary_emb", None)
    if type(rotary).__name__ not in _PLAIN_ROTARY:
        raise UnsupportedError(
            f"keys or queries as before RoPE need a rotary embedding beside {layer_name} whose "
            f"frequencies do not depend on the length, found {type(rotary).__name__}; choose "
            "another policy, or add --kv-param merge_space=rotated (policies that merge) or "
            "keys=rotated (leverage and spans)."
        )
    cos, sin = rotary._compute_cos_sin_cache()[1].float().chunk(2)
    device = next(model.parameters()).device
    return Rotary(torch.atan2(sin, cos).to(device), halves=rotary.is_neox_style)


def output_projection(model: Any, layer_name: str, in_features: int) -> torch.Tensor:
    """[hidden, in_features] o_proj weight of an attention layer, on this rank; without adapters.

    On GPUs an ordinary weight is what the model multiplies with, and no copy. Elsewhere kernels
    may have packed or quantised it away, so the layer is asked: projecting the identity gives its
    columns, exactly.

    Raises:
        UnsupportedError: the attention module has no o_proj beside it.
    """
    import torch

    parent_name = layer_name.rpartition(".")[0]
    try:
        projection = model.get_submodule(parent_name).o_proj
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
