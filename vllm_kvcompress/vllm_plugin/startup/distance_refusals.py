"""Refuses what does not work where attention depends on distances: with ALiBi, and in Inkling."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.policies import Pipeline, resolve_settings
from vllm_kvcompress.policies.adakv import Ada
from vllm_kvcompress.policies.headkv import MeasuredHeads
from vllm_kvcompress.policies.parts.allocation import Allocator
from vllm_kvcompress.policies.rkv import RKV
from vllm_kvcompress.vllm_plugin.compat.config import (
    takes_alibi_roots,
    takes_cpu_kernels,
    uses_alibi,
)
from vllm_kvcompress.vllm_plugin.compat.relative import relative_extent
from vllm_kvcompress.vllm_plugin.startup.quantized import is_quantized


def reasons_against_distances(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work with a model's biases by distance."""
    if uses_alibi(config.model_config):
        yield from _reasons_against_alibi(config, settings)
    if relative_extent(config.model_config):
        yield from _reasons_against_relative(config, settings)


def _reasons_against_alibi(config: VllmConfig, settings: Settings) -> Iterator[str]:
    model = config.model_config
    name = f"{model.architecture} uses ALiBi"
    if takes_alibi_roots(model) and takes_cpu_kernels(config):
        yield f"{name} with roots, which vLLM's attention for CPUs does not compute; use a GPU."
    others = {
        "--kv-reuse-contexts": settings.reuse_contexts,
        f"--kv-attention {settings.attention}": settings.attention in ("own", "flash"),
    }
    yield from _reasons_of_options(name, config, settings, others)
    for pipeline in resolve_settings(settings).values():
        if not _scores_by_distance(pipeline):
            yield (
                f"{name}, and {pipeline.name} leaves its biases by distance out, or reads how keys "
                "are rotated; use a policy such as adakv, snapkv or h2o."
            )


def _reasons_against_relative(config: VllmConfig, settings: Settings) -> Iterator[str]:
    model = config.model_config
    extent, name = relative_extent(model), f"{model.architecture} has attention biases by distance"
    if takes_cpu_kernels(config):
        yield f"{name}, which vLLM computes on NVIDIA's GPUs alone; use one."
    others = {
        "--kv-protect": bool(settings.protect),
        "--kv-keep-prompt": settings.keep_prompt is not None,
        "--kv-after-reasoning": settings.after_reasoning is not None,
        "--speculative-config": config.speculative_config is not None,
        f"--kv-attention {settings.attention}": settings.attention != "auto",
    }
    yield from _reasons_of_options(name, config, settings, others)
    for pipeline in resolve_settings(settings).values():
        if not _keeps_near(pipeline):
            yield (
                f"{name} below {extent}, so that every head keeps the last {extent - 1} tokens, "
                f"which {pipeline.name} does not, or not as they are; use a policy such as adakv, "
                "snapkv or h2o."
            )


def _reasons_of_options(
    name: str, config: VllmConfig, settings: Settings, others: dict[str, bool]
) -> Iterator[str]:
    """Yields a refusal for every option that is given and leaves biases by distance out.

    Args:
        name: what the model has.
        config, settings: the engine's.
        others: options beside those that no such model takes, and whether each is given.
    """
    options = {"--kv-read": settings.read is not None, "--kv-draft": settings.draft is not None}
    for option, is_given in {**options, **others}.items():
        if is_given:
            yield f"{name}, which {option} leaves out, or was not tried with; remove {option}."
    if is_quantized(config):
        yield (
            f"{name}, which was not tried with a cache in {config.cache_config.cache_dtype}; use "
            "--kv-cache-dtype auto."
        )


def _scores_by_distance(pipeline: Pipeline) -> bool:
    """Whether a policy scores the attention that ALiBi leaves, or no attention at all."""
    needs = pipeline.needs
    rotates = needs.rotary or needs.positions
    without = pipeline.merger is not None or needs.plain_logits or isinstance(pipeline.scorer, RKV)
    return not (rotates or without or isinstance(pipeline.allocator, MeasuredHeads))


def _keeps_near(pipeline: Pipeline) -> bool:
    """Whether a policy can give every head the last tokens, as they are and in their order."""
    division = type(pipeline.allocator).head_pages
    divides = division in (Allocator.head_pages, Ada.head_pages) and not pipeline.layer_dependent
    return divides and pipeline.merger is None and pipeline.keeps_spans_whole
