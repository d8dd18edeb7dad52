"""Checks a model's layers as a worker does, from the model's config alone; for `doctor`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from vllm_kvcompress.vllm_plugin.compat.config import kv_cache_groups
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine
from vllm_kvcompress.vllm_plugin.startup.registration import (
    kernels_for,
    use_cpu_backend,
    use_gpu_backend,
    use_relative_backend,
)
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression


class NoWeights(TorchFunctionMode):
    """Gives tensors that `torch.empty` makes, as vLLM makes weights, a shape and no memory.

    Others keep their numbers, since models compute with some while they are built.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        more = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **more})


def check_layers(vllm_config: VllmConfig) -> None:
    """Refuses the layers that a worker would refuse; builds the model without weights.

    This process becomes the only rank of a worker without an engine, so it must not serve later.

    Args:
        vllm_config: of one rank.

    Raises:
        UnsupportedError: layers do not work with compression.
    """
    settings = check_engine(vllm_config)
    if settings is None or not settings.acts:
        return
    compression = WorkerCompression(vllm_config, settings)
    CompressedBackend.compression = compression
    if current_platform.is_cpu():
        use_cpu_backend()
    else:
        use_gpu_backend(vllm_config, kernels_for(vllm_config, settings.attention))
    vllm_config.cache_config.kv_cache_layout = KVCacheLayout.BLHNC.name
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{Path(folder, 'ranks')}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(vllm_config.model_config.dtype), NoWeights():
            initialize_model(vllm_config)
        use_relative_backend(vllm_config)
        specs = get_kv_cache_spec(vllm_config)
        compression.compressed_groups(kv_cache_groups(vllm_config, specs))
