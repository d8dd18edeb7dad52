"""Runs every kernel once before there are requests, so that none is compiled while they wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.biased import biased_attention, query_groups
from vllm_kvcompress.cache.query_windows.paged import PagedWindows, window_blocks
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

_REQUEST = "warm-up"
CHUNK = 32  # queries that take the larger of a kernel's two sizes, whatever the group


def warm_up(runner: EventRunner, num_query_heads: int, gathers: bool, block: int) -> None:
    """Events of every policy, and attention to what they keep, on a block that nobody reads.

    Args:
        runner: with no requests yet.
        num_query_heads: of this rank.
        gathers: whether compressed requests take this package's attention.
        block: is read for every source, written for every target, and left full of zeros.
    """
    pool = runner.pool
    mine = pool.pages[block * pool.pages_per_block : (block + 1) * pool.pages_per_block]
    mine.zero_()
    for name, pipeline in runner.pipelines.items():
        plans = _plans(runner, name, pipeline, block)
        blocks = plans[-1].end_block + 2
        row = torch.full((blocks,), block, dtype=torch.int32, device=pool.device)
        most = max(CHUNK, plans[0].window_size)
        queries = pool.pages.new_zeros((most, num_query_heads, pool.head_size))
        for plan in plans:
            _compress(runner, plan, row, queries, block)
        if gathers:
            _attend(runner, plans[-1], row, queries)
        runner.tables.release(_REQUEST)
        runner.windows.release(_REQUEST)
    mine.zero_()


def _plans(runner: EventRunner, name: str, pipeline: Pipeline, block: int) -> list[EventPlan]:
    """Of the smallest events that have everything: a window, a partial block, room for state.

    The second, which finds what the first has left, only where requests are compressed again.
    """
    pool, window = runner.pool, pipeline.needs.window_size
    num_kept = pipeline.least_blocks(
        pool.num_heads, pool.head_size, pool.block_size, pool.page_bytes
    )
    num_blocks = max(2 * num_kept, window // pool.block_size + 2)
    first = EventPlan(
        request_id=_REQUEST,
        group=0,
        policy=name,
        trigger="",
        position=num_blocks * pool.block_size + 1,
        window_size=window,
        first_block=0,
        end_block=num_blocks,
        resident_blocks=0,
        fresh_block_ids=(block,) * num_kept,
    )
    again = replace(
        first,
        position=first.position + num_blocks * pool.block_size,
        first_block=num_blocks,
        end_block=2 * num_blocks,
        resident_blocks=num_kept,
    )
    return [first, again] if pipeline.repeats else [first]


def _compress(
    runner: EventRunner, plan: EventPlan, row: Tensor, queries: Tensor, block: int
) -> None:
    """One event, as a step runs it."""
    if plan.resident_blocks:
        slot = np.array([runner.tables.slots[_REQUEST]])
        tokens, rows = np.array([plan.position]), np.array([0])
        runner.tables.extend_tails(slot, rows, row[None], tokens)
    if plan.window_size:
        _record(runner, plan, queries, block)
    event = runner.begin(plan, row)
    for layer in range(runner.pool.num_layers):
        runner.run_layer(event, layer, 1.0)
    runner.finish(event)


def _record(runner: EventRunner, plan: EventPlan, queries: Tensor, block: int) -> None:
    """The queries that the event observes."""
    pool, windows, size = runner.pool, runner.windows, plan.window_size
    if isinstance(windows, PagedWindows):
        count = window_blocks(
            windows.window_size, queries.shape[1], pool.num_heads, pool.block_size
        )
        windows.hold(_REQUEST, (block,) * count)
    seen = Observation(offset=0, position=plan.position - size, num_tokens=size)
    located = windows.locate([(_REQUEST, 0, seen)])
    for layer in range(pool.num_layers):
        windows.record(layer, queries, located)


def _attend(runner: EventRunner, plan: EventPlan, row: Tensor, queries: Tensor) -> None:
    """Attention of a generated token, and of a short and a longer chunk."""
    batches = ResidentBatches(runner.tables, runner.read_by_attention)
    num_tokens = plan.position + 1
    lengths = row.new_full((1,), num_tokens)
    batch = batches.read([_REQUEST], np.array([num_tokens]), lengths, row[None])
    assert batch is not None
    for num_queries in (1, 2, CHUNK):
        for group in query_groups(batch, np.array([0, num_queries])):
            rows = queries[:num_queries]
            biased_attention(runner, 0, group, rows, torch.empty_like(rows), 1.0)
