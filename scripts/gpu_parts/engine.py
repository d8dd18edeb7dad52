"""A whole engine, stock and compressed, over the same requests: what only a real start shows."""

from __future__ import annotations

import operator
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.measure import progress
from gpu_parts.report import COMPRESSED, PIECEWISE, STOCK
from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.tools.engine_process import EngineProcess

SHORT_TOKENS = 48  # shorter than what is compressed
COMPILED = "during inference"  # vLLM's word for kernels that were compiled while requests waited


@dataclass(frozen=True)
class EnginePlan:
    """What is served.

    Attributes:
        model: name or directory.
        requests: half of them long, half too short to be compressed.
        prompt: tokens of the long ones.
        output: tokens that each generates.
        settings: ours.
        engine: further keyword arguments of `vllm.LLM`.
        piecewise: once more with vLLM's kernels, between piecewise CUDA graphs.
    """

    model: str = "Qwen/Qwen3-8B"
    requests: int = 20
    prompt: int = 4096
    output: int = 64
    settings: dict[str, Any] = field(
        default_factory=lambda: {"policy": "adakv+criticalkv", "budget": 0.25}
    )
    engine: dict[str, Any] = field(default_factory=dict)
    piecewise: bool = True

    @property
    def num_long(self) -> int:
        """Requests that are compressed."""
        return (self.requests + 1) // 2

    def prompts(self, seed: int) -> list[list[int]]:
        """Token ids, long and short in turns; other ones for every seed."""
        draw = random.Random(seed)
        lengths = [self.prompt if n % 2 == 0 else SHORT_TOKENS for n in range(self.requests)]
        return [[draw.randrange(10, 200) for _ in range(length)] for length in lengths]


def measure_engine(plan: EnginePlan, logs: Path) -> dict[str, Any]:
    """Starts stock vLLM, then compressed engines, and serves the plan's requests twice in each.

    The first of these is what `serve` starts, with CUDA graphs of whole decode steps and this
    package's kernels where the model and its options allow it.

    vLLM checks meanwhile that no step waits for the GPU (VLLM_GPU_SYNC_CHECK=error ends the
    engine), and notes kernels that are compiled while it serves.

    Args:
        plan: what is served.
        logs: folder for what the engines print.

    Returns:
        `engines`: by name what `_serve` says of the second round, with the seconds of the start,
        the kernels compiled while serving, and how many requests that are too short to be
        compressed got stock's reply (`equal`; in some types of numbers a few differ by rounding
        with this package's kernels); or `refused` with the engine's last words.
    """
    os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    logs.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, dict[str, Any] | None] = {STOCK: None, COMPRESSED: plan.settings}
    pieces = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    if plan.piecewise:
        wanted[PIECEWISE] = plan.settings
    engines = {
        name: _engine(plan, settings, logs / f"{name}.log", pieces if name == PIECEWISE else {})
        for name, settings in progress(list(wanted.items()), "engines")
    }
    expected = engines[STOCK].get("replies", [])
    for figures in engines.values():
        replies = figures.pop("replies", [])
        figures["equal"] = sum(map(operator.eq, replies[1::2], expected[1::2]))
    return {
        "model": plan.model,
        "requests": plan.requests,
        "prompt": plan.prompt,
        "settings": plan.settings,
        "long": plan.num_long,
        "short": plan.requests - plan.num_long,
        "engines": engines,
    }


def _engine(
    plan: EnginePlan, settings: dict[str, Any] | None, log: Path, more: dict[str, Any]
) -> dict[str, Any]:
    log.unlink(missing_ok=True)
    length = plan.prompt + plan.output
    options = {"max_model_len": length, "skip_tokenizer_init": True, **plan.engine, **more}
    started = time.perf_counter()
    try:
        with EngineProcess(plan.model, settings, options, log, _serve) as engine:
            seconds = time.perf_counter() - started
            for seed in (1, 2):
                figures = engine.call((plan.prompts(seed), plan.output, settings is not None))
    except EngineError as error:
        return {"refused": str(error).splitlines()[-1]}
    compiled = log.read_text(errors="replace").count(COMPILED)
    return {"start_seconds": seconds, "compiled": compiled, **figures}


def allocated(worker: Any) -> dict[str, int]:
    """In the worker: bytes that torch has handed out on the GPU, 0 where there is none.

    Returns:
        `now`; `most` at any time since the last call; and what ours has `left` out of the cache.
    """
    import torch

    found = {"now": 0, "most": 0, "left": getattr(worker, "left_bytes", 0)}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        found["now"] = stats["allocated_bytes.all.current"]
        found["most"] = stats["allocated_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats()
    return found


def _serve(llm: Any, call: tuple[list[list[int]], int, bool]) -> dict[str, Any]:
    """In the engine's process: all requests at once; what they took, and what was left behind."""
    import statistics

    from vllm import SamplingParams

    from vllm_kvcompress.tools.evaluation.observer import watch, watched
    from vllm_kvcompress.vllm_plugin.startup import compat

    prompts, max_tokens, compresses = call
    pool = compat.engine_parts(llm.llm_engine)[0].kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    if compresses:
        llm.collective_rpc(watch, args=(False,))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    before = llm.collective_rpc(allocated)[0]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = llm.collective_rpc(allocated)[0]

    def seconds_per_token(output: Any) -> float:
        metrics = output.metrics
        return (metrics.last_token_ts - metrics.first_token_ts) / max(1, max_tokens - 1)

    events = llm.collective_rpc(watched)[0]["events"] if compresses else []
    return {
        "taken_bytes": after["most"] - before["now"],
        "left_bytes": after["left"],
        "seconds": seconds,
        "tokens_per_second": len(prompts) * max_tokens / seconds,
        "token_seconds": statistics.median(map(seconds_per_token, outputs)),
        "first_token_seconds": statistics.median(o.metrics.first_token_latency for o in outputs),
        "events": len(events),
        "lost_blocks": free - pool.get_num_free_blocks(),
        "replies": [list(output.outputs[0].token_ids) for output in outputs],
    }
