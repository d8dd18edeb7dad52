"""What serving allocates after a server has measured itself stays below what it left for that.

Added up over the shapes of all tensors that are alive at once: page tables, what batches read from
them, rings of queries, events, summaries of keys, and the buffers that CUDA graphs read. What
kernels take for themselves is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.accelerator import ACCELERATOR, launched
from tests.live_bytes import LiveBytes
from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.biased import query_batches
from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.attention.reading import SparseReads, summary_kind
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import Integers, InterleavedPagePool
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.dummy_runs import DummyRuns
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.scheduling.plan import EventPlan, Observation
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.rule import TRIGGER_PREPARE
from vllm_kvcompress.vllm_plugin.worker_side.memory import TABLES_SHARE, reserve

BLOCK = 16
STEPS = 20  # of a block's tokens each


@dataclass(frozen=True)
class Shape:
    """A model on one rank, beside which `cache_gib` are left."""

    num_layers: int
    num_heads: int
    head_size: int
    cache_gib: int
    group: int = 4

    @property
    def cache_bytes(self) -> int:
        return self.cache_gib * 2**30

    @property
    def most_tokens(self) -> int:
        """That the cache holds in bf16."""
        return self.cache_bytes // (4 * self.num_layers * self.num_heads * self.head_size)


LLAMA_3_2_1B = Shape(16, 8, 64, 20)
QWEN3_8B = Shape(36, 8, 128, 40)
LLAMA_3_1_70B_OF_4 = Shape(80, 2, 128, 30, group=8)
SHAPES = [LLAMA_3_2_1B, QWEN3_8B, LLAMA_3_1_70B_OF_4]
LONG = 40_960


def one_among_many(shape: Shape) -> list[tuple[int, int]]:
    """[requests] tokens before and after: short ones, and one whose heads are not counted yet."""
    return [(2048, 512)] * 255 + [(LONG, LONG)]


def all_long(shape: Shape) -> list[tuple[int, int]]:
    """Requests that fill the cache at a quarter, the longest head of each twice the mean."""
    number = min(256, shape.most_tokens // (LONG // 4 + STEPS * BLOCK))
    return [(LONG, LONG // 2)] * number


def rising(shape: Shape) -> list[tuple[int, int]]:
    """Requests of every length, longest heads three times the mean."""
    lengths = [LONG * index // 192 for index in range(1, 193)]
    while sum(length // 4 + STEPS * BLOCK for length in lengths) > shape.most_tokens:
        lengths = lengths[::2]
    return [(length, length * 3 // 4) for length in lengths]


def pool_of(shape: Shape, num_bytes: int) -> InterleavedPagePool:
    """In bf16, which has shapes alone."""
    size = 2 * BLOCK * shape.head_size
    options = {"dtype": torch.bfloat16, "device": ACCELERATOR}
    return InterleavedPagePool(
        pages=torch.empty(num_bytes // (2 * size), size, **options),
        pages_per_block=shape.num_layers * shape.num_heads,
        layer_offsets=torch.empty(shape.num_layers, dtype=torch.int64, device=ACCELERATOR),
        num_heads=shape.num_heads,
        block_size=BLOCK,
        head_size=shape.head_size,
    )


@pytest.mark.parametrize("batch", [one_among_many, all_long, rising])
@pytest.mark.parametrize("shape", SHAPES)
def test_tables_stay_within_their_share(
    shape: Shape, batch: Callable[[Shape], list[tuple[int, int]]]
) -> None:
    requests, pool = batch(shape), pool_of(shape, shape.cache_bytes)
    names = [f"r{index}" for index in range(len(requests))]
    lengths = np.array([length for length, _ in requests])
    block_table = torch.zeros(len(names), LONG // BLOCK + STEPS, device=ACCELERATOR).int()
    with LiveBytes() as memory:
        tables, before = PageTables(pool), memory.live
        scales, policy = [1.0] * shape.num_layers, resolve("momentkv")
        graphs = DecodeSteps(pool, 256, 4 * shape.num_heads, scales, policy, records=True)
        assert memory.live - before < 2**21
        batches = ResidentBatches(tables)
        for index, (length, longest) in enumerate(requests):
            slot = tables.acquire(names[index])
            tables.rows.reserve(slot, longest // BLOCK)
            tables.begin_tail(slot, length // BLOCK, longest // BLOCK)
            if index % 8 == 0:
                step(batches, names, lengths, block_table)
        for _ in range(STEPS):
            lengths += BLOCK
            step(batches, names, lengths, block_table)
    assert graphs.scales
    assert 0 < memory.peak - before < TABLES_SHARE * shape.cache_bytes


def step(
    batches: ResidentBatches, names: list[str], lengths: Integers, block_table: torch.Tensor
) -> None:
    seq_lens = torch.zeros(len(names), dtype=torch.int32, device=ACCELERATOR)
    found = batches.read(names, lengths, seq_lens, block_table)
    starts = np.arange(len(names) + 1)
    queries = [each for batch in found for each in query_batches(batch, starts)]
    assert all(each.tile_ends(batches.tables.pool) for each in queries)


def runner_of(shape: Shape, policy: str, num_rings: int) -> EventRunner:
    """Makes the runner of a server that measures itself or serves."""
    heads = (shape.num_heads, shape.num_heads * shape.group)
    pipeline = resolve(policy).bind(shape.num_layers, *heads, BLOCK)
    pool = pool_of(shape, shape.cache_bytes)
    windows = QueryWindows(
        shape.num_layers, pipeline.needs.window_size, pool.device, num_buffers=num_rings
    )
    root = None
    if pipeline.needs.output_root:
        size = (shape.num_heads * shape.group, shape.head_size, shape.head_size)
        root = torch.empty(size, device=pool.device)
    weights = [LayerWeights(output_root=root)] * shape.num_layers
    return EventRunner(PageTables(pool), windows, {policy: pipeline}, weights)


def event_at(name: str, policy: str, num_tokens: int, window_size: int) -> EventPlan:
    """Down to a quarter, of a request that was compressed before at half of its length."""
    blocks = num_tokens // BLOCK
    return EventPlan(
        request_id=name,
        group=0,
        policy=policy,
        trigger="decode",
        position=num_tokens,
        window_size=min(window_size, num_tokens),
        first_block=blocks // 2,
        end_block=blocks,
        resident_blocks=blocks // 4,
        fresh_block_ids=tuple(range(blocks // 4)),
    )


@pytest.mark.parametrize(("batch", "policy"), [(one_among_many, "h2o"), (all_long, "snapkv")])
@pytest.mark.parametrize("shape", SHAPES)
def test_events_of_all_requests_in_one_step_stay_within_the_reserve(
    shape: Shape, batch: Callable[[Shape], list[tuple[int, int]]], policy: str
) -> None:
    """Each with a ring of queries and page tables, and generating when it is time again."""
    lengths = np.array([length for length, _ in batch(shape)])
    names = [f"r{index}" for index in range(len(lengths))]
    num_queries = shape.num_heads * shape.group
    with launched(), LiveBytes() as measured:
        measuring = runner_of(shape, policy, len(names))
        pool_bytes, pool = measured.live, measuring.pool
        DummyRuns(measuring, num_queries, block=0).longest(LONG)
    block_table = torch.zeros(len(names), LONG // BLOCK + 1, device=ACCELERATOR).int()
    seq_lens = torch.zeros(len(names), dtype=torch.int32, device=ACCELERATOR)
    queries = torch.zeros(len(names), num_queries, shape.head_size, device=ACCELERATOR)
    with launched(), LiveBytes() as memory:
        runner = runner_of(shape, policy, len(names))
        assert pool is not runner.pool
        batches, size = ResidentBatches(runner.tables), runner.windows.window_size
        for name, length in zip(names, lengths.tolist(), strict=True):
            blocks = length // BLOCK
            slot = runner.tables.acquire(name)
            runner.tables.rows.reserve(slot, blocks // 2)
            runner.tables.begin_tail(slot, blocks // 2, blocks // 2)
            runner.tables.layer_pages[name] = [blocks // 4 * shape.num_heads] * shape.num_layers
        before = lengths - 1
        batches.read(names, before, seq_lens, block_table)
        seen = [Observation(0, length, 1) for length in before.tolist()]
        where = runner.windows.locate(list(zip(names, range(len(names)), seen, strict=True)))
        batches.read(names, lengths, seq_lens, block_table)
        plans = [
            event_at(name, policy, length, size)
            for name, length in zip(names, lengths.tolist(), strict=True)
        ]
        events = [runner.begin(plan, row) for plan, row in zip(plans, block_table, strict=True)]
        found = runner.batches(events)
        runner.windows.record(0, queries.bfloat16(), where)
        for some in (found[0], found[-1]):
            runner.run_layer(some, 0, 1.0)
    most = reserve(measured.peak - pool_bytes, shape.cache_bytes)
    assert 0 < memory.peak - pool_bytes < most


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv+criticalkv"])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_held_for_several_layers_stay_within_the_reserve(shape: Shape, policy: str) -> None:
    """Prompts that end in one step, too unlike to run together: each in several layers."""
    lengths = [512, 656, 832, 1056, 1344]
    num_queries = shape.num_heads * shape.group
    with launched(), LiveBytes() as measured:
        measuring = runner_of(shape, policy, 8)
        pool_bytes = measured.live
        DummyRuns(measuring, num_queries, block=0).longest(LONG)
    queries = torch.zeros(sum(lengths), num_queries, shape.head_size, device=ACCELERATOR)
    queries = queries.bfloat16()
    with launched(), LiveBytes() as memory:
        runner = runner_of(shape, policy, 8)
        assert measuring.pool is not runner.pool
        size = runner.windows.window_size
        plans = [
            replace(event_at(f"r{index}", policy, length, size), first_block=0, resident_blocks=0)
            for index, length in enumerate(lengths)
        ]
        row = torch.zeros(LONG // BLOCK, device=ACCELERATOR).int()
        events = [runner.begin(plan, row) for plan in plans]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        seen = [Observation(plan.position - size, plan.position - size, size) for plan in plans]
        asked = list(zip((plan.request_id for plan in plans), starts, seen, strict=True))
        where = runner.windows.locate(asked, plans)
        batches = runner.batches(events, where.in_step)
        assert sum(len(batch.layers[-1].layers) for batch in batches) >= 30
        most = max((batch.layers[-1].layers for batch in batches), key=len)
        for layer in most:
            runner.windows.record(layer, queries, where)
            for batch in batches:
                if layer in batch.layers[-1].layers:
                    runner.run_layer(batch, layer, 1.0)
    rings = 2 * shape.num_layers * 8 * size * num_queries * shape.head_size
    held = 2 * 32 * size * num_queries * shape.head_size
    assert memory.peak - pool_bytes > held
    assert memory.peak + rings < measured.peak


@pytest.mark.parametrize("shape", SHAPES)
def test_contexts_prepared_at_once_stay_within_the_reserve(shape: Shape) -> None:
    """Together they have as many tokens as the longest request; then one has its event."""
    num_queries, policy = shape.num_heads * shape.group, "adakv"
    with launched(), LiveBytes() as measured:
        measuring = runner_of(shape, policy, 8)
        pool_bytes = measured.live
        DummyRuns(measuring, num_queries, block=0).longest(LONG, prepares=True)
    contexts = {"a": LONG // 2, "b": LONG // 4, "c": LONG // 4}
    behind = [2, 100, 2048]
    starts = np.cumsum([0, *behind])
    lengths = np.array([*contexts.values()]) + behind
    block_table = torch.zeros(3, LONG // BLOCK, device=ACCELERATOR).int()
    queries = torch.zeros(int(starts[-1]), num_queries, shape.head_size, device=ACCELERATOR)
    queries = queries.bfloat16()
    with launched(), LiveBytes() as memory:
        runner = runner_of(shape, policy, 8)
        assert measuring.pool is not runner.pool
        runner.repetitions.register(contexts)
        rows = {name: row for row, name in enumerate(contexts)}
        for work in runner.repetitions.in_step(rows, starts, lengths, block_table):
            for layer in range(shape.num_layers):
                runner.repetitions.score(layer, work, queries, 1.0)
        event = EventPlan(
            request_id="a",
            group=0,
            policy=policy,
            trigger=TRIGGER_PREPARE,
            position=int(lengths[0]),
            window_size=0,
            first_block=0,
            end_block=contexts["a"] // BLOCK,
            resident_blocks=0,
            fresh_block_ids=tuple(range(contexts["a"] // BLOCK // 4)),
        )
        (batch,) = runner.batches([runner.begin(event, block_table[0])])
        runner.run_layer(batch, 0, 1.0)
    assert 0 < memory.peak - pool_bytes < reserve(measured.peak - pool_bytes, 0)


@pytest.mark.parametrize("rule", ["quest:0.25", "quest:0.25,parts=4", "quest:0.25,bounds=int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_reads_stay_within_the_reserve(shape: Shape, rule: str) -> None:
    """The cache is full of long requests, one of which is still at its prompt."""
    read_rule = ReadRule.parse(rule)
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=shape.num_heads,
        head_size=shape.head_size,
        dtype=torch.bfloat16,
    )
    beside = [(spec, torch.bfloat16, summary_kind(read_rule))]
    reserved = reserve(0, shape.cache_bytes, beside)
    pool = pool_of(shape, shape.cache_bytes - reserved)
    number = shape.most_tokens // (LONG + BLOCK)
    names, lengths = [f"r{index}" for index in range(number)], np.full(number, LONG)
    num_queries = np.array([2] + [1] * (number - 1))
    block_table = torch.zeros(number, LONG // BLOCK + 1, device=ACCELERATOR).int()
    seq_lens = torch.zeros(number, dtype=torch.int32, device=ACCELERATOR)
    with LiveBytes() as memory:
        readers = SparseReads(read_rule, PageTables(pool))
        batches = ResidentBatches(readers.tables)
        for count in (np.ones(number, dtype=np.int64), num_queries):
            readers.admit(names, lengths, count)
            for batch in batches.read(names, lengths, seq_lens, block_table):
                [reading], _ = readers.split(batch)
                sequences, width = reading.pages.page_table.shape[1:]
                # the kernel's scores and choice
                torch.zeros(sequences, width + reading.choice.most, device=ACCELERATOR)
    assert 0 < memory.peak < reserved
