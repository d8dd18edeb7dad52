"""Whole events, as a server runs them: every policy, all layers, against the prefill."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_parts import shapes
from gpu_parts.measure import progress
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.batch import EventBatch
from vllm_kvcompress.compression.event import Event, LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.value_norms import output_roots
from vllm_kvcompress.policies import Pipeline, resolve
from vllm_kvcompress.policies.registry import policies
from vllm_kvcompress.policies.triattention import write_statistics
from vllm_kvcompress.scheduling.plan import EventPlan, Observation
from vllm_kvcompress.tools import profiler

Row = dict[str, Any]
REQUEST = "request"
GHZ = 2  # at most, of a GPU's clock
# A GPU takes some 1,000 launches ahead; a host that has queued so many waits, and that is not work.
LAYERS_AT_ONCE = 4
COMBINED = (
    "adakv+criticalkv",
    "adakv+criticalkv:l2",
    "pyramidkv+adakv",
    "h2o+cam",
    "snapkv+obcache",
    "snapkv+momentfix",
)


@dataclass(frozen=True)
class Model:
    """A model's shape, by default Llama-3.1-8B's.

    Attributes:
        num_layers, num_heads, group, head_size, hidden_size: as they are called there.
        dtype: of the cache.
    """

    num_layers: int = shapes.NUM_LAYERS
    num_heads: int = shapes.NUM_HEADS
    group: int = shapes.GROUP
    head_size: int = shapes.HEAD_SIZE
    hidden_size: int = shapes.HIDDEN_SIZE
    dtype: torch.dtype = shapes.DTYPE

    @property
    def num_query_heads(self) -> int:
        """Query heads of one layer."""
        return self.num_heads * self.group


def every_policy() -> tuple[str, ...]:
    """Returns every policy, and some with modifiers."""
    return (*policies(), *COMBINED)


def make_pipeline(name: str, model: Model, block_size: int) -> Pipeline:
    """A policy, or `policy:norm`, bound to the model; measured heads are made up.

    Args:
        name: as in `every_policy`.
        model: which model.
        block_size: tokens of a page.
    """
    policy, _, norm = name.partition(":")
    draw = random.Random(0)
    scores = [
        [[draw.random()] for _ in range(model.num_query_heads)] for _ in range(model.num_layers)
    ]
    with tempfile.TemporaryDirectory() as folder:
        profile = None
        if policy.endswith("headkv"):
            profile = Path(folder) / "headkv.json"
            profiler.write_headkv(profile, scores)
        elif policy == "duoattention":
            profile = Path(folder) / "pattern.tsv"
            profiler.write_duoattention(profile, scores, model.num_heads, profiler.StreamingSizes())
        elif policy == "triattention":
            profile = Path(folder) / "queries.pt"
            shape = (model.num_layers, model.num_query_heads, 3, model.head_size // 2)
            write_statistics(profile, torch.rand(shape, generator=torch.manual_seed(0)))
        pipeline = resolve(policy, {"norm": norm} if norm else {}, profile)
    return pipeline.bind(model.num_layers, model.num_heads, model.num_query_heads, block_size)


class Cache:
    """A prompt's pages in all layers, with random contents, and blocks for what is kept.

    Args:
        model: which model.
        num_tokens: of the prompt, whole blocks of it.
        block_size: tokens of a page.
        device: where.
    """

    def __init__(self, model: Model, num_tokens: int, block_size: int, device: str) -> None:
        self.model, self.device = model, torch.device(device)
        self.num_blocks = num_tokens // block_size
        self.num_kept = max(1, int(shapes.KEPT * self.num_blocks))
        self.block_size = block_size
        per_block = model.num_layers * model.num_heads
        num_pages = (self.num_blocks + self.num_kept) * per_block
        pages = torch.empty(
            num_pages, 2 * block_size * model.head_size, dtype=model.dtype, device=device
        )
        self.pool = InterleavedPagePool(
            pages=pages.normal_(),
            pages_per_block=per_block,
            layer_offsets=model.num_heads * torch.arange(model.num_layers, device=device),
            num_heads=model.num_heads,
            block_size=block_size,
            head_size=model.head_size,
        )
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1))
        self.block_row = order.int().to(device)
        self.weights = self._weights()

    def _weights(self) -> LayerWeights:
        """Random projections, the same for every layer."""
        model, dims = self.model, self.model.head_size

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device) / model.hidden_size**0.5

        weight = drawn(model.hidden_size, model.num_heads, model.group, dims).to(model.dtype)
        by_head = weight.permute(1, 2, 3, 0).flatten(0, 1)
        return LayerWeights(
            output_weight=weight.permute(1, 3, 2, 0),
            output_root=output_roots(by_head),
            rotary=Rotary(drawn(dims // 2).abs()),
        )


class WholeEvent:
    """The event at the end of a prompt, which can be repeated.

    Args:
        pipeline: the policy.
        cache: the prompt's.
    """

    def __init__(self, pipeline: Pipeline, cache: Cache) -> None:
        self.cache = cache
        windows = QueryWindows(cache.model.num_layers, pipeline.needs.window_size, cache.device)
        self.runner = EventRunner(
            PageTables(cache.pool),
            windows,
            {pipeline.name: pipeline},
            [cache.weights] * cache.model.num_layers,
        )
        position = cache.num_blocks * cache.block_size
        self.plan = EventPlan(
            request_id=REQUEST,
            group=0,
            policy=pipeline.name,
            trigger="prompt",
            position=position,
            window_size=min(position, pipeline.needs.window_size),
            first_block=0,
            end_block=cache.num_blocks,
            resident_blocks=0,
            fresh_block_ids=tuple(range(cache.num_blocks, cache.num_blocks + cache.num_kept)),
        )
        size = (self.plan.window_size, cache.model.num_query_heads, cache.model.head_size)
        self.queries = torch.randn(*size, device=cache.device).to(cache.model.dtype)

    def observe(self) -> None:
        """Records the last queries, which attention does while a step runs."""
        size = self.plan.window_size
        if not size:
            return
        seen = Observation(offset=0, position=self.plan.position - size, num_tokens=size)
        where = self.runner.windows.locate([(REQUEST, 0, seen)])
        for layer in range(self.cache.model.num_layers):
            self.runner.windows.record(layer, self.queries, where)

    def steps(self) -> list[Callable[[], None]]:
        """The event, over all layers, a few at a time."""
        runner, num_layers = self.runner, self.cache.model.num_layers
        events: list[Event] = []
        batches: list[EventBatch] = []

        def begin() -> None:
            events.append(runner.begin(self.plan, self.cache.block_row))
            batches.extend(runner.batches(events))

        def layers(first: int) -> None:
            for layer in range(first, min(num_layers, first + LAYERS_AT_ONCE)):
                runner.run_layer(batches[0], layer, self.cache.model.head_size**-0.5)

        def finish() -> None:
            runner.finish(events[0])

        firsts = range(0, num_layers, LAYERS_AT_ONCE)
        return [begin, *(partial(layers, first) for first in firsts), finish]

    def forget(self) -> None:
        """Undoes the event: drops the kept tokens; the request's own pages are untouched."""
        self.runner.tables.release(REQUEST)


