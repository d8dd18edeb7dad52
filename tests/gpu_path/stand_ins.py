"""What stands in for a GPU, so that vLLM's GPU worker, and ours, start and run on a CPU.

The workers' own code runs: what is replaced asks a GPU for something. The model runners are vLLM's
for CPUs, which are those for GPUs without streams and pinned memory.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.executor import multiproc_executor
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests.gpu_path.torch_kernels import replace_latent_operators
from tests.live_bytes import LiveBytes
from vllm_kvcompress.vllm_plugin.startup import (
    distance_refusals,
    draft_refusals,
    latent_refusals,
    refusals,
)

MIB = 2**20
FREE_BYTES, REQUESTED_BYTES, CONSUMED_BYTES = 2048 * MIB, 1280 * MIB, 1024 * MIB
measured: list[dict[str, int]] = []  # peak of each measurement, and what it left
_memory = LiveBytes()


@contextmanager
def taken_for_cuda() -> Iterator[None]:
    """The platform says that it is CUDA, on a Hopper GPU."""
    answers = {
        "is_cpu": False,
        "is_cuda": True,
        "get_device_capability": DeviceCapability(9, 0),
    }
    patches = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    with mock.patch.multiple(current_platform, **patches):
        yield


def replace_device(stock_backend: str) -> None:
    """In this process, GPU workers start on the CPU.

    Args:
        stock_backend: path of the attention backend of layers for which none is chosen.
    """
    worker: Any = gpu_worker.Worker
    worker.init_device = _init_device
    gpu_worker.memory_profiling = _memory_profiling
    gpu_worker.kernel_warmup = lambda *_: None  # of vLLM's kernels, which imports torchvision
    # Kernels that Triton's interpreter does not take; all that warming up masks is allowed.
    structured_outputs._apply_grammar_bitmask_kernel = mock.MagicMock()
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    sampler.get_num_nans = rejection_sampler.get_num_nans = _count_nans
    # Spawned, workers would know nothing of all this.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.reset_peak_memory_stats = _memory.__enter__
    torch.accelerator.memory_allocated = lambda: _memory.live
    torch.accelerator.max_memory_allocated = lambda: _memory.peak
    torch.accelerator.empty_cache = _end_of_measurement

    _serve_latents_as_on_gpus()
    refusals.takes_cpu_kernels = distance_refusals.takes_cpu_kernels = lambda *_: False

    def backend(selected: AttentionBackendEnum | None, *_: Any, **__: Any) -> str:
        return stock_backend if selected is None else selected.get_path()

    type(current_platform).get_attn_backend_cls = staticmethod(backend)

    from vllm_kvcompress.vllm_plugin.worker_side.gpu_worker import CompressionGPUWorker

    start = CompressionGPUWorker.use_compressed_backend

    def made_for_cuda(*args: Any) -> Any:
        with taken_for_cuda():
            return start(*args)

    CompressionGPUWorker.use_compressed_backend = made_for_cuda


def _serve_latents_as_on_gpus() -> None:
    """vLLM's CPU platform sets a block size for MLA, and switches off what needs its contexts."""
    replace_latent_operators()
    latent_refusals.takes_amx_mla = draft_refusals.takes_cpu_kernels = lambda *_: False
    latent_refusals.needs_cpu_mla_block = lambda *_: False
    update = type(current_platform).check_and_update_config

    def updating(config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        tokens, size = scheduler.max_num_batched_tokens, cache.block_size
        caching, chunks = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
        update(config)
        if config.model_config is not None and config.model_config.use_mla:
            scheduler.max_num_batched_tokens, cache.block_size = tokens, size
            cache.enable_prefix_caching, scheduler.enable_chunked_prefill = caching, chunks

    type(current_platform).check_and_update_config = staticmethod(updating)


def _count_nans(logits: torch.Tensor) -> torch.Tensor:
    return logits.isnan().sum(-1, dtype=torch.int32)


def _init_device(self: Any) -> None:
    """`CPUWorker`'s, and what the GPU's finds out about memory."""
    CPUWorker.init_device(self)
    self.init_snapshot = SimpleNamespace(free_memory=FREE_BYTES, total_memory=FREE_BYTES)
    self.requested_memory = REQUESTED_BYTES


def _end_of_measurement() -> None:
    """Memory is counted from a reset of its peak until the allocator's cache is emptied."""
    if _memory.peak:
        _memory.__exit__(None, None, None)
        measured.append({"peak": _memory.peak, "left": _memory.live})
        _memory.peak = 0


@contextmanager
def _memory_profiling(snapshot: Any, weights_memory: int) -> Iterator[Any]:
    yield SimpleNamespace(
        total_consumed=CONSUMED_BYTES,
        transient_peak_headroom=0,
        non_kv_cache_memory=CONSUMED_BYTES,
        after_profile=SimpleNamespace(free_memory=snapshot.free_memory - CONSUMED_BYTES),
    )
