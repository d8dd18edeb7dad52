"""Dummy events run what requests will run, take at least as much memory, and leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, launched, twin_of
from tests.event_cases import BLOCK_SIZE, GROUP, NUM_HEADS, Request, make_pool, make_weights
from tests.live_bytes import LiveBytes
from tests.policies.cases import HEAD_SIZE, NUM_LAYERS, Shape, make_pipeline
from tests.policies.cases import POLICIES as EVERY_POLICY
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows import PagedWindows, QueryWindows
from vllm_kvcompress.compression.dummy_runs import DummyRuns
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.policies import Pipeline, resolve
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

POOL_SIZES = (NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
POLICIES = ["adakv", "adakv+criticalkv", "snapkv", "h2o", "momentkv", "kvmerger", "d2o"]


def dummy_runs(runner: EventRunner) -> DummyRuns:
    return DummyRuns(runner, NUM_HEADS * GROUP, block=0)


def longest_bytes(pipeline: Pipeline, num_tokens: int, max_tokens: int = 0) -> int:
    """Most bytes that are held at once, on a device whose memory nothing but shapes decides.

    Batches of events and layers have `max_tokens`; with 0 every event is alone, in one layer.
    """
    runner = Request(pipeline, make_pool(InterleavedPagePool, ACCELERATOR)).runner
    runner.max_tokens = max_tokens
    runs = dummy_runs(runner)
    with LiveBytes() as memory:
        runs.longest(num_tokens)
    return memory.peak


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that would have run on a GPU; their twins do."""
    names: set[str] = set()

    def noting(module: str, name: str) -> Any:
        names.add(name)
        return twin_of(module, name)

    monkeypatch.setattr(dispatch, "takes_triton", lambda device: True)
    monkeypatch.setattr(dispatch, "triton_kernel", noting)
    return names


@pytest.mark.parametrize("policy", POLICIES)
def test_dummy_events_launch_every_kernel_of_real_events(
    policy: str, tmp_path: Path, called: set[str]
) -> None:
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    position = max(70, 2 * pipeline.needs.window_size)
    request = Request(pipeline, make_pool(InterleavedPagePool), positions=(position,))
    request.run()
    wanted = set(called)
    called.clear()
    runner = Request(pipeline, make_pool(InterleavedPagePool)).runner
    dummy_runs(runner).warm_up(pipeline.needs_biased_attention)
    later = {"append_pages"}
    if pipeline.needs_biased_attention:
        later |= {"decode_attention", "prefill_attention", "sum_tiles"}
    later |= {"correct_with_moments"} if pipeline.corrects else set()
    assert wanted
    assert called == wanted | later


