"""The options with which vLLM is told to use our classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.scheduling.draft_pace import MAX_DRAFTS

if TYPE_CHECKING:
    from vllm_kvcompress.config.settings import Settings

_PACKAGE = "vllm_kvcompress.vllm_plugin"
DRAFTS = f"{_PACKAGE}.worker_side.drafting.SelfDrafts"


def plugin_options(settings: Settings) -> dict[str, str]:
    """The `vllm serve` options that switch compression on, for this build of vLLM."""
    from vllm.platforms import current_platform

    from vllm_kvcompress.policies.registry import merging_part

    check = "RequestCheck"
    limits = (settings.max_request_budget, settings.min_request_read, settings.ceiling)
    reads = settings.read is not None or isinstance(settings.budget, int)
    merges = any(map(merging_part, settings.policies))  # protected tokens are refused
    if settings.request_policies or any(limits) or settings.reuse_contexts or reads or merges:
        check += f"_{json.dumps(settings.to_dict()).encode().hex()}"
    paths = {"logits_processors": f"{_PACKAGE}.request_options:{check}"}
    if settings.draft is not None:
        paths["speculative_config"] = json.dumps(
            {
                "method": "custom_class",
                "model": DRAFTS,
                "num_speculative_tokens": MAX_DRAFTS,
            }
        )
    if current_platform.is_cpu():
        return paths | {
            "scheduler_cls": f"{_PACKAGE}.scheduler_side.scheduler.CompressionScheduler",
            "worker_cls": f"{_PACKAGE}.worker_side.cpu_worker.CompressionCPUWorker",
        }
    if current_platform.is_cuda():
        return paths | {
            "scheduler_cls": f"{_PACKAGE}.scheduler_side.scheduler.AsyncCompressionScheduler",
            "worker_cls": f"{_PACKAGE}.worker_side.gpu_worker.CompressionGPUWorker",
            "attention_backend": "CUSTOM",
        }
    raise UnsupportedError(
        "vllm-kvcompress compresses on vLLM's builds for CPUs and CUDA; this build is for "
        f"{current_platform.device_type}. Serve without --kv-policy here."
    )


def option_loaders(name: str) -> dict[str, Callable[[str], object]]:
    """Returns the functions with which vLLM loads the class that an option names.

    They raise where vLLM would refuse the class. Keys name the model runner where each has a
    loader of its own; the API process uses that of the runner that will serve.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if name != "logits_processors":
        return {"": resolve_obj_by_qualname}
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample.logits_processor.loader import (
        build_custom_logits_processors_params_validator,
    )

    return {
        "model runner V1": lambda path: validate_logits_processors_parameters(
            [path], SamplingParams()
        ),
        "model runner V2": lambda path: build_custom_logits_processors_params_validator([path])(
            SamplingParams()
        ),
    }


def worker_config(vllm_config: Any) -> Any:
    """Returns a worker's configuration, under speculative decoding without `RequestCheck`.

    Model runner V1 refuses logits processors from outside then; the API process still checks.
    """
    model = vllm_config.model_config
    if vllm_config.speculative_config is None or not model.logits_processors:
        return vllm_config
    check = f"{_PACKAGE}.request_options:RequestCheck"
    others = [each for each in model.logits_processors if not str(each).startswith(check)]
    changed = copy(vllm_config)
    changed.model_config = copy(model)
    changed.model_config.logits_processors = others
    return changed
