"""Refuses what does not work with ALiBi, whose attention depends on distances between tokens."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.policies import Pipeline, resolve_settings
from vllm_kvcompress.policies.headkv import MeasuredHeads
from vllm_kvcompress.policies.rkv import RKV
from vllm_kvcompress.vllm_plugin.compat.config import (
    takes_alibi_roots,
    takes_cpu_kernels,
    uses_alibi,
)
from vllm_kvcompress.vllm_plugin.startup.quantized import is_quantized


def reasons_against_alibi(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work where a model uses ALiBi."""
    model = config.model_config
    if not uses_alibi(model):
        return
    name = f"{model.architecture} uses ALiBi"
    if takes_alibi_roots(model) and takes_cpu_kernels(config):
        yield f"{name} with roots, which vLLM's attention for CPUs does not compute; use a GPU."
    options = {
        "--kv-read": settings.read,
        "--kv-draft": settings.draft,
        "--kv-reuse-contexts": settings.reuse_contexts or None,
        f"--kv-attention {settings.attention}": settings.attention in ("own", "flash") or None,
    }
    for option, value in options.items():
        if value is not None:
            yield f"{name}, whose biases by distance {option} leaves out; remove {option}."
    if is_quantized(config):
        yield (
            f"{name}, whose biases by distance were not tried with a cache in "
            f"{config.cache_config.cache_dtype}; use --kv-cache-dtype auto."
        )
    for pipeline in resolve_settings(settings).values():
        if not _scores_by_distance(pipeline):
            yield (
                f"{name}, and {pipeline.name} leaves its biases by distance out, or reads how keys "
                "are rotated; use a policy such as adakv, snapkv or h2o."
            )


def _scores_by_distance(pipeline: Pipeline) -> bool:
    """Whether a policy scores the attention that ALiBi leaves, or no attention at all."""
    needs = pipeline.needs
    rotates = needs.rotary or needs.positions
    without = pipeline.merger is not None or needs.plain_logits or isinstance(pipeline.scorer, RKV)
    return not (rotates or without or isinstance(pipeline.allocator, MeasuredHeads))
