"""What does not work together, refused at start-up: what, why, and what to do instead."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from vllm import envs

from vllm_kvcompress.config import PROMPTS_PLUGIN, SETTINGS_KEY, Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.prompts.llmlingua2 import check_model
from vllm_kvcompress.scheduling.read_rule import PromptChunks
from vllm_kvcompress.vllm_plugin.startup import quantized
from vllm_kvcompress.vllm_plugin.startup.layer_refusals import caps_logits
from vllm_kvcompress.vllm_plugin.startup.needed_classes import missing_classes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_OFF = "or serve without --kv-policy"


def engine_settings(vllm_config: VllmConfig) -> Settings | None:
    """The settings in --additional-config, or None when there are none."""
    section = (vllm_config.additional_config or {}).get(SETTINGS_KEY)
    return None if section is None else Settings.from_dict(section)


def check_engine(vllm_config: VllmConfig) -> Settings | None:
    """The engine's settings, after refusing everything that they do not work with.

    Raises:
        ConfigError: the settings are wrong.
        UnsupportedError: the model, or an option of vLLM, cannot be combined with compression.
    """
    settings = engine_settings(vllm_config)
    if settings is None or not settings.acts:
        return settings
    reasons = chain(
        missing_classes(vllm_config, settings),
        _reasons_of_model(vllm_config.model_config),
        _reasons_of_policies(vllm_config.model_config, settings),
        _reasons_of_reading(settings),
        _reasons_of_chunks(vllm_config, settings),
        _reasons_of_caching(vllm_config, settings),
        _reasons_of_options(vllm_config),
        quantized.reasons_against(vllm_config, settings),
        _reasons_of_speculation(vllm_config, settings),
    )
    for reason in reasons:
        raise UnsupportedError(reason)
    return settings


def check_server(settings: Settings, arguments: Namespace) -> None:
    """Refuses what has nothing to do with the engine: how prompts are made shorter.

    Raises:
        ConfigError: there is no such classifier, or it is something else.
        UnsupportedError: the server has no place for it.
    """
    if settings.prompts is None:
        return
    others = {
        "--grpc": getattr(arguments, "grpc", False),
        "VLLM_USE_RUST_FRONTEND": getattr(envs, "VLLM_USE_RUST_FRONTEND", False),
    }
    for name in [name for name, given in others.items() if given]:
        raise UnsupportedError(
            f"{name} takes another server than the one in which --prompt-compressor shortens "
            "messages; leave one of the two out."
        )
    check_model(settings.prompts.model)


def check_prompts_plugin(settings: Settings) -> None:
    """Refuses a server that would not load what shortens prompts.

    Raises:
        UnsupportedError: VLLM_PLUGINS does not name it.
    """
    named = (os.environ.get("VLLM_PLUGINS") or "").split(",")
    if settings.prompts is not None and PROMPTS_PLUGIN not in named:
        raise UnsupportedError(
            f"--additional-config asks for shorter prompts, but VLLM_PLUGINS does not name "
            f"{PROMPTS_PLUGIN}, so none would be; start with `vllm-kvcompress serve`, or as its "
            "--print-vllm-command says."
        )


def _reasons_of_model(model: ModelConfig) -> Iterator[str]:
    """Yields a sentence for everything about the model that is in the way.

    What a model's configuration does not say is found by `layer_refusals.py`.
    """
    if model.use_mla:
        yield (
            "MLA models keep one latent vector per token, not keys and values per head, so there "
            f"are no heads to compress; use a model with grouped-query attention {_OFF}."
        )
    if model.is_encoder_decoder:
        yield (
            "encoder-decoder models attend to an encoder's cache that is not compressed; use a "
            f"decoder-only model {_OFF}."
        )
    if model.runner_type != "generate":
        yield (
            f"a {model.runner_type} model finishes with its prompt, so there is no cache to "
            "compress; serve it without --kv-policy."
        )
    if model.is_attention_free:
        yield (
            f"{model.architecture} has no attention layer, so there is no KV cache to compress; "
            "serve it without --kv-policy."
        )
    if model.is_mm_prefix_lm:
        yield (
            f"{model.architecture} lets all tokens of an image see each other, which attention "
            "over a compressed cache does not do; serve text alone with --language-model-only "
            f"{_OFF}."
        )
    num_shared = getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    if num_shared:
        yield (
            f"the last {num_shared} layers of {model.architecture} read the caches of earlier "
            "ones, and a cache that layers share is not compressed; serve it without --kv-policy."
        )


def _reasons_of_policies(model: ModelConfig, settings: Settings) -> Iterator[str]:
    """Yields a sentence for every policy that this model is not for."""
    if not caps_logits(model):
        return
    if settings.attention == "own":
        yield (
            f"{model.architecture} caps its attention logits, which this package's kernels do "
            "not; remove --kv-attention own."
        )
    for pipeline in resolve_settings(settings).values():
        if pipeline.needs.plain_logits:
            yield (
                f"{model.architecture} caps its attention logits, which the formulas of "
                f"{pipeline.name} leave out; use another policy, such as adakv."
            )


def _reasons_of_reading(settings: Settings) -> Iterator[str]:
    """Yields a sentence for everything that reads all of what is held."""
    if settings.read is None:
        return
    if settings.attention == "own":
        yield (
            "--kv-attention own has kernels that read every page, which --kv-read would not; "
            "remove one of the two."
        )
    for pipeline in resolve_settings(settings).values():
        if pipeline.needs_biased_attention:
            yield (
                f"{pipeline.name} changes how what it keeps is attended to, entry by entry, and "
                "--kv-read leaves entries out; use another policy, such as adakv, or remove "
                "--kv-read."
            )


def _reasons_of_chunks(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a sentence for everything that would cut prompts elsewhere than at their chunks."""
    chunks = PromptChunks.of(settings.read_rule, config.cache_config.block_size)
    if chunks is None:
        return
    if any(trigger.kind == "chunk" for trigger in settings.triggers) and settings.may_compress:
        yield (
            "--kv-trigger chunk:N cuts prompts where they are compressed, and prefill in --kv-read "
            "where chunks choose what they read; use the trigger prompt, or remove prefill."
        )
    if settings.reuse_contexts or settings.reuse_conversations is not None:
        yield (
            "--kv-reuse-contexts and --kv-reuse-conversations go on where no chunk of a prompt "
            "begins, so that the same tokens would be read otherwise than in one piece; remove "
            "them, or prefill in --kv-read."
        )
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and not multimodal.language_model_only:
        yield (
            "prefill in --kv-read reads a chunk of a prompt in one step, and vLLM may end a step "
            "before an image; serve text alone with --language-model-only, or remove prefill."
        )
    scheduling = config.scheduler_config
    others = scheduling.max_num_seqs - 1
    room = scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens
    if room < chunks.size + others:
        yield (
            f"prefill in --kv-read reads chunks of {chunks.size} tokens in one step, beside up to "
            f"{others} requests that generate, and --max-num-batched-tokens is {room}; set it to "
            f"at least {chunks.size + others}, or prefill or --max-num-seqs lower."
        )
    threshold = scheduling.long_prefill_token_threshold
    if 0 < threshold < chunks.size:
        yield (
            f"prefill in --kv-read reads chunks of {chunks.size} tokens in one step, and "
            f"--long-prefill-token-threshold allows {threshold}; set it to at least {chunks.size}, "
            "or remove it."
        )


