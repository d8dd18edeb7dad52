"""Refuses what does not work beside a draft model; says why, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.config import has_latents, takes_cpu_kernels

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
_REMEDY = "or use --speculative-config with ngram"


def reasons_against_draft_model(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work with a draft model.

    `spec.with_draft_layers` checks what only the loaded layers say.
    """
    speculation, parallel = config.speculative_config, config.parallel_config
    if speculation is None or speculation.method not in METHODS:
        return
    own_backend = speculation.attention_backend not in (None, AttentionBackendEnum.CUSTOM)
    on_gpu = config.device_config.device_type != "cpu"
    if on_gpu and (own_backend or not config.use_v2_model_runner):
        yield (
            "a draft model whose attention backend vLLM chooses, whose blocks need not lie as "
            "compressed ones do: expected model runner V2 and no attention_backend in "
            f"--speculative-config; unset both, {_REMEDY}."
        )
    if parallel.pipeline_parallel_size > 1:
        yield (
            "a draft model with pipeline parallelism: its layers lie on the last stage only, which "
            f"was not run beside compression; use --tensor-parallel-size, {_REMEDY}."
        )
    yield from _reasons_of_layers(config)
    if speculation.use_gemma4_mtp():
        yield (
            "the draft model's layers read the model's cache, of which events evict tokens that "
            f"drafts would read; leave out --speculative-config, {_REMEDY}."
        )
    if speculation.use_multi_module_mtp():
        yield (
            "several MTP layers that each draft one token were not run beside compression; draft "
            f"one token with num_speculative_tokens 1, {_REMEDY}."
        )
    if speculation.parallel_drafting:
        yield (
            "parallel_drafting writes masked tokens behind a request, which was not run beside "
            f"compression; leave it out, {_REMEDY}."
        )
    if config.kv_transfer_config is not None:
        yield (
            "--kv-transfer-config with a draft model: connectors would load blocks of two sizes; "
            f"remove one of the two, {_REMEDY}."
        )
    for option, given in (
        ("--kv-reuse-contexts", settings.reuse_contexts),
        ("--kv-reuse-conversations", settings.conversations),
    ):
        if given:
            yield (
                f"{option} with a draft model, which would have to read again what a kept state "
                f"stands for; leave it out, {_REMEDY}."
            )


def _reasons_of_layers(config: VllmConfig) -> Iterator[str]:
    """Yields a refusal for kinds of layers of the two models that do not work together."""
    model, drafts = config.model_config, config.speculative_config.draft_model_config
    if has_latents(drafts) != has_latents(model):
        yield (
            "expected MLA layers in both the model and its draft model or in neither, found them "
            f"in one; use another draft model, {_REMEDY}."
        )
    elif has_latents(drafts) and takes_cpu_kernels(config):
        yield (
            "the draft model has MLA layers, and vLLM's kernel for CPUs does not read blocks of "
            f"more tokens than the model's; leave out --speculative-config, {_REMEDY}."
        )
