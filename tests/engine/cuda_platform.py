"""Prints, as JSON, what is refused and registered where vLLM's platform is CUDA.

    python -m tests.engine.cuda_platform MODEL MLA_MODEL

A process of its own: vLLM and much that it imports remember which platform they found.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm
from vllm import EngineArgs, platforms
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.engine.test_refusals import SETTINGS, engine_config
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.scheduler_side import scheduler  # noqa: F401  (before CUDA)
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec
from vllm_kvcompress.vllm_plugin.startup.registration import (
    AttentionBackendEnum,
    kernels_for,
    use_gpu_backend,
)
from vllm_kvcompress.vllm_plugin.worker_side import gpu_worker  # noqa: F401
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

ATTENTION = {
    "CUSTOM": AttentionConfig(backend=AttentionBackendEnum.CUSTOM),
    "none": AttentionConfig(),
    "FLASHINFER": AttentionConfig(backend=AttentionBackendEnum.FLASHINFER),
    "CUSTOM, FLASH_ATTN": AttentionConfig(
        backend=AttentionBackendEnum.CUSTOM,
        backend_per_kind={"full_attention": AttentionBackendEnum.FLASH_ATTN},
    ),
}
AND_KERNELS = (("adakv", "auto"), ("adakv", "own"), ("adakv", "flash"), ("momentkv", "auto"))
EAGER, CAPPED = {"enforce_eager": True}, {"hf_overrides": {"attn_logit_softcapping": 50.0}}
KERNELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {}),
    "auto, eager": ({}, EAGER),
    "auto, piecewise": ({}, {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}),
    "auto, read": ({"read": "quest:0.5"}, {}),
    "auto, fp8": ({}, {"kv_cache_dtype": "fp8"}),
    "auto, capped": ({}, CAPPED),
    "triton": ({"attention": "triton"}, {}),
    "own, eager": ({"attention": "own"}, EAGER),
}


def main() -> None:
    """Makes a configuration, then replaces vLLM's platform by CUDA's."""
    config = engine_config(sys.argv[1], SETTINGS)
    # The compiled library and the GPU that are missing here; nothing is computed with them.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("stand-in")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    platforms._current_platform = importlib.import_module(
        "vllm.platforms.cuda"
    ).NonNvmlCudaPlatform()
    options = plugin_options(Settings(policy="adakv", budget=0.25))
    parents = {}
    for option in ("scheduler_cls", "worker_cls"):
        module, _, name = options[option].rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        parents[option] = [f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__]
    said = {name: registered(config, attention) for name, attention in ATTENTION.items()}
    graphs = {
        f"{policy} {attention} {kernels} {runner}": cuda_graphs(
            sys.argv[1], Settings(policy=policy, budget=0.25, attention=attention), kernels, runner
        )
        for policy, attention in AND_KERNELS
        for kernels in ("flash", "triton")
        for runner in ("V2", "V1")
    }
    own = {how: takes_own(sys.argv[1], *given) for how, given in KERNELS.items()}
    results = {"options": options, "parents": parents, "said": said}
    results |= {"graphs": graphs, "own_kernels": own, "piecewise": piecewise_graphs(sys.argv[1])}
    results["latents"] = latents(sys.argv[2])
    print(json.dumps({**results, "blackwell": on_blackwell(sys.argv[1])}))


def registered(config: Any, attention: AttentionConfig, kernels: str = "flash") -> str:
    """Registers the backend; returns the class behind CUSTOM, or the refusal."""
    config.attention_config = attention
    try:
        use_gpu_backend(config, kernels)
    except UnsupportedError as error:
        return str(error)
    return AttentionBackendEnum.CUSTOM.get_path()


def compression(
    model: str, settings: Settings, runner: str = "V2", **engine: Any
) -> tuple[Any, WorkerCompression]:
    """Returns a worker's CUDA-graph configuration under CUDA's defaults."""
    ours = {"kvcompress": settings.to_dict()}
    given: Any = {**plugin_options(settings), "additional_config": ours, **engine}
    given["logits_processors"] = [given["logits_processors"]]
    config = EngineArgs(model, **given).create_engine_config()
    # Not before: vLLM makes no configuration for V2 without Triton.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    try:
        return config, WorkerCompression(config, settings)
    finally:
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]


def cuda_graphs(
    model: str, settings: Settings, kernels: str, runner: str = "V2", **engine: Any
) -> list[str]:
    """Returns the graph mode that vLLM is asked for, and the one that our backend leaves."""
    config, CompressedBackend.compression = compression(model, settings, runner, **engine)
    backend: Any = pkgutil.resolve_name(registered(config, config.attention_config, kernels))
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = CompressedAttentionSpec.from_full_attention(full, settings, ())
    compilation = config.compilation_config
    wanted = compilation.cudagraph_mode.name
    mode = compilation.resolve_cudagraph_mode_and_sizes(
        backend.get_builder_cls().get_cudagraph_support(config, spec),
        backend.__name__,
        use_v2_model_runner=runner == "V2",
        max_num_reqs=config.scheduler_config.max_num_seqs,
    )
    return [wanted, mode.name]


def piecewise_graphs(model: str) -> dict[str, list[str]]:
    """Returns what is captured where a user asks for piecewise graphs, by attention."""
    asked = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    return {
        attention: cuda_graphs(
            model, Settings(policy="adakv", budget=0.25, attention=attention), "flash", **asked
        )
        for attention in ("auto", "own")
    }


def latents(model: str) -> dict[str, Any]:
    """What is chosen for a model with MLA, which vLLM's CUDA platform has to agree to."""
    settings = Settings(policy="snapkv", budget=0.25)
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True}
    config, CompressedBackend.compression = compression(model, settings, **options)
    flash_mla = registered(config, AttentionConfig(backend=AttentionBackendEnum.FLASHMLA))
    kernels = {wanted: kernels_for(config, wanted) for wanted in ("auto", "triton")}
    registered(config, ATTENTION["CUSTOM"], kernels["auto"])
    layer = AttentionSelectorConfig(576, torch.bfloat16, "auto", 16, use_mla=True)
    path = platforms.current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, layer)
    mode = cuda_graphs(model, settings, kernels["auto"], **options)
    return {"FLASHMLA": flash_mla, "kernels": kernels, "path": path, "graphs": mode}


