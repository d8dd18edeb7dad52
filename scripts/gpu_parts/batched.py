"""Events of one step: what they take together, or several layers at once, against one by one."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from gpu_parts.measure import progress
from gpu_parts.whole_events import GHZ, Cache, Model, make_pipeline
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

Row = dict[str, Any]
POLICIES = "streamingllm,keydiff,snapkv,adakv,adakv+criticalkv,h2o,spans,spans+headkv"
LAYERS = 8  # of a model's, so that a GPU's queue holds all launches
WAYS = ("alone", "at_once", "together")  # one by one: layer by layer, or several at once


class PromptsEnd:
    """A step in which several prompts end, again and again.

    Args:
        pipeline: the policy of all.
        cache: of the model.
        pool: its pages, in the order that is asked for.
        num_requests: how many.
        num_tokens: of each.
    """

    def __init__(
        self, pipeline: Pipeline, cache: Cache, pool: PagePool, num_requests: int, num_tokens: int
    ) -> None:
        self.model, self.pool, size = cache.model, pool, pipeline.needs.window_size
        self.windows = QueryWindows(self.model.num_layers, size, pool.device)
        weights = [cache.weights] * self.model.num_layers
        pipelines = {pipeline.name: pipeline}
        self.runner = EventRunner(PageTables(pool), self.windows, pipelines, weights)
        blocks = num_tokens // pool.block_size
        kept = max(1, blocks // 4)
        self.window_size = min(size, num_tokens)
        numbers = torch.arange(num_requests * (blocks + kept), dtype=torch.int32)
        numbers = numbers.view(num_requests, -1)
        self.rows = numbers.to(pool.device)
        self.plans = [
            EventPlan(
                request_id=str(repeat),
                group=0,
                policy=pipeline.name,
                trigger="prompt",
                position=num_tokens,
                window_size=self.window_size,
                first_block=0,
                end_block=blocks,
                resident_blocks=0,
                fresh_block_ids=tuple(row[blocks:]),
            )
            for repeat, row in enumerate(numbers.tolist())
        ]
        shape = (num_requests * num_tokens, self.model.num_query_heads, self.model.head_size)
        self.queries = torch.randn(*shape, device=pool.device).to(pool.pages.dtype)

    def seconds(self, way: str) -> float:
        """Returns the host's seconds for all events and layers; CPU time on a CPU with one thread.

        Args:
            way: of `WAYS`.
        """
        together, self.runner.layers_alike = way == "together", way != "alone"
        runner, plans = self.runner, self.plans
        num_tokens = plans[0].position
        on_gpu = self.pool.device.type == "cuda"
        alone = not on_gpu and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        started = clock()
        events = [runner.begin(plan, row) for plan, row in zip(plans, self.rows, strict=True)]
        where = None
        if self.window_size:
            first = num_tokens - self.window_size
            seen = Observation(first, first, self.window_size)
            asked = [
                (plan.request_id, repeat * num_tokens, seen) for repeat, plan in enumerate(plans)
            ]
            where = self.windows.locate(asked, plans)
        windows_in_step = () if where is None else where.in_step
        groups = [events] if together else [[event] for event in events]
        batches = [batch for some in groups for batch in runner.batches(some, windows_in_step)]
        for layer in range(self.model.num_layers):
            if where is not None:
                self.windows.record(layer, self.queries, where)
            for batch in batches:
                runner.run_layer(batch, layer, self.model.head_size**-0.5)
        for event in events:
            runner.finish(event)
        spent = clock() - started
        if on_gpu:
            torch.cuda.synchronize()
        for plan in plans:
            runner.tables.release(plan.request_id)
        return spent


def blocks_of(num_requests: int, num_tokens: int, block_size: int) -> int:
    """For prompts of so many tokens, and what is kept of them."""
    blocks = num_tokens // block_size
    return num_requests * (blocks + max(1, blocks // 4))


def measure_batched(num_requests: int, num_tokens: int, block_size: int, repeats: int) -> list[Row]:
    """One row per policy: time on the GPU and on the host, and launches, of all layers measured.

    Args:
        num_requests: whose prompts end in the step.
        num_tokens: of each.
        block_size: tokens of a page.
        repeats: of every measurement.
    """
    model = Model(num_layers=LAYERS)
    num_blocks = blocks_of(num_requests, num_tokens, block_size)
    cache = Cache(model, num_blocks * block_size, block_size, "cuda")
    rows = []
    for name in progress(POLICIES.split(","), "events of one step"):
        pipeline = make_pipeline(name, model, block_size)
        step = PromptsEnd(pipeline, cache, cache.pool, num_requests, num_tokens)
        row: Row = {
            "policy": name,
            "requests": num_requests,
            "tokens": num_tokens,
            "layers": LAYERS,
        }
        for way in WAYS:
            device, host = _seconds(step, way, repeats)
            row[way] = {
                "seconds": device,
                "host_seconds": host,
                "launches": launches(step, way),
            }
        rows.append(row)
    return rows


def _seconds(step: PromptsEnd, way: str, repeats: int) -> tuple[float, float]:
    """Returns median seconds on the GPU and on the host; the GPU is busy until all is queued."""
    spans = []
    busy = 0.0
    for repeat in range(repeats + 2):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1.5e9 * GHZ * busy))
        before.record()
        host = step.seconds(way)
        after.record()
        after.synchronize()
        # The first two compile kernels and fill the allocator.
        if repeat:
            busy = max(busy, host)
            spans.append((before.elapsed_time(after) / 1000, host))
    device, on_host = (statistics.median(column) for column in zip(*spans[1:], strict=True))
    return device, on_host


def launches(step: PromptsEnd, way: str) -> int:
    """Kernels, copies and fills that a GPU is given; on a CPU the operators that run."""
    on_gpu = step.pool.device.type == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profile:
        step.seconds(way)
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return sum(event.device_type == kind for event in profile.events())
