"""Describes vLLM's quantized caches to this package, and refuses what does not work with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.cache.quantization import (
    FP8_TYPES,
    INT4,
    TOKEN_SCALED_TYPES,
    LayerScaled,
    Quantization,
    TokenScaled,
    mean_key,
)
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.vllm_plugin.compat.config import reason_against_cpu_cache
from vllm_kvcompress.vllm_plugin.compat.layers import (
    cache_scales,
    int4_rotates_back,
    key_bias,
    rotary_embedding,
)

PLAIN_TYPES = ("auto", "bfloat16", "float16")
KNOWN_TYPES = ("fp8", *TOKEN_SCALED_TYPES)


def is_quantized(vllm_config: VllmConfig) -> bool:
    """Whether the cache is quantized in a way that is compressed."""
    return str(vllm_config.cache_config.cache_dtype) in {**FP8_TYPES, **TOKEN_SCALED_TYPES}


def quantization_of(layers: list[Any], vllm_config: VllmConfig) -> Quantization | None:
    """Returns how a cache group's keys and values are stored; None: in the model's type.

    The layers' weights must be loaded.

    Raises:
        UnsupportedError: heads of a layer have scales of their own.
    """
    name, dtype = layers[0].kv_cache_dtype, vllm_config.model_config.dtype
    if name in FP8_TYPES:
        return LayerScaled(FP8_TYPES[name], dtype, cache_scales(layers))
    if name not in TOKEN_SCALED_TYPES:
        return None
    rotates_back = int4_rotates_back(layers[0]) if name == INT4 else None
    return TokenScaled(TOKEN_SCALED_TYPES[name], dtype, rotates_back)


def set_mean_keys(layers: list[Any], model: Any, vllm_config: VllmConfig) -> None:
    """Has layers whose keys have a bias store them less the mean key.

    Not where connectors may bring keys that others have stored whole, or where logits are capped,
    whose differences then depend on the mean; nor with a rotation that is not known.
    """
    for layer in [] if vllm_config.kv_transfer_config is not None else layers:
        bias = None if layer.impl.logits_soft_cap else key_bias(model, layer)
        if bias is not None:
            with suppress(UnsupportedError):
                layer.impl.mean_key = mean_key(bias, rotary_embedding(model, layer))


def key_dtype(spec: AttentionSpec, vllm_config: VllmConfig) -> torch.dtype:
    """Returns the type in which a layer's keys and values are read."""
    model_dtype: torch.dtype = vllm_config.model_config.dtype
    return spec.dtype if spec.dtype.is_floating_point else model_dtype


def reasons_against(vllm_config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything about the cache's type that does not work."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    given = str(cache.cache_dtype)
    option = f"--kv-cache-dtype {given}"
    if given in PLAIN_TYPES:
        return
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if given not in FP8_TYPES and given not in TOKEN_SCALED_TYPES:
        yield _reason_against_type(given, on_cpu)
        return
    shape = given, model.dtype, cache.block_size, model.get_head_size()
    if on_cpu and (reason := reason_against_cpu_cache(*shape)) is not None:
        yield f"{option}: {reason.rstrip('.')}, says vLLM; use --kv-cache-dtype auto."
    if cache.kv_cache_dtype_skip_layers:
        yield (
            f"{option} with --kv-cache-dtype-skip-layers: pages of layers in another type have "
            "another size, but any head must be able to own any page; remove one of the two."
        )
    if given == "fp8_e5m2" and not on_cpu:
        yield (
            f"{option}: vLLM's Triton attention writes fp8_e4m3 whichever of the two is named; use "
            "--kv-cache-dtype fp8."
        )
    if settings.attention in ("own", "flash"):
        why = {
            "own": "this package's kernels do not read quantized caches",
            "flash": "FlashAttention takes queries in fp8 for a cache in fp8, while policies score "
            "tokens with queries of the model's type, and reads no other quantized cache",
        }
        yield (
            f"{option} with --kv-attention {settings.attention}: {why[settings.attention]}; "
            "remove --kv-attention, or use --kv-cache-dtype auto."
        )
    for pipeline in resolve_settings(settings).values():
        if pipeline.merger is not None:
            yield (
                f"{option} with {pipeline.name}, which changes kept tokens or attention over them: "
                "tokens of a quantized cache can only be copied; use another policy, such as "
                "adakv, or --kv-cache-dtype auto."
            )


def _reason_against_type(given: str, on_cpu: bool) -> str:
    """Says why a type of quantized cache is not compressed, and which are."""
    why = "tokens are found in pages by their place, which is not known for this type"
    if given.startswith(("turboquant", "ultraquant")):
        why = (
            "a slot holds a key and a value that only its own backend reads, which this package "
            "does not extend"
        )
    elif given.startswith("nvfp4"):
        why = "its scales lie in an order of their own, apart from the tokens"
    other = "fp8" if on_cpu else " or ".join(KNOWN_TYPES)
    return (
        f"--kv-cache-dtype {given}: {why}; use --kv-cache-dtype {other} or auto, or serve without "
        "--kv-policy."
    )