def on_blackwell(model: str) -> dict[str, Any]:
    """What vLLM and `auto` choose for capability 10.0, by head size.

    CUDA builds alone have FlashAttention 4; it counts as installed here.
    """
    cuda = importlib.import_module("vllm.platforms.cuda")
    cuda.NonNvmlCudaPlatform.get_device_capability.cache_clear()
    torch.cuda.get_device_capability = lambda device=None: (10, 0)
    use_flash_attention_4()
    for name in ("fa_utils", "flash_attn"):  # both were imported for the CPU
        importlib.reload(importlib.import_module(f"vllm.v1.attention.backends.{name}"))
    fa_utils = sys.modules["vllm.v1.attention.backends.fa_utils"]
    capability = platforms.current_platform.get_device_capability()
    stock = cuda._get_backend_priorities(False, capability)
    by_head_size = {}
    for head_size in (64, 128, 256):
        options = {"dtype": "bfloat16", "hf_overrides": {"head_dim": head_size}}
        settings = Settings(policy="adakv", budget=0.25)
        config, _ = compression(model, settings, **options)
        kernels = kernels_for(config, settings.attention)
        path = registered(config, config.attention_config, kernels)
        backend: Any = pkgutil.resolve_name(path)
        with set_current_vllm_config(config):
            version = fa_utils.get_flash_attn_version(head_size=head_size, supports_fa4_hd256=True)
            by_head_size[head_size] = [kernels, version, backend.get_preferred_block_size(16)]
    return {"stock": [each.name for each in stock[:2]], "by_head_size": by_head_size}


def use_flash_attention_4() -> None:
    """Has vLLM's Python find FlashAttention without its compiled part; nothing calls it."""
    package: Any = ModuleType("vllm.vllm_flash_attn")
    package.__path__ = [str(Path(str(vllm.__file__)).parent / "vllm_flash_attn")]
    for name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func"):
        setattr(package, name, None)
    package.get_scheduler_metadata = None
    sys.modules[package.__name__] = package
    importlib.import_module(f"{package.__name__}.flash_attn_interface").FA4_AVAILABLE = True


def takes_own(model: str, settings: dict[str, Any], engine: dict[str, Any]) -> bool:
    """Returns whether `own` kernels attend for every compressed request."""
    chosen = Settings(policy="adakv", budget=0.25, **settings)
    return compression(model, chosen, **engine)[1].own_kernels


if __name__ == "__main__":
    main()
