"""Refuses at start-up what does not work with compression; says why, and what to do instead."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain

from vllm import envs
from vllm.config import ModelConfig, VllmConfig

from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.prompts.llmlingua2 import check_model
from vllm_kvcompress.scheduling.read_rule import PromptChunks
from vllm_kvcompress.vllm_plugin.compat.config import (
    looks_back,
    reasoning_end_ids,
    takes_cpu_kernels,
)
from vllm_kvcompress.vllm_plugin.compat.options import DRAFTS, plugin_options
from vllm_kvcompress.vllm_plugin.startup import quantized
from vllm_kvcompress.vllm_plugin.startup.connector_refusals import (
    reasons_against_connector,
    reasons_against_names,
)
from vllm_kvcompress.vllm_plugin.startup.distance_refusals import reasons_against_distances
from vllm_kvcompress.vllm_plugin.startup.draft_refusals import METHODS as METHODS_WITH_LAYERS
from vllm_kvcompress.vllm_plugin.startup.draft_refusals import reasons_against_draft_model
from vllm_kvcompress.vllm_plugin.startup.latent_refusals import reasons_against_latents
from vllm_kvcompress.vllm_plugin.startup.layer_refusals import (
    caps_logits,
    num_sharing_layers,
    reasons_of_caps,
)
from vllm_kvcompress.vllm_plugin.startup.needed_classes import missing_classes

_OFF = "or serve without --kv-policy"
# Of speculative decoding: suffix has ngram's interface, medusa's heads read hidden states.
_METHODS_WITHOUT_LAYERS = ("ngram", "suffix", "medusa", "custom_class")


def engine_settings(vllm_config: VllmConfig) -> Settings | None:
    """Returns the settings in --additional-config; None: there are none."""
    section = (vllm_config.additional_config or {}).get(SETTINGS_KEY)
    return None if section is None else Settings.from_dict(section)


def check_engine(vllm_config: VllmConfig) -> Settings | None:
    """Returns the engine's settings after refusing everything that they do not work with.

    Raises:
        ConfigError: the settings are wrong.
        UnsupportedError: the model, or an option of vLLM, cannot be combined with compression.
    """
    settings = engine_settings(vllm_config)
    if settings is None or not settings.acts:
        return settings
    model, pipelines = vllm_config.model_config, resolve_settings(settings)
    caps = (model.architecture, settings.attention == "own", pipelines)
    reasons = chain(
        missing_classes(vllm_config, settings),
        _reasons_of_model(model),
        _reasons_of_images(vllm_config, settings),
        _reasons_of_look_back(vllm_config, settings),
        reasons_against_distances(vllm_config, settings),
        reasons_against_latents(vllm_config, settings),
        reasons_of_caps(*caps) if caps_logits(model) else (),
        _reasons_of_sharing(vllm_config, settings),
        _reasons_of_reading(settings),
        _reasons_of_reasoning(vllm_config, settings),
        _reasons_of_chunks(vllm_config, settings),
        _reasons_of_caching(vllm_config, settings),
        _reasons_of_options(vllm_config),
        reasons_against_connector(vllm_config, settings),
        _reasons_of_shadow(vllm_config, settings),
        quantized.reasons_against(vllm_config, settings),
        _reasons_of_drafting(vllm_config, settings),
        _reasons_of_speculation(vllm_config, settings),
        reasons_against_draft_model(vllm_config, settings),
    )
    for reason in reasons:
        raise UnsupportedError(reason)
    return settings


def check_server(settings: Settings, arguments: Namespace) -> None:
    """Refuses servers that could not change chats as the settings ask, and connectors by name.

    Raises:
        ConfigError: the classifier does not exist, or is not one.
        UnsupportedError: this kind of server does not change them, or a connector is not served.
    """
    transfer = getattr(arguments, "kv_transfer_config", None)
    if settings.acts and transfer is not None:
        for reason in reasons_against_names(transfer):
            raise UnsupportedError(reason)
    if not settings.plugins:
        return
    others = {
        "--grpc": getattr(arguments, "grpc", False),
        "VLLM_USE_RUST_FRONTEND": getattr(envs, "VLLM_USE_RUST_FRONTEND", False),
    }
    for name in [name for name, given in others.items() if given]:
        raise UnsupportedError(
            f"{name} starts a server that does not change chats as --prompt-compressor and "
            "--kv-protect ask; remove one of the two."
        )
    if settings.prompts is not None:
        check_model(settings.prompts.model)


def check_plugins(settings: Settings) -> None:
    """Refuses a server that would not load the plugins that shorten or protect parts of chats.

    Raises:
        UnsupportedError: VLLM_PLUGINS does not name it.
    """
    named = (os.environ.get("VLLM_PLUGINS") or "").split(",")
    for plugin in settings.plugins:
        if plugin not in named:
            raise UnsupportedError(
                f"--additional-config needs the plugin {plugin}, but VLLM_PLUGINS does not name "
                "it, so no chat would be changed as asked; start with `vllm-kvcompress serve`, or "
                "run the command that its --print-vllm-command prints."
            )


def _reasons_of_model(model: ModelConfig) -> Iterator[str]:
    """Yields a refusal for everything in the model's configuration that does not work.

    `layer_refusals.py` checks what only the loaded layers say.
    """
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


def _reasons_of_look_back(vllm_config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work with chunks and a look-back."""
    model = vllm_config.model_config
    if not looks_back(model):
        return
    name = f"{model.architecture} has layers that attend within chunks and the chunk before, which"
    if takes_cpu_kernels(vllm_config):
        yield f"{name} vLLM's attention for CPUs does not compute; use a GPU."
    if settings.attention == "flash":
        yield f"{name} FlashAttention does not compute; remove --kv-attention flash."


