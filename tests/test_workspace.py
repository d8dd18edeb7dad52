"""The memory that an event is said to take, against what one takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policies.cases import POLICIES, duoattention_file, headkv_file
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows.rings import QueryWindows
from vllm_kvcompress.compression.runner import EventRunner, LayerWeights
from vllm_kvcompress.compression.workspace import EventShape, LiveBytes, event_workspace_bytes
from vllm_kvcompress.kernels import paged, scores_torch, selection
from vllm_kvcompress.policies import Pipeline, adakv, criticalkv, resolve
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.merging import asymkv, groups, kvmerger, momentkv
from vllm_kvcompress.policies.parts import selection as selecting
from vllm_kvcompress.policies.rotary import Rotary
from vllm_kvcompress.scheduling.plan import EventPlan

SHAPE = EventShape(
    num_tokens=1536,
    num_layers=3,
    num_heads=4,
    num_query_heads=8,
    head_size=64,
    block_size=16,
    dtype=torch.bfloat16,
)
CPU = torch.device("cpu")
PAGED_KERNELS = (
    "compact_pages",
    "nearest_keys",
    "value_norms_l1",
    "window_mass",
    "window_perturbation",
)
# Pieces of outputs, in fp32: 4 heads, 256 queries in groups of 2, 2 splits, 64 dims.
BY_KERNELS = {"h2o+obcache": 4 * 4 * 256 * 2 * 2 * 64}


def bound(policy: str, directory: Path) -> Pipeline:
    profile = None
    if policy.startswith("headkv"):
        profile = headkv_file(directory, SHAPE.num_layers, SHAPE.num_query_heads)
    elif policy.startswith("duoattention"):
        profile = duoattention_file(directory, SHAPE.num_layers, SHAPE.num_heads)
    pipeline = resolve(policy, {}, profile)
    return pipeline.bind(SHAPE.num_layers, SHAPE.num_heads, SHAPE.num_query_heads, SHAPE.block_size)


def make_runner(pipeline: Pipeline) -> EventRunner:
    """A pool of random pages, twice as many blocks as a request needs."""
    per_block = SHAPE.num_layers * SHAPE.num_heads
    page = 2 * SHAPE.block_size * SHAPE.head_size
    pool = InterleavedPagePool(
        pages=torch.randn(4 * SHAPE.num_blocks * per_block, page).to(SHAPE.dtype),
        pages_per_block=per_block,
        layer_offsets=SHAPE.num_heads * torch.arange(SHAPE.num_layers),
        num_heads=SHAPE.num_heads,
        block_size=SHAPE.block_size,
        head_size=SHAPE.head_size,
    )
    windows = QueryWindows(SHAPE.num_layers, pipeline.needs.window_size, CPU)
    size = (windows.window_size, SHAPE.num_query_heads, SHAPE.head_size)
    windows.ring = torch.randn(SHAPE.num_layers, 1, *size).to(SHAPE.dtype)
    windows.slots["r"] = 0
    group, dims = SHAPE.num_query_heads // SHAPE.num_heads, SHAPE.head_size
    weights = LayerWeights(
        output_weight=torch.randn(SHAPE.num_heads, dims, group, 32).to(SHAPE.dtype),
        output_gram=torch.eye(dims).expand(SHAPE.num_query_heads, -1, -1),
        rotary=Rotary(torch.rand(dims // 2)),
    )
    runner = EventRunner(PageTables(pool), windows, {pipeline.name: pipeline}, [weights] * 3)
    runner.tables._grow(8, SHAPE.num_blocks)  # tables stay, and are not an event's
    return runner


def measured(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of tensors alive at once in the last layer of a first event that keeps half.

    Kernels that GPUs have of their own are taken to need nothing but their results, as on a GPU.
    """
    monkeypatch.setattr(scores_torch, "TILE_BYTES", scores_torch.DEVICE_TILE_BYTES)
    monkeypatch.setattr(LayerView, "head_slices", lambda view: [slice(0, 4)])
    runner, num_blocks = make_runner(pipeline), SHAPE.num_blocks
    position = num_blocks * SHAPE.block_size + 5
    plan = EventPlan(
        request_id="r",
        group=0,
        policy=pipeline.name,
        trigger="prompt",
        position=position,
        window_size=pipeline.needs.window_size,
        first_block=0,
        end_block=num_blocks,
        resident_blocks=0,
        fresh_block_ids=tuple(range(num_blocks + 1, num_blocks + 1 + num_blocks // 2)),
    )
    event = runner.begin(plan, torch.arange(num_blocks + 1).int())
    memory = LiveBytes(hidden_bytes={})

    def without_its_own(twin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            peak, memory.peak = memory.peak, 0
            result = twin(*args)
            memory.peak = max(peak, memory.live)
            return result

        return call

    for name in PAGED_KERNELS:
        monkeypatch.setattr(paged, name, without_its_own(getattr(paged, name)))
    for module in (adakv, criticalkv, asymkv, groups, kvmerger, momentkv, selecting):
        monkeypatch.setattr(module, "top_entries", without_its_own(selection.top_entries))
    with memory:
        runner.run_layer(event, SHAPE.num_layers - 1, 0.1)
    return memory.peak


@pytest.mark.parametrize("policy", POLICIES)
def test_events_take_no_more_and_not_much_less(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = bound(policy, tmp_path)
    said = event_workspace_bytes(pipeline, SHAPE)
    taken = measured(pipeline, monkeypatch)
    assert taken <= said <= 3 * taken + BY_KERNELS.get(policy, 0)


def test_what_is_alive_is_counted() -> None:
    outside = torch.zeros(1000)
    with LiveBytes() as memory:
        assert memory.live == 0
        first = outside + 1
        view = first[10:].view(9, -1)
        assert memory.live == 4000
        second = torch.empty(250, dtype=torch.int64)
        del first
        assert memory.live == 6000
        del view, second
        outside.add_(1)
        assert memory.live == 0
        torch.zeros(10).sort()
    assert memory.peak == 6000


def test_more_tokens_take_more(tmp_path: Path) -> None:
    pipeline = bound("adakv", tmp_path)
    one, two = (
        event_workspace_bytes(pipeline, replace(SHAPE, num_tokens=count))
        for count in (1 << 14, 1 << 15)
    )
    assert 1.9 < two / one < 2.1