@pytest.mark.parametrize("policy", POLICIES)
def test_dummy_events_leave_pages_and_tables_unchanged(policy: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    request = Request(pipeline, make_pool(InterleavedPagePool))
    before = request.pool.pages.clone()
    request.runner.max_tokens = 200
    dummy_runs(request.runner).warm_up(pipeline.needs_biased_attention)
    dummy_runs(request.runner).longest(200)
    after, pages_per_block = request.pool.pages, request.pool.pages_per_block
    assert not request.runner.tables.slots
    assert not request.runner.windows.slots
    assert torch.equal(after[:pages_per_block], torch.zeros_like(after[:pages_per_block]))
    assert torch.equal(
        after[pages_per_block:].nan_to_num(7), before[pages_per_block:].nan_to_num(7)
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("policy", sorted(EVERY_POLICY.keys() - {"d2o"}))  # its twin reads numbers
def test_longest_dummy_event_takes_as_much_memory_as_a_request(
    policy: str, in_place: bool, tmp_path: Path
) -> None:
    """Compared with a request of as many tokens that is compressed twice, in all layers at once.

    Batches have room for that and its padding, and for few short requests.
    """
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    budget, in_place = (
        "tokens" if in_place else "fraction",
        in_place and not pipeline.layer_dependent,
    )
    pool = make_pool(InterleavedPagePool, ACCELERATOR)
    request = Request(pipeline, pool, budget, in_place=in_place)
    with LiveBytes() as taken:
        request.run()
    num_tokens = request.positions[-1]
    assert longest_bytes(pipeline, num_tokens, 2 * NUM_LAYERS * num_tokens) >= taken.peak > 0


@pytest.mark.parametrize(
    ("policy", "per_entry"),
    [
        ("snapkv", 4 + 8),  # a score, and its place among the kept ones
        ("kvmerger", 2 * 4 * HEAD_SIZE),  # merged keys and values
    ],
)
def test_memory_of_the_longest_dummy_event_grows_with_its_tokens(
    policy: str, per_entry: int, tmp_path: Path
) -> None:
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    one, two = (longest_bytes(pipeline, count) for count in (1 << 13, 1 << 14))
    tables = 4 * 8 * NUM_LAYERS * NUM_HEADS // BLOCK_SIZE  # of the first eight requests
    assert one >= (1 << 13) * (NUM_HEADS * per_entry + tables)
    assert 1.9 < two / one < 2.1


@pytest.mark.parametrize("policy", ["adakv", "kvmerger"])
def test_dummy_events_need_only_one_block_of_one_layer(policy: str, tmp_path: Path) -> None:
    """The pool before the cache exists is that small; the last queries lie in blocks."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    shape = (NUM_HEADS, 2 * BLOCK_SIZE * HEAD_SIZE)
    pool = InterleavedPagePool(
        torch.zeros(shape), NUM_HEADS, torch.zeros(NUM_LAYERS).long(), *POOL_SIZES
    )
    windows = PagedWindows(pool, pipeline.needs.window_size, NUM_HEADS * GROUP)
    runner = EventRunner(PageTables(pool), windows, {policy: pipeline}, make_weights(pool.device))
    dummy_runs(runner).longest(200)
    assert torch.equal(pool.pages, torch.zeros(shape))


# Llama-3.1-8B's, Qwen3-8B's and SmolLM2-135M's layers, KV heads, query heads of each, head size.
MODELS = [(32, 8, 4, 128), (36, 8, 4, 128), (30, 3, 3, 64)]


def make_runner(model: tuple[int, ...], pipeline: Pipeline, num_rings: int) -> EventRunner:
    """Makes the runner of a bf16 model on the device that has shapes alone."""
    num_layers, num_heads, _, head_size = model
    offsets = torch.zeros(num_layers, dtype=torch.int64, device=ACCELERATOR)
    pages = torch.zeros(num_heads, 32 * head_size, dtype=torch.bfloat16, device=ACCELERATOR)
    pool = InterleavedPagePool(pages, num_heads, offsets, num_heads, 16, head_size)
    size = pipeline.needs.window_size
    windows = QueryWindows(num_layers, size, ACCELERATOR, num_rings)
    weights = [LayerWeights()] * num_layers
    return EventRunner(PageTables(pool), windows, {pipeline.name: pipeline}, weights)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_dummy_events_hold_more_queries_than_the_worst_batches(
    policy: str, model: tuple[int, ...]
) -> None:
    """All requests are near an event, or as many prompts end as fit 8,192 tokens."""
    num_layers, num_heads, group, head_size = model
    num_requests = 256
    pipeline = resolve(policy).bind(num_layers, num_heads, num_heads * group, 16)
    size, counted, serving = pipeline.needs.window_size, LiveBytes(), LiveBytes()
    runner = make_runner(model, pipeline, num_requests)
    with launched(), counted:
        DummyRuns(runner, num_heads * group, block=0).longest(8192)
    names = [f"r{index}" for index in range(num_requests)]
    short = torch.zeros(
        (8192, num_heads * group, head_size), dtype=torch.bfloat16, device=ACCELERATOR
    )
    runner = make_runner(model, pipeline, num_requests)
    with serving:
        for position in range(3):
            rows = [(name, index, Observation(0, position, 1)) for index, name in enumerate(names)]
            where = runner.windows.locate(rows)
            for layer in range(num_layers):
                runner.windows.record(layer, short[:num_requests], where)
        for name in names:
            runner.windows.release(name)
        ends = [(f"s{index}", size) for index in range(8192 // size)]
        seen = Observation(0, 0, size)
        plans = [event_plan(name, size) for name, _ in ends]
        asked = [(name, index * size, seen) for index, (name, _) in enumerate(ends)]
        runner.windows.record(0, short, runner.windows.locate(asked, plans))
        assert runner.windows.read(0, runner.windows.find(ends, size)).shape[1] == len(ends)
    rings = 2 * num_layers * num_requests * size * num_heads * group * head_size
    assert counted.peak > serving.peak > rings


def event_plan(request_id: str, position: int) -> EventPlan:
    return EventPlan(request_id, 0, "", "prompt", position, position, 0, 1, 0, (1,))


def test_live_bytes_counts_tensors_that_are_alive() -> None:
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
    assert memory.peak == 6000