def _reasons_of_images(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work where tokens of an image see each other.

    Events come behind the last image (`RequestTable.open`), so that compressed requests read text.
    """
    if not config.model_config.is_mm_prefix_lm:
        return
    name = f"{config.model_config.architecture} lets all tokens of an image see each other"
    text = "serve text alone with --language-model-only"
    if takes_cpu_kernels(config):
        yield f"{name}, which vLLM's attention for CPUs does not do; {text} {_OFF}."
    if settings.attention == "flash":
        yield (
            f"{name}, which FlashAttention 2 and 3 do not do; use --kv-attention triton, or {text}."
        )
    kinds = {trigger.kind for trigger in settings.triggers} if settings.may_compress else set()
    within = {
        "--kv-trigger chunk:N": ("chunk" in kinds, "use the triggers prompt or decode:N"),
        "--kv-ceiling": (settings.ceiling is not None, "use a budget"),
    }
    for option, (given, remedy) in within.items():
        if given:
            yield f"{name}, and {option} may compress within one; {remedy}, or {text}."
    behind = {
        "--kv-reuse-contexts": settings.reuse_contexts,
        "--kv-reuse-conversations": settings.conversations,
    }
    for option in [option for option, given in behind.items() if given]:
        yield (
            f"{name}, and with {option} a request may read images behind what was compressed; "
            f"remove it, or {text}."
        )


def _reasons_of_sharing(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work where layers read others' caches."""
    if not num_sharing_layers(config.model_config):
        return
    name = f"{config.model_config.architecture} has layers that read the caches of earlier ones"
    if settings.pressure_mark is not None:
        yield (
            f"{name}, and --kv-trigger pressure records no queries of such layers; use the "
            "triggers prompt, chunk:N or decode:N."
        )
    if settings.read is not None:
        yield f"{name}, and --kv-read chooses pages for the queries of one layer; remove --kv-read."
    if settings.attention == "own":
        yield (
            f"{name}, whose queries whole CUDA graphs do not record; remove --kv-attention own, or "
            "use vLLM's kernels with --kv-attention triton."
        )
    sizes_differ = bool(getattr(config.model_config.hf_text_config, "per_layer_config", None))
    on_cpu = config.device_config.device_type == "cpu"
    if sizes_differ and not (on_cpu or config.model_config.enforce_eager):
        yield (
            f"{name}, and layers whose pages have several sizes, of which vLLM cannot measure CUDA "
            "graphs; add --enforce-eager."
        )
    if config.cache_config.kv_sharing_fast_prefill:
        yield (
            f"{name}, and --kv-sharing-fast-prefill leaves out the queries with which they score "
            "tokens; remove it."
        )


def _reasons_of_reading(settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that has to read all kept tokens."""
    if settings.read is None:
        return
    if settings.attention == "own":
        yield (
            "--kv-attention own reads every page, while --kv-read reads a part of them; remove "
            "one of the two."
        )
    for pipeline in resolve_settings(settings).values():
        if pipeline.needs_biased_attention:
            yield (
                f"{pipeline.name} corrects attention over all kept tokens, while --kv-read leaves "
                "some of them out; use another policy, such as adakv, or remove --kv-read."
            )


def _reasons_of_reasoning(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal where it is not known how the model ends its reasoning."""
    if settings.after_reasoning is not None and not reasoning_end_ids(config):
        yield (
            "--kv-after-reasoning: expected vLLM to know which tokens end the model's reasoning, "
            "found none; add for example --reasoning-config "
            '\'{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}\'.'
        )


def _reasons_of_chunks(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that would move the ends of sparse-read prefill chunks."""
    chunks = PromptChunks.of(settings.read_rule, config.cache_config.block_size)
    if chunks is None:
        return
    if any(trigger.kind == "chunk" for trigger in settings.triggers) and settings.may_compress:
        yield (
            "--kv-trigger chunk:N and prefill in --kv-read each set where a prompt's chunks end; "
            "use the trigger prompt, or remove prefill."
        )
    if settings.ceiling is not None:
        yield (
            "--kv-ceiling and prefill in --kv-read each set where a prompt's chunks end; remove "
            "one of the two."
        )
    if settings.reuse_contexts or settings.conversations is not None:
        yield (
            "--kv-reuse-contexts and --kv-reuse-conversations continue prompts in the middle of a "
            "chunk of prefill in --kv-read, which would change what is read; remove them, or "
            "prefill."
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
            f"{others} requests that generate: expected --max-num-batched-tokens of at least "
            f"{chunks.size + others}, found {room}; raise it, or lower prefill or --max-num-seqs."
        )
    threshold = scheduling.long_prefill_token_threshold
    if 0 < threshold < chunks.size:
        yield (
            f"prefill in --kv-read reads chunks of {chunks.size} tokens in one step: expected "
            f"--long-prefill-token-threshold of at least {chunks.size}, found {threshold}; raise "
            "or remove it."
        )


def _reasons_of_caching(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything about prefix caching that does not work."""
    unit = config.cache_config.prefix_match_unit
    if config.model_config.is_hybrid and unit is not None:
        yield (
            f"--prefix-match-unit {unit}: {config.model_config.architecture} has Mamba or "
            "linear-attention layers, whose states within a block change after they have entered "
            "the prefix cache, and compression counts on whole blocks; remove it."
        )
    if not config.cache_config.enable_prefix_caching:
        options = {
            "--kv-reuse-contexts": settings.reuse_contexts,
            "--kv-reuse-conversations": settings.conversations,
        }
        for option in [option for option, given in options.items() if given]:
            yield (
                f"{option} needs vLLM's block hashes, which --no-enable-prefix-caching switches "
                "off; remove one of the two."
            )


def _reasons_of_options(config: VllmConfig) -> Iterator[str]:
    """Yields a refusal for every option of vLLM that does not work with compression."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield (
            "context parallelism splits a request's tokens over ranks while compression splits "
            f"by heads; use --tensor-parallel-size instead {_OFF}."
        )
    if parallel.use_ubatching:
        yield (
            "dual batch overlap runs a step's requests in two halves, while compression plans the "
            f"step as one; remove --enable-dbo {_OFF}."
        )
    by_connector = config.kv_transfer_config is not None  # then its refusals say which models
    if config.scheduler_config.disable_hybrid_kv_cache_manager and not by_connector:
        yield (
            "--disable-hybrid-kv-cache-manager treats sliding-window layers as full attention, "
            f"so they cannot be told from the layers to compress; remove it {_OFF}."
        )


def _reasons_of_shadow(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for scores of answers that could not be compared."""
    mode = config.model_config.logprobs_mode
    if settings.shadow and mode != "raw_logprobs":
        yield (
            "--kv-shadow compares log-probabilities before temperature and penalties: expected "
            f"--logprobs-mode raw_logprobs, found {mode}; remove one of the two."
        )


def _reasons_of_speculation(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work with rejected drafts.

    Events do not: the scheduler gives a step with an event no drafts, for which it has to know each
    request's length.
    """
    speculation = config.speculative_config
    if speculation is None:
        return
    if speculation.method not in (*METHODS_WITH_LAYERS, *_METHODS_WITHOUT_LAYERS):
        yield (
            f"speculative decoding with {speculation.method} was not run beside compression; use "
            f"{' or '.join((*METHODS_WITH_LAYERS, *_METHODS_WITHOUT_LAYERS))}, {_OFF}."
        )
    if config.scheduler_config.async_scheduling and settings.after_reasoning is not None:
        yield (
            "speculative decoding with asynchronous scheduling and --kv-after-reasoning: "
            "more tokens than the event waits for may follow the end of the reasoning before it is "
            f"known; remove --kv-after-reasoning, or add --no-async-scheduling {_OFF}."
        )
    if settings.pressure_mark is not None:
        yield (
            "speculative decoding with --kv-trigger pressure: an event may come at any token, and "
            "rejected drafts have overwritten the oldest of the queries that it needs; use the "
            "triggers prompt, chunk:N or decode:N, or remove --speculative-config."
        )
    if settings.read is not None:
        yield (
            "speculative decoding with --kv-read: pages are chosen for one query of a request, "
            "and drafts bring several; remove one of the two."
        )


def _reasons_of_drafting(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything that does not work with drafts by the model itself."""
    if settings.draft is None:
        return
    given = plugin_options(settings)["speculative_config"]
    if getattr(config.speculative_config, "model", None) != DRAFTS:
        yield (
            f"--kv-draft needs --speculative-config '{given}', which `vllm-kvcompress serve` "
            "gives; add it, or remove --kv-draft."
        )
    if config.device_config.device_type != "cpu":
        yield (
            "--kv-draft: draft steps run on CPUs, and have no CUDA graphs, without which they "
            "would take as long as the steps that they save; remove --kv-draft, or use "
            "--speculative-config with ngram."
        )
    if settings.may_compress:
        yield (
            "--kv-draft drafts for requests that hold everything, and policies evict; remove "
            "--kv-draft, or --kv-policy and --kv-allow-request-policies."
        )
    if settings.read is not None:
        yield (
            "--kv-draft verifies what it drafts reading everything, and --kv-read has decode steps "
            "read a part; remove one of the two."
        )
    yield from _reasons_of_drafting_models(config)


def _reasons_of_drafting_models(config: VllmConfig) -> Iterator[str]:
    """Yields a refusal for models and processes that cannot run a step outside of vLLM's."""
    parallel, model = config.parallel_config, config.model_config
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if max(*ranks, parallel.data_parallel_size) > 1:
        yield (
            "--kv-draft measures what drafting saves, by which ranks could come to different "
            "numbers of drafts; use one rank, or remove --kv-draft."
        )
    if config.lora_config is not None:
        yield "--kv-draft runs draft steps without adapters; remove --enable-lora, or --kv-draft."
    multimodal = model.multimodal_config
    if model.uses_mrope or (multimodal is not None and not multimodal.language_model_only):
        yield (
            "--kv-draft feeds tokens of text at their positions, which models for images count "
            "otherwise; serve text alone with --language-model-only, or remove --kv-draft."
        )
    if num_sharing_layers(model):
        yield (
            f"{model.architecture} has layers that read the caches of earlier ones, and --kv-draft "
            "chooses pages for the queries of one layer; remove --kv-draft."
        )
