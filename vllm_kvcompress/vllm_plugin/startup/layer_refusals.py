"""Refuses models whose layers do not work with compression, once the layers are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config import ModelConfig

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.vllm_plugin.compat.config import has_latents
from vllm_kvcompress.vllm_plugin.compat.layers import calls_prefill_kernels, latent_size
from vllm_kvcompress.vllm_plugin.compat.relative import calls_relative_kernel
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec
from vllm_kvcompress.vllm_plugin.startup.quantized import PLAIN_TYPES


def caps_logits(model: ModelConfig) -> bool:
    """Whether a model's configuration says that its attention caps logits."""
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def num_sharing_layers(model: ModelConfig) -> int:
    """Returns how many layers read other layers' caches, by a model's configuration."""
    return int(getattr(model.hf_text_config, "num_kv_shared_layers", 0))


def reasons_of_caps(
    name: str, own_kernels: bool, pipelines: Mapping[str, Pipeline]
) -> Iterator[str]:
    """Yields a refusal for everything that does not work where a model or layer caps logits."""
    if own_kernels:
        yield (
            f"{name} caps its attention logits, which this package's kernels do not; remove "
            "--kv-attention own, or use vLLM's with --kv-attention triton."
        )
    for pipeline in pipelines.values():
        if pipeline.needs.plain_logits:
            yield (
                f"{name} caps its attention logits, which {pipeline.name} does not take into "
                "account; use another policy, such as adakv."
            )


def check_page_sizes(specs: list[CompressedAttentionSpec]) -> None:
    """Refuses a cache group whose compressed layers, of these specs, have unequal pages.

    Raises:
        UnsupportedError: says how many heads of which size the layers have.
    """
    if len(specs) > 1:
        kinds = ", ".join(f"{spec.num_kv_heads} of {spec.head_size}" for spec in specs)
        raise UnsupportedError(
            f"this model's full-attention layers differ in their heads ({kinds} elements), but any "
            "head must be able to own any page of a block; serve this model without --kv-policy."
        )


def check_classes(layers: Mapping[str, Any]) -> None:
    """Refuses layers that call attention kernels by themselves, but Kimi Linear's and Inkling's.

    Args:
        layers: compressed layers by name.

    Raises:
        UnsupportedError: names the layer.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    for name, layer in layers.items():
        if calls_prefill_kernels(layer):
            _check_own_prefill(name, layer)
        elif not (isinstance(layer, (Attention, MLAAttention)) or calls_relative_kernel(layer)):
            raise UnsupportedError(
                f"{name}: expected vLLM's Attention or MLAAttention, found "
                f"{type(layer).__name__}, which calls attention kernels by itself; serve this "
                "model without --kv-policy."
            )


def _check_own_prefill(name: str, layer: Any) -> None:
    """Refuses what was not tried with MLA layers that call kernels for prompts by themselves."""
    for option, value in (("q_lora_rank", layer.q_lora_rank), ("rotary_emb", layer.rotary_emb)):
        if value is not None:
            raise UnsupportedError(
                f"{name} calls kernels for prompts by itself: expected Kimi Linear's layer, found "
                f"one with {option}, as Kimi K3's, which was not tried; serve this model without "
                "--kv-policy."
            )


def check_latents(layers: list[Any], model: ModelConfig) -> None:
    """Refuses MLA layers of a model whose configuration vLLM does not take for one with MLA.

    `latent_refusals.py` would not have seen them, and vLLM sets no block size for them.

    Raises:
        UnsupportedError: names the layer.
    """
    for layer in [] if has_latents(model) else layers:
        if latent_size(layer) is not None:
            raise UnsupportedError(
                f"{layer.layer_name} is an MLA layer, which vLLM does not expect by the "
                f"configuration of {model.architecture}; serve this model without --kv-policy."
            )


def check_groups(
    groups: list[list[str]], pipelines: Mapping[str, Pipeline], shared: Mapping[str, str]
) -> None:
    """Refuses models whose caches cannot be compressed as vLLM keeps them.

    Args:
        groups: layers of each compressed cache group.
        pipelines: the policies.
        shared: names of layers that read other layers' caches, and of those, where the model's
            configuration does not say that there are any.

    Raises:
        UnsupportedError: no layer can be compressed; a policy would have to move blocks between
            cache groups; or layers share a cache.
    """
    if not groups:
        raise UnsupportedError(
            "this model has no layer in which every token attends to all tokens before it and to "
            "no later one, so there is no cache to compress; serve it without --kv-policy."
        )
    dependent = [pipeline.name for pipeline in pipelines.values() if pipeline.layer_dependent]
    if len(groups) > 1 and dependent:
        raise UnsupportedError(
            f"{dependent[0]} divides its budget among layers, but vLLM keeps this model's "
            f"full-attention layers in {len(groups)} cache groups that cannot share blocks; use a "
            "policy with the same budget in all layers, such as adakv."
        )
    for name, owner in shared.items():
        if any(owner in layers for layers in groups):
            raise UnsupportedError(
                f"{name} reads the cache of {owner}, and a cache that layers share is not "
                "compressed; serve this model without --kv-policy."
            )


def check_layer(
    layer: Any, settings: Settings, own_kernels: bool, pipelines: Mapping[str, Pipeline]
) -> None:
    """Refuses attention that cannot be computed per head, or not by the kernels in use.

    Raises:
        UnsupportedError: says which feature is in the way, and which choice is left.
    """
    impl, name = layer.impl, layer.layer_name
    by_position = all(pipeline.attends_by_position for pipeline in pipelines.values())
    if impl.alibi_slopes is not None and not by_position:
        raise UnsupportedError(
            f"{name} uses ALiBi: expected a model that is known to, found "
            f"{type(layer).__name__} of another; serve this model without --kv-policy."
        )
    has_sinks = impl.sinks is not None
    for reason in _reasons_of_sinks(layer, settings, pipelines) if has_sinks else ():
        raise UnsupportedError(reason)
    caps = (name, own_kernels or has_sinks, pipelines)
    for reason in reasons_of_caps(*caps) if impl.logits_soft_cap else ():
        raise UnsupportedError(reason)


def _reasons_of_sinks(
    layer: Any, settings: Settings, pipelines: Mapping[str, Pipeline]
) -> Iterator[str]:
    """Yields a refusal for everything that does not work where a layer has attention sinks."""
    name = f"{layer.layer_name} has attention sinks"
    for option, value in (("--kv-read", settings.read), ("--kv-draft", settings.draft)):
        if value is not None:
            yield (
                f"{name}, which only this package's kernels take by head, while {option} uses "
                f"vLLM's; remove {option}."
            )
    if layer.kv_cache_dtype not in PLAIN_TYPES:
        yield (
            f"{name}, which only this package's kernels take by head, and those do not read a "
            f"cache in {layer.kv_cache_dtype}; use --kv-cache-dtype auto."
        )
    for pipeline in pipelines.values():
        if pipeline.needs.plain_logits:
            yield (
                f"{name}, which {pipeline.name} does not take into account; use another policy, "
                "such as adakv."
            )
