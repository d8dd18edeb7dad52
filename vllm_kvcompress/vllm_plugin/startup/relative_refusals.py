"""Refuses what does not work with Inkling, whose attention has biases by distance."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.policies import Pipeline, resolve_settings
from vllm_kvcompress.policies.adakv import Ada
from vllm_kvcompress.policies.parts.allocation import Allocator
from vllm_kvcompress.vllm_plugin.compat.config import takes_cpu_kernels
from vllm_kvcompress.vllm_plugin.compat.relative import relative_extent
from vllm_kvcompress.vllm_plugin.startup.quantized import is_quantized


def reasons_against_relative(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work with biases by distance."""
    model = config.model_config
    extent = relative_extent(model)
    if not extent:
        return
    name = f"{model.architecture} has attention biases by distance"
    if takes_cpu_kernels(config):
        yield f"{name}, which vLLM computes on NVIDIA's GPUs alone; use one."
    options = {
        "--kv-read": settings.read,
        "--kv-draft": settings.draft,
        "--kv-protect": settings.protect or None,
        "--kv-keep-prompt": settings.keep_prompt,
        "--kv-after-reasoning": settings.after_reasoning,
        "--speculative-config": config.speculative_config,
        f"--kv-attention {settings.attention}": None if settings.attention == "auto" else True,
    }
    for option, value in options.items():
        if value is not None:
            yield f"{name}, which {option} leaves out or was not tried with; remove {option}."
    if is_quantized(config):
        yield (
            f"{name}, whose kernel takes no cache in {config.cache_config.cache_dtype}; use "
            "--kv-cache-dtype auto."
        )
    for pipeline in resolve_settings(settings).values():
        if not _keeps_near(pipeline):
            yield (
                f"{name} below {extent}, so that every head keeps the last {extent - 1} tokens, "
                f"which {pipeline.name} does not, or not as they are; use a policy such as adakv, "
                "snapkv or h2o."
            )


def _keeps_near(pipeline: Pipeline) -> bool:
    """Whether a policy can give every head the last tokens, as they are and in their order."""
    division = type(pipeline.allocator).head_pages
    divides = division in (Allocator.head_pages, Ada.head_pages) and not pipeline.layer_dependent
    return divides and pipeline.merger is None and pipeline.keeps_spans_whole
