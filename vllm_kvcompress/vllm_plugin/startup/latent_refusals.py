"""Refuses what does not work with MLA, whose cache holds one latent row per token and layer."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.policies import Pipeline, resolve_settings
from vllm_kvcompress.vllm_plugin.compat.config import (
    CPU_MLA_BLOCK,
    has_indexer,
    has_latents,
    needs_cpu_mla_block,
    takes_amx_mla,
)
from vllm_kvcompress.vllm_plugin.startup.quantized import PLAIN_TYPES


def reasons_against_latents(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work where a model has MLA layers."""
    if not has_latents(config.model_config):
        return
    yield from _reasons_of_engine(config, settings)
    for pipeline in resolve_settings(settings).values():
        reason = _reason_of_policy(pipeline)
        if reason is not None:
            yield f"{pipeline.name} {reason}; use another policy, such as spans or snapkv."


def _reasons_of_engine(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything of the engine that does not work."""
    if has_indexer(config.model_config):
        yield (
            f"{config.model_config.architecture} reads the tokens that its indexer chooses by a "
            "key of every token in a cache of its own, so it would choose evicted ones; it reads "
            "few as it is, so serve it without --kv-policy."
        )
    name = f"{config.model_config.architecture} has MLA layers"
    if config.device_config.device_type != "cpu":
        yield from _reasons_of_gpus(config, settings, name)
    if takes_amx_mla(config):
        yield (
            f"{name}, and this CPU has AMX, whose MLA kernels this package does not extend; add "
            "--attention-backend CPU_MLA."
        )
    if needs_cpu_mla_block(config):
        yield (
            f"{name}, and vLLM's kernel for CPUs reads blocks of {CPU_MLA_BLOCK} tokens, which "
            f"vLLM does not set for this model; add --block-size {CPU_MLA_BLOCK}."
        )
    if str(config.cache_config.cache_dtype) not in PLAIN_TYPES:
        yield (
            f"{name}, whose rows are compressed in the model's type alone, and not in "
            f"{config.cache_config.cache_dtype}; use --kv-cache-dtype auto."
        )
    if settings.draft is not None:
        yield (
            f"{name}, and --kv-draft drafts with the keys of heads, which latent rows are not; "
            "remove --kv-draft."
        )
    if settings.read is not None:
        yield (
            f"{name}, and --kv-read chooses pages by the keys of heads, which latent rows are not; "
            "remove --kv-read."
        )


def _reasons_of_gpus(config: VllmConfig, settings: Settings, name: str) -> Iterator[str]:
    """Yields a refusal for everything of a GPU's engine that does not work."""
    if settings.attention in ("own", "flash"):
        kernels = {"own": "This package's kernels", "flash": "FlashAttention's kernels"}
        yield (
            f"{name}. {kernels[settings.attention]} do not read latent rows; remove --kv-attention "
            f"{settings.attention}."
        )


def _reason_of_policy(pipeline: Pipeline) -> str | None:
    """Says why a policy does not work with latent rows; None: it does."""
    if pipeline.merger is not None:
        return (
            "merges keys and values in different ways, and the latent row of an MLA layer is both"
        )
    if pipeline.needs.rotary:
        return (
            "predicts later queries from how heads rotate them, and absorbed queries of MLA layers "
            "are rotated in their last elements only"
        )
    if pipeline.needs.values:
        return (
            "weighs values of heads as they are cached, and those of MLA layers are projected from "
            "latent vectors when they are read"
        )
    return None
