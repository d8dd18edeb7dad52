"""CUDA graphs without a GPU: what a step computes is recorded once, and later run without Python.

A capture records torch's operators and the launches of kernels, with their very tensors. A replay
runs these again, in the same memory. So it sees of a later step what that has put there, and
nothing that Python would have decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

SIZES = [1, 2, 4]  # of captured steps; larger ones run as they are
# Options of an engine that captures, and reports what it replayed.
IN_GRAPHS: dict[str, Any] = {
    "probes": ["tests.gpu_path.graphs:captured"],
    "enforce_eager": False,
    "compilation_config": {"mode": 0},
}


class Recording(TorchDispatchMode):
    """A capture, and then a graph."""

    active: Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.launches: Counter[str] = Counter()

    def __enter__(self) -> Recording:
        Recording.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Recording.active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {memory(tensor) for tensor in tensors((args, kwargs))}
        looks = {memory(tensor) for tensor in tensors(result)} <= given
        if func._schema.is_mutable or not looks:
            self.steps.append((func, args, kwargs or {}, result))
        return result

    def launch(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Launches a kernel, into which nobody looks."""
        with _disable_current_modes():
            result = kernel(*args, **kwargs)
        self.steps.append((kernel, args, kwargs, result))
        self.launches[kernel.__name__] += 1
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        """Runs everything that was recorded again."""
        for func, args, kwargs, former in self.steps:
            results = tensors(func(*args, **kwargs))
            for old, new in zip(tensors(former), results, strict=True):
                if memory(old) != memory(new):
                    old.copy_(new)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def captured(report: dict[str, Any]) -> None:
    """vLLM captures whole decode steps of model runner V2; reports how often each was replayed.

    And what each graph launches, each time that vLLM captured, which it does first to see what
    graphs take, when there is next to no cache.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import flash_attn, triton_attn
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_kvcompress.attention import decode_steps
    from vllm_kvcompress.vllm_plugin.worker_side import gpu_worker

    count_steps(report)
    report["replays"], report["captures"] = Counter(), []
    torch.accelerator.get_memory_info = lambda: (0, 0)
    model_runner.lock_workspace = lambda: None  # which this worker has none of
    type(current_platform).get_global_graph_pool = lambda _: None
    kernels = (
        (decode_steps, "decode_rows"),
        (decode_steps, "correct_with_moments"),
        (triton_attn, "triton_reshape_and_cache_flash"),
        (triton_attn, "unified_attention"),
    )
    if hasattr(flash_attn, "reshape_and_cache_flash"):  # as far as tests replace its kernels
        kernels += (
            (flash_attn, "reshape_and_cache_flash"),
            (flash_attn, "_FA4_DENSE_ATTENTION_KERNEL"),
        )
    for owner, name in kernels:
        setattr(owner, name, launched(getattr(owner, name)))
    start = gpu_worker.CompressionGPUWorker.__init__
    initialize = model_runner.GPUModelRunner.initialize_kv_cache

    def as_on_cuda(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        start(self, vllm_config, *args, **kwargs)

    def with_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.compilation_config.static_forward_context.values():
            layer.use_direct_call = True
        return initialize(self, *args, **kwargs)

    def capture(self: Any, create_forward: Any, _: str) -> None:
        with torch.inference_mode():
            launches: list[Counter[str]] = []
            for desc in self._capture_descs[CUDAGraphMode.FULL]:
                create_forward(desc, warmup=True)(CUDAGraphMode.NONE)
                forward = create_forward(desc, warmup=False)
                with Recording() as graph:
                    forward(CUDAGraphMode.NONE)
                self.graphs[desc] = graph
                launches.append(graph.launches)
            report["captures"].append(launches)
        self._graphs_captured = True

    def replay(self: Any, desc: Any) -> None:
        report["replays"][desc.num_tokens] += 1
        self.graphs[desc].replay()

    def measured(self: Any) -> int:
        config = self.compilation_config
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = SIZES, max(SIZES)
        self.model_runner.profile_cudagraph_memory()  # which vLLM leaves out on CPUs
        return measure(self)

    measure = Worker.determine_available_memory
    Worker.determine_available_memory = measured
    current_platform.graph_pool_handle = lambda: None
    gpu_worker.CompressionGPUWorker.__init__ = as_on_cuda
    model_runner.GPUModelRunner.initialize_kv_cache = with_graphs
    cudagraph_utils.CudaGraphManager.capture = capture
    cudagraph_utils.CudaGraphManager.run_fullgraph = replay


def launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose launches are captured."""

    @wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> Any:
        if Recording.active is None:
            return kernel(*args, **kwargs)
        return Recording.active.launch(kernel, args, kwargs)

    return launch


def count_steps(report: dict[str, Any]) -> None:
    """Reports steps of single tokens: how many, in how many Python attended, and in how many a
    request was compressed, or a query remembered, and how many events there were."""
    from vllm.v1.worker import gpu_worker

    from vllm_kvcompress.vllm_plugin.worker_side import step
    from vllm_kvcompress.vllm_plugin.worker_side.attention import base

    report["steps"] = counts = Counter()
    gpu_worker.enable_gpu_sync_check = counts.clear  # when all is warm
    prepare, forward = step.GroupCompression.prepare, base.CompressedImpl.forward
    seen: list[Any] = [None]

    def preparing(self: Any, plan: Any, *args: Any) -> Any:
        work = seen[0] = prepare(self, plan, *args)
        if work.decodes:
            counts["decodes"] += 1
            counts["mixed"] += bool(work.compressed and len(work.compressed[0].uncompressed))
            counts["events"] += len(work.events)
            counts["observed"] += len(plan.observations)
        return work

    def attending(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        work = seen[0]
        if work is not None and work.decodes and layer.layer_name.startswith("model.layers.0"):
            counts["in Python"] += 1
        return forward(self, layer, *args, **kwargs)

    step.GroupCompression.prepare, base.CompressedImpl.forward = preparing, attending
