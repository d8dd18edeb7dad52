"""Prints, as JSON, what is said and registered where vLLM's platform is CUDA.

    python -m tests.engine.cuda_platform MODEL

A process of its own: vLLM and much that it imports remember which platform they found.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from types import ModuleType
from typing import Any

import torch
from vllm import EngineArgs, platforms
from vllm.config import AttentionConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.engine.test_refusals import SETTINGS, engine_config
from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin import gpu_worker, scheduler  # noqa: F401  (before the switch)
from vllm_kvcompress.vllm_plugin.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.attention.registration import (
    AttentionBackendEnum,
    use_gpu_backend,
)
from vllm_kvcompress.vllm_plugin.compat import plugin_options
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec
from vllm_kvcompress.vllm_plugin.worker_compression import WorkerCompression

ATTENTION = {
    "CUSTOM": AttentionConfig(backend=AttentionBackendEnum.CUSTOM),
    "none": AttentionConfig(),
    "FLASHINFER": AttentionConfig(backend=AttentionBackendEnum.FLASHINFER),
    "CUSTOM, FLASH_ATTN": AttentionConfig(
        backend=AttentionBackendEnum.CUSTOM,
        backend_per_kind={"full_attention": AttentionBackendEnum.FLASH_ATTN},
    ),
}


def main() -> None:
    """Makes a configuration, then takes vLLM's CUDA platform for the one that it found."""
    config = engine_config(sys.argv[1], SETTINGS)
    # The compiled library and the GPU that are missing here; nothing is computed with them.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("stand-in")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    platforms._current_platform = importlib.import_module(
        "vllm.platforms.cuda"
    ).NonNvmlCudaPlatform()
    options = plugin_options(Settings("adakv", 0.25))
    parents = {}
    for option in ("scheduler_cls", "worker_cls"):
        module, _, name = options[option].rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        parents[option] = [f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__]
    said = {name: registered(config, attention) for name, attention in ATTENTION.items()}
    graphs = {
        f"{policy} {attention} {kernels} {runner}": cuda_graphs(
            sys.argv[1], Settings(policy, 0.25, attention=attention), kernels, runner
        )
        for policy, attention in (("adakv", "auto"), ("adakv", "own"), ("momentkv", "own"))
        for kernels in ("flash", "triton")
        for runner in ("V2", "V1")
    }
    print(json.dumps({"options": options, "parents": parents, "said": said, "graphs": graphs}))


def registered(config: Any, attention: AttentionConfig, kernels: str = "flash") -> str:
    """The class that stands for CUSTOM afterwards, or the refusal."""
    config.attention_config = attention
    try:
        use_gpu_backend(config, kernels)
    except UnsupportedError as error:
        return str(error)
    return AttentionBackendEnum.CUSTOM.get_path()


def cuda_graphs(model: str, settings: Settings, kernels: str, runner: str) -> list[str]:
    """What vLLM would capture by default, and what it makes of it for our backend."""
    ours = {"policy": settings.policy, "budget": 0.25, "attention": settings.attention}
    given: Any = {**plugin_options(settings), "additional_config": {"kvcompress": ours}}
    given["logits_processors"] = [given["logits_processors"]]
    config = EngineArgs(model, **given).create_engine_config()
    backend: Any = pkgutil.resolve_name(registered(config, config.attention_config, kernels))
    # Not before: vLLM makes no configuration for V2 without Triton.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    CompressedBackend.compression = WorkerCompression(config, settings)
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = CompressedAttentionSpec.from_full_attention(full, settings, ())
    compilation = config.compilation_config
    wanted = compilation.cudagraph_mode.name
    found = compilation.resolve_cudagraph_mode_and_sizes(
        backend.get_builder_cls().get_cudagraph_support(config, spec),
        backend.__name__,
        use_v2_model_runner=runner == "V2",
        max_num_reqs=config.scheduler_config.max_num_seqs,
    )
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
    return [wanted, found.name]


if __name__ == "__main__":
    main()
