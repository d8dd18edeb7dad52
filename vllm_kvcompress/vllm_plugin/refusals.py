"""What does not work together, refused at start-up: what, why, and what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvcompress.config import SETTINGS_KEY, Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
    if settings is None or not settings.may_compress:
        return settings
    for reason in _reasons(vllm_config, settings):
        raise UnsupportedError(reason)
    return settings


def check_classes(vllm_config: VllmConfig) -> None:
    """Refuses to start without one of the classes that compress, which wait for each other.

    The scheduler, the worker and the statistics logger each ask, since vLLM builds whichever of
    them the command line names, and takes its own for the others.

    Raises:
        UnsupportedError: names the option that is missing.
    """
    settings = engine_settings(vllm_config)
    if settings is None or not settings.may_compress:
        return
    for reason in _missing_classes(vllm_config, settings):
        raise UnsupportedError(reason)


def is_ours(name: str, value: object) -> bool:
    """Whether vLLM was given one of our classes, or a subclass.

    Args:
        name: scheduler_cls or worker_cls.
        value: what was given: a class, or its dotted path.

    Raises:
        UnsupportedError: the path leads nowhere.
    """
    from vllm_kvcompress.vllm_plugin.scheduler import CompressionMixin
    from vllm_kvcompress.vllm_plugin.worker import CompressionWorker

    bases = {"scheduler_cls": CompressionMixin, "worker_cls": CompressionWorker}
    return compat.is_subclass(value, bases[name])


def _missing_classes(config: VllmConfig, settings: Settings):
    """Yields a sentence for each of our classes, or subclasses of them, that vLLM was not given."""
    ours = compat.plugin_options(settings)
    given = {
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "worker_cls": config.parallel_config.worker_cls,
    }
    for name, value in given.items():
        if value == ours[name] or is_ours(name, value):
            continue
        option = f"--{name.replace('_', '-')}"
        yield (
            f"--additional-config asks for compression, but {option} is {value or 'not given'}, so "
            f"nothing would be compressed; add {option} {ours[name]} (or a subclass of it), or "
            "start with `vllm-kvcompress serve`, which gives all options that are needed."
        )


def _reasons(config: VllmConfig, settings: Settings):
    """Yields a sentence for everything that is in the way."""
    yield from _missing_classes(config, settings)
    model, parallel = config.model_config, config.parallel_config
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
    if str(config.cache_config.cache_dtype) not in ("auto", "bfloat16", "float16"):
        yield (
            f"--kv-cache-dtype {config.cache_config.cache_dtype}: a quantized cache is not "
            f"supported by compression yet; use --kv-cache-dtype auto {_OFF}."
        )
    if config.speculative_config is not None:
        yield (
            "speculative decoding takes tokens back, compression does not; remove "
            f"--speculative-config {_OFF}."
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
