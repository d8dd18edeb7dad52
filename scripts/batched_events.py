"""What events of one step take together, against one by one.

    python scripts/batched_events.py [--requests 16] [--tokens 512] [--policies snapkv,adakv]
    python scripts/batched_events.py --heads 8 --group 4 --head-size 128 --device cuda

Prompts of equal length that end in the same step, by default on the CPU with one thread, in the
reference model's shape. Medians of all layers' time; on a GPU of what the host takes to queue them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from gpu_parts.whole_events import Cache, Model, make_pipeline
from vllm_kvcompress.cache.page_order import known_packings
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.cache.query_windows.rings import QueryWindows
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

POLICIES = "streamingllm,keydiff,snapkv,adakv,adakv+criticalkv,h2o,spans"


def as_on_cpus(pool: InterleavedPagePool) -> PackedPagePool:
    """The same pages in the order of vLLM's CPU kernels."""
    keys, values = known_packings(pool.block_size, pool.head_size)[:2]
    return PackedPagePool(**vars(pool), key_packing=keys, value_packing=values)


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
        self.rows = numbers.view(num_requests, -1).to(pool.device)
        self.plans = [
            EventPlan(
                request_id=str(nth),
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
            for nth, row in enumerate(self.rows.tolist())
        ]
        shape = (num_requests * num_tokens, self.model.num_query_heads, self.model.head_size)
        self.queries = torch.randn(*shape, device=pool.device).to(pool.pages.dtype)

    def seconds(self, together: bool) -> float:
        """Of all events, over all layers."""
        runner, plans = self.runner, self.plans
        num_tokens = plans[0].position
        started = time.perf_counter()
        events = [runner.begin(plan, row) for plan, row in zip(plans, self.rows, strict=True)]
        where = None
        if self.window_size:
            first = num_tokens - self.window_size
            seen = Observation(first, first, self.window_size)
            asked = [(plan.request_id, nth * num_tokens, seen) for nth, plan in enumerate(plans)]
            where = self.windows.locate(asked, plans)
        whole = () if where is None else where.whole
        groups = [events] if together else [[event] for event in events]
        batches = [batch for some in groups for batch in runner.batches(some, whole)]
        for layer in range(self.model.num_layers):
            if where is not None:
                self.windows.record(layer, self.queries, where)
            for batch in batches:
                runner.run_layer(batch, layer, self.model.head_size**-0.5)
        for event in events:
            runner.finish(event)
        spent = time.perf_counter() - started
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()
        for plan in plans:
            runner.tables.release(plan.request_id)
        return spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"requests": 16, "tokens": 512, "layers": 4, "heads": 4, "group": 2, "head-size": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu = options.device == "cpu"
    block_size = 32 if on_cpu else 16
    hidden = options.heads * options.group * options.head_size
    shape = (options.layers, options.heads, options.group, options.head_size, hidden)
    model = Model(*shape, dtype=torch.float32 if on_cpu else torch.bfloat16)
    blocks = options.tokens // block_size
    num_tokens = options.requests * (blocks + max(1, blocks // 4)) * block_size
    cache = Cache(model, num_tokens, block_size, options.device)
    pool = as_on_cpus(cache.pool) if on_cpu else cache.pool
    print(f"{'policy':24}{'one by one':>14}{'together':>12}{'ratio':>8}")
    for name in options.policies.split(","):
        pipeline = make_pipeline(name, model, block_size)
        step = PromptsEnd(pipeline, cache, pool, options.requests, options.tokens)
        runs = [(step.seconds(False), step.seconds(True)) for _ in range(options.repeats + 1)][1:]
        alone, together = (1000 * statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:24}{alone:>11.1f} ms{together:>9.1f} ms{together / alone:>7.2f}x", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
