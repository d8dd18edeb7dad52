"""Reads the scales of fp8 caches from vLLM's layers, and refuses what does not work with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.cache.pages import FP8_TYPES, Quantization
from vllm_kvcompress.config import Settings
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.vllm_plugin.startup import compat

PLAIN_TYPES = ("auto", "bfloat16", "float16")


def is_fp8(vllm_config: VllmConfig) -> bool:
    """Whether the cache is in fp8."""
    return str(vllm_config.cache_config.cache_dtype) in FP8_TYPES


def quantization_of(layers: list[Any], vllm_config: VllmConfig) -> Quantization | None:
    """Returns type and scales of a cache group's fp8 pages; None: pages are not quantized.

    The layers' weights must be loaded.

    Raises:
        UnsupportedError: heads of a layer have scales of their own.
    """
    stored = FP8_TYPES.get(layers[0].kv_cache_dtype)
    if stored is None:
        return None
    return Quantization(stored, vllm_config.model_config.dtype, compat.cache_scales(layers))


def key_dtype(spec: AttentionSpec, vllm_config: VllmConfig) -> torch.dtype:
    """Returns the type in which a layer's keys and values are read."""
    model_dtype: torch.dtype = vllm_config.model_config.dtype
    return spec.dtype if spec.dtype.is_floating_point else model_dtype


def reasons_against(vllm_config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything about the cache's type that does not work."""
    cache, given = vllm_config.cache_config, str(vllm_config.cache_config.cache_dtype)
    option = f"--kv-cache-dtype {given}"
    if given in PLAIN_TYPES:
        return
    if given not in FP8_TYPES:
        yield (
            f"{option}: compression works with fp8 and one scale per layer; other quantized "
            "caches keep scales beside the tokens, or numbers smaller than bytes; use "
            "--kv-cache-dtype fp8 or auto, or serve without --kv-policy."
        )
        return
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if on_cpu and (reason := compat.reason_against_cpu_cache(vllm_config)) is not None:
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
            "own": "this package's kernels do not read fp8 caches",
            "flash": "FlashAttention takes queries in fp8 for such a cache, while policies score "
            "tokens with queries of the model's type",
        }
        yield (
            f"{option} with --kv-attention {settings.attention}: {why[settings.attention]}; "
            "remove --kv-attention, or use --kv-cache-dtype auto."
        )
    for pipeline in resolve_settings(settings).values():
        if pipeline.merger is not None:
            yield (
                f"{option} with {pipeline.name}, which changes kept tokens or attention over them: "
                "tokens of an fp8 cache can only be copied; use another policy, such as adakv, or "
                "--kv-cache-dtype auto."
            )
