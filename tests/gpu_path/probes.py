"""What tests look at, or change, inside the engine's process; called before the engine starts."""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import Any


def start_up(report: dict[str, Any]) -> None:
    """Reports what happens while a worker starts, in order, and whether vLLM's monitor is on."""
    from vllm.utils import jit_monitor
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

    report["start_up"] = []

    def note(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def noting(*args: Any, **kwargs: Any) -> Any:
            report["start_up"].append([name, jit_monitor.is_active()])
            return method(*args, **kwargs)

        setattr(owner, name, noting)

    note(WorkerCompression, "bind")
    note(WorkerCompression, "warm_up")
    note(gpu_worker, "warmup_kernels")
    note(gpu_worker, "enable_gpu_sync_check")
    for runner in (RunnerV2, RunnerV1):
        note(runner, "profile_run")
        note(runner, "capture_model")


def drafted(report: dict[str, Any]) -> None:
    """Reports what model runner V2 drafts, by request, which it does not tell the scheduler."""
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

    report["drafted"] = {}
    take = DraftTokensHandler.set_draft_tokens

    def taking(self: Any, batch: Any, drafts: Any) -> None:
        for request_id, tokens in zip(batch.req_ids, drafts.tolist(), strict=True):
            report["drafted"].setdefault(request_id.rpartition("-")[0], []).append(tokens)
        take(self, batch, drafts)

    DraftTokensHandler.set_draft_tokens = taking


def memory(report: dict[str, Any]) -> None:
    """Reports how many bytes vLLM leaves for the cache, and how many this package then does."""
    import os

    from vllm.v1.worker.gpu_worker import Worker

    from tests.gpu_path import stand_ins
    from vllm_kvcompress.vllm_plugin.worker_side.gpu_worker import CompressionGPUWorker

    report["measured"] = stand_ins.measured
    del os.environ["VLLM_CPU_KVCACHE_SPACE"]  # which vLLM takes for a user's choice
    for name, cls in (("vllm", Worker), ("ours", CompressionGPUWorker)):

        def noting(self: Any, determine: Any = cls.determine_available_memory, name: str = name):
            report[name] = determine(self)
            return report[name]

        cls.determine_available_memory = noting


def compiled(report: dict[str, Any]) -> None:
    """Dynamo traces what torch would compile, and runs the graphs as they are."""
    import os

    import torch
    from torch._inductor import compile_fx

    os.environ["TORCH_COMPILE_DISABLE"] = "0"
    torch._dynamo.config.disable = False
    compile_fx.compile_fx = lambda graph, *_, **__: graph


def two_tables(report: dict[str, Any]) -> None:
    """Treats every table of several requests as large; reports how often there were two."""
    from vllm_kvcompress.attention import batch

    report["two_tables"] = 0
    divide = batch._split_rows

    def noting(widths: Any, _: int) -> Any:
        parts = divide(widths, 0)
        report["two_tables"] += len(parts) == 2
        return parts

    batch._split_rows = noting


def order(report: dict[str, Any]) -> None:
    """Reports, in order, when a forward pass begins and ends, when sampling ends, and by which
    trigger and for which policy an event runs in the first layer."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_kvcompress.compression.runner import EventRunner

    report["order"] = order = []
    forward, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
    run_layer = EventRunner.run_layer

    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append("forward begins")
        output = forward(self, *args, **kwargs)
        order.append("forward ends")
        return output

    def sampling(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        order.append("sampled")
        return output

    def running(self: Any, batch: Any, layer: int, *args: Any) -> None:
        if layer == 0:
            order.append(f"{batch.events[0].plan.trigger} {batch.pipeline.name}")
        run_layer(self, batch, layer, *args)

    GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = stepping, sampling
    EventRunner.run_layer = running


def flash_calls(report: dict[str, Any]) -> None:
    """Reports what FlashAttention is called with while requests are served."""
    from vllm.v1.worker import gpu_worker

    from tests.gpu_path import flash_attention

    report["flash"], report["schedules"] = flash_attention.calls, flash_attention.schedules
    serve = gpu_worker.enable_gpu_sync_check

    def serving() -> None:
        flash_attention.calls.clear()
        flash_attention.schedules.clear()
        serve()

    gpu_worker.enable_gpu_sync_check = serving


def few_sequences(report: dict[str, Any]) -> None:
    """Has FlashAttention 3 split batches of up to 4 sequences only: two requests of two heads."""
    from tests.gpu_path import flash_attention
    from vllm_kvcompress.vllm_plugin.worker_side.attention import base, gpu_flash

    gpu_flash.MAX_SPLIT_SEQUENCES = flash_attention.MOST_BATCHES_TO_SPLIT = 4
    report["own"] = 0
    attend = base.biased_attention

    def counting(*args: Any) -> None:
        report["own"] += 1
        attend(*args)

    base.biased_attention = counting
    flash_calls(report)


def by_head(report: dict[str, Any]) -> None:
    """Reports what Triton would compile vLLM's attention for, over single heads of the model.

    Before requests are served, and while they are.
    """
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.worker import gpu_worker

    report["compiled"] = {"before": [], "while": []}
    attend, serve, when = (
        triton_attn.unified_attention,
        gpu_worker.enable_gpu_sync_check,
        ["before"],
    )

    def noting(**given: Any) -> None:
        if given["k"].shape[2] == 1:
            numbers = [len(given["seqused_k"]), given["block_table"].stride(0)]
            numbers += [tensor.stride(n) for tensor in (given["q"], given["out"]) for n in (0, 1)]
            tensors = ("q", "out", "seqused_k", "cu_seqlens_q", "block_table")
            addresses = [given[name].data_ptr() for name in tensors]
            kinds = [number % 16 == 0 for number in (*numbers, *addresses)]
            split = given["max_seqlen_q"] == 1 and numbers[0] <= given["seq_threshold_3D"]
            kind = [split, numbers[0] == 1, *kinds]
            if kind not in report["compiled"][when[0]]:
                report["compiled"][when[0]].append(kind)
        attend(**given)

    def serving() -> None:
        when[0] = "while"
        serve()

    triton_attn.unified_attention, gpu_worker.enable_gpu_sync_check = noting, serving


def takes_types_for_gpus(report: dict[str, Any]) -> None:
    """What attention on this CPU takes is not asked, which stock vLLM on GPUs would not be."""
    from vllm_kvcompress.vllm_plugin.startup import quantized

    quantized.reason_against_cpu_cache = lambda *_: None


def latents(report: dict[str, Any]) -> None:
    """Reports what Triton would compile vLLM's MLA decode for, over pages, on a GPU of 132 SMs.

    Before requests are served, and while they are.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import triton_mla
    from vllm.v1.worker import gpu_worker

    report["compiled"] = {"before": [], "while": []}
    attend, serve, when = (
        triton_mla.decode_attention_fwd,
        gpu_worker.enable_gpu_sync_check,
        "before",
    )
    type(current_platform).num_compute_units = staticmethod(lambda *_: 132)

    def noting(q: Any, k_buffer: Any, *given: Any, **options: Any) -> None:
        _, out, _, table, lengths, _, num_splits, *_ = given
        if k_buffer.is_contiguous():  # those of one layer are not
            numbers = [*(tensor.data_ptr() for tensor in (q, out, table, lengths))]
            numbers += [table.stride(0), q.stride(0), q.stride(1)]
            kind = [num_splits, *(number % 16 == 0 for number in numbers)]
            if kind not in report["compiled"][when]:
                report["compiled"][when].append(kind)
        attend(q, k_buffer, *given, **options)

    def serving() -> None:
        nonlocal when
        when = "while"
        serve()

    triton_mla.decode_attention_fwd, gpu_worker.enable_gpu_sync_check = noting, serving


def plain_models(report: dict[str, Any]) -> None:
    """Gives models of the matrix of models their weights, and operators that CPUs lack."""
    sys.path.append(str(Path(__file__).parents[2] / "scripts" / "checks"))
    from model_parts import engines, operators

    engines.seed_weights()
    operators.install("LongcatFlashNgramForCausalLM")