def _reasons_of_caching(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a sentence for everything about prefix caching that is in the way."""
    if config.model_config.is_hybrid and config.cache_config.mamba_cache_mode == "align":
        yield (
            f"{config.model_config.architecture} has Mamba or linear-attention layers, for whose "
            "prefix caching vLLM decides where prefill chunks end, as compression does; add "
            f"--no-enable-prefix-caching {_OFF}."
        )
    if not config.cache_config.enable_prefix_caching:
        reuse = {
            "--kv-reuse-contexts finds contexts": settings.reuse_contexts,
            "--kv-reuse-conversations finds them": settings.reuse_conversations,
        }
        for finds in [finds for finds, wanted in reuse.items() if wanted]:
            yield (
                f"{finds} by vLLM's block hashes, which --no-enable-prefix-caching switches off; "
                "leave one of the two out."
            )


def _reasons_of_options(config: VllmConfig) -> Iterator[str]:
    """Yields a sentence for every option of vLLM that is in the way."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield (
            "context parallelism splits a request's tokens over ranks while compression splits "
            f"by heads; use --tensor-parallel-size instead {_OFF}."
        )
    if parallel.pipeline_parallel_size > 1:
        yield (
            "pipeline parallelism was not made to work with compression yet; use "
            f"--tensor-parallel-size instead {_OFF}."
        )
    if config.kv_transfer_config is not None:
        yield (
            "KV connectors transfer whole blocks by token position, which compressed requests no "
            f"longer have; remove --kv-transfer-config {_OFF}."
        )
    if parallel.use_ubatching:
        yield (
            "dual batch overlap runs a step's requests in two halves, while a plan is made for all "
            f"of them; remove --enable-dbo {_OFF}."
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "--disable-hybrid-kv-cache-manager treats sliding-window layers as full attention, "
            f"so they cannot be told from the layers to compress; remove it {_OFF}."
        )


def _reasons_of_speculation(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a sentence for everything that does not take tokens back, as drafts are.

    Events do not: a step in which one happens has no drafts, which the scheduler knows ahead where
    it knows each request's length.
    """
    speculation = config.speculative_config
    if speculation is None:
        return
    if speculation.method != "ngram":
        yield (
            f"speculative decoding with {speculation.method}: what drafts there may have layers of "
            "its own, which keep keys and values in the blocks that events free and run after the "
            f"step, as often as there are drafts; use the method ngram, which has none, {_OFF}."
        )
    if config.scheduler_config.async_scheduling:
        yield (
            "speculative decoding with asynchronous scheduling: a step is planned before it is "
            "known how many drafts of the last one stay, and with that where events happen; add "
            f"--no-async-scheduling {_OFF}."
        )
    if settings.pressure_mark is not None:
        yield (
            "speculative decoding with --kv-trigger pressure: an event may come at any token, but "
            "drafts that are taken back have overwritten the oldest of the queries that it looks "
            "at; use the triggers prompt, chunk:N or decode:N, or remove --speculative-config."
        )
    if settings.read is not None:
        yield (
            "speculative decoding with --kv-read: what to read is chosen for one query of a "
            "request, and drafts bring several; remove one of the two."
        )