def measure_whole_events(
    num_tokens: int, block_size: int, repeats: int, prefill_seconds: float
) -> list[Row]:
    """One row per policy: seconds on the device and on the host, and the share of the prefill.

    Args:
        num_tokens: of the prompt.
        block_size: tokens of a page.
        repeats: of every event.
        prefill_seconds: of the same prompt.
    """
    model = Model()
    cache = Cache(model, num_tokens, block_size, "cuda")
    rows = []
    for name in progress(every_policy(), f"events of {num_tokens} tokens"):
        event = WholeEvent(make_pipeline(name, model, block_size), cache)
        on_device, on_host = event_seconds(event, repeats)
        rows.append(
            {
                "policy": name,
                "seconds": on_device,
                "host_seconds": on_host,
                "of_prefill": on_device / prefill_seconds,
            }
        )
    return rows


def event_seconds(event: WholeEvent, repeats: int) -> tuple[float, float]:
    """Medians of the time that a GPU works on an event, and that the host takes to queue it.

    Sums over a few layers at a time. The GPU is kept busy until the host has queued them, as by the
    prompt's last chunk in a server.
    """
    spans: list[tuple[float, float]] = []
    longest = 0.0
    for repeat in range(repeats + 2):
        event.observe()
        parts = [_seconds_of_step(step, longest) for step in event.steps()]
        event.forget()
        # The first two compile kernels and fill the allocator.
        if repeat:
            longest = max(host for _, host in parts)
            spans.append((sum(device for device, _ in parts), sum(host for _, host in parts)))
    return _medians(spans[1:])


def _seconds_of_step(step: Callable[[], None], busy_seconds: float) -> tuple[float, float]:
    """Returns seconds on the device, which starts after `busy_seconds`, and on the host."""
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.5e9 * GHZ * busy_seconds))
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000, host


def _medians(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    device, host = np.median(np.array(spans), axis=0)
    return float(device), float(host)
