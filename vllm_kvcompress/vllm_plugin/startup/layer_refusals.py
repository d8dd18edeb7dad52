"""Refuses models whose layers do not work with compression, once the layers are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config import ModelConfig

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.policies import Pipeline


def caps_logits(model: ModelConfig) -> bool:
    """Whether a model's configuration says that its attention caps logits."""
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


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


def check_groups(
    groups: list[list[str]], pipelines: Mapping[str, Pipeline], shared: Mapping[str, str]
) -> None:
    """Refuses models whose caches cannot be compressed as vLLM keeps them.

    Args:
        groups: layers of each compressed cache group.
        pipelines: the policies.
        shared: names of layers that read other layers' caches, and of those.

    Raises:
        UnsupportedError: no layer can be compressed; a policy would have to move blocks between
            cache groups; or layers share a cache.
    """
    if not groups:
        raise UnsupportedError(
            "this model has no full-attention layer whose cache could be compressed; "
            "serve it without --kv-policy."
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


def check_layer(layer: Any, own_kernels: bool, pipelines: Mapping[str, Pipeline]) -> None:
    """Refuses attention that cannot be computed per head, or not by the kernels in use.

    Raises:
        UnsupportedError: says which feature is in the way, and which choice is left.
    """
    impl, name = layer.impl, layer.layer_name
    if impl.sinks is not None:
        raise UnsupportedError(
            f"{name} has learned attention sinks, which the kernels cannot use for single heads; "
            "serve this model without --kv-policy."
        )
    if impl.alibi_slopes is not None:
        raise UnsupportedError(
            f"{name} uses ALiBi, whose bias needs the positions of tokens, which compressed heads "
            "do not keep; serve this model without --kv-policy."
        )
    for reason in reasons_of_caps(name, own_kernels, pipelines) if impl.logits_soft_cap else ():
        raise UnsupportedError(reason)
