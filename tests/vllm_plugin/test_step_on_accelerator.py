"""Nothing that runs in every step waits for an accelerator, or mixes its numbers with the host's.

What it computes, `test_page_tables.py` and `test_biased_attention.py` say, on the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.accelerator import ACCELERATOR, Operators, launched, watched
from tests.step_cases import (
    DIM,
    GROUP,
    NUM_HEADS,
    NUM_LAYERS,
    REQUESTS,
    SIZE,
    Request,
    Step,
    make_pool,
)
from vllm_kvcompress.attention.batch import ResidentBatch, ResidentBatches
from vllm_kvcompress.attention.biased import biased_attention, query_batches
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PagePool
from vllm_kvcompress.cache.query_windows import PagedWindows, QueryWindows, window_blocks
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies.registry import resolve
from vllm_kvcompress.scheduling.plan import Observation

QUERY_HEADS = NUM_HEADS * GROUP


def run_event(tables: PageTables, name: str, num_pages: int, end_block: int) -> None:
    """What an event leaves: pages in every layer, and a page of numbers."""
    slot = tables.slots.get(name)
    if slot is None:
        slot = tables.acquire(name)
    for layer in range(NUM_LAYERS):
        counts = upload([num_pages, 0], tables.pool.device)
        pages = upload(list(range(num_pages)), tables.pool.device)
        tables.replace(range(layer, layer + 1), slot, counts, pages)
        tables.replace_state(layer, slot, pages[:1])
    tables.layer_pages[name] = [num_pages] * NUM_LAYERS
    tables.begin_tail(slot, end_block, num_pages)


def read(batches: ResidentBatches, num_tokens: dict[str, int]) -> ResidentBatch | None:
    tokens = np.array(list(num_tokens.values()), dtype=np.int32)
    device = batches.tables.pool.device
    block_table = torch.zeros(len(tokens), 64, dtype=torch.int32, device=device)
    found = batches.read(list(num_tokens), tokens, upload(tokens, device), block_table)
    return found[0] if found else None


def test_tables_and_batches_through_a_request_s_life() -> None:
    """Events, decoding within a block and beyond it, a full table, chunks, saving, leaving."""
    with watched():
        tables = PageTables(make_pool(InterleavedPagePool, ACCELERATOR))
        batches = ResidentBatches(tables)
        assert read(batches, {"a": 9, "b": 7}) is None
        run_event(tables, "a", 5, 2)
        for num_tokens in range(9, 9 + 20 * SIZE):
            batch = read(batches, {"b": 7, "a": num_tokens})
            assert batch is not None
            width = 5 + -(-num_tokens // SIZE) - 2
            assert batch.page_table.shape == (NUM_LAYERS, NUM_HEADS, width)
            assert batch.seq_lens.shape == (NUM_LAYERS, NUM_HEADS)
            assert batch.page_table.device == batch.seq_lens.device == ACCELERATOR
            assert batch.page_table.dtype == batch.seq_lens.dtype == torch.int32
            assert (batch.rows.tolist(), batch.uncompressed.tolist()) == ([1], [0])
            assert not batch.same_in_all_layers
        run_event(tables, "b", 40, 1)
        tables.save("b", state=3)
        batch = read(batches, {"b": 7, "a": num_tokens})
        assert batch is not None
        assert batch.page_table.shape == (NUM_LAYERS, 2 * NUM_HEADS, 41)
        tables.release("a")
        tables.restore("c", state=3, first_block=1)
        run_event(tables, "b", 6, 20)
        batch = read(batches, {"c": 12, "b": 81})
        assert batch is not None
        assert batch.page_table.shape == (NUM_LAYERS, 2 * NUM_HEADS, 42)


def test_a_batch_s_table_is_kept_while_tails_grow() -> None:
    """New pages are written to it; it moves only when it is full."""
    tables = PageTables(make_pool(InterleavedPagePool))
    batches = ResidentBatches(tables)
    run_event(tables, "a", 5, 2)
    seen = [read(batches, {"a": num_tokens}) for num_tokens in range(9, 64 * SIZE)]
    assert len({batch.page_table.data_ptr() for batch in seen if batch is not None}) == 2


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("num_tokens", [12, 16])  # as they are, and padded
def test_windows(paged: bool, num_tokens: int) -> None:
    window, names = 5, [f"r{index}" for index in range(12)]
    count = window_blocks(window, QUERY_HEADS, NUM_HEADS, 2 * SIZE)
    with watched():
        windows: QueryWindows | PagedWindows = QueryWindows(NUM_LAYERS, window, ACCELERATOR)
        if paged:
            pool = make_pool(InterleavedPagePool, ACCELERATOR)
            windows = PagedWindows(pool, window, QUERY_HEADS)
            for index, name in enumerate(names):
                windows.hold(name, tuple(range(index * count, (index + 1) * count)))
        for step in range(3):
            seen = Observation(0, step, 1)
            where = windows.locate([(name, index, seen) for index, name in enumerate(names)])
            queries = torch.zeros(num_tokens, QUERY_HEADS, DIM, device=ACCELERATOR)
            for layer in range(NUM_LAYERS):
                windows.record(layer, queries, where)
                count, ends = min(window, step + 1), [("r3", step + 1), ("r5", step + 1)]
                found = windows.read(layer, windows.find(ends, count))
                assert found.shape == (count, 2, QUERY_HEADS, DIM)
                assert found.device == ACCELERATOR
        windows.end_event("r3")
        windows.release("r4")


@pytest.mark.parametrize("requests", [REQUESTS, (REQUESTS[0], REQUESTS[3]), (REQUESTS[2],)])
@pytest.mark.parametrize("policy", ["asymkv", "momentkv"])
def test_biased_attention(
    policy: str, requests: tuple[Request, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are read where they lie."""
    monkeypatch.delattr(PagePool, "keys")
    with watched():
        step = Step(resolve(policy), make_pool(InterleavedPagePool, ACCELERATOR), requests)
        batch = step.read()
        queries = upload(step.queries, ACCELERATOR)
        outputs = torch.empty_like(queries)
        for group in query_batches(batch, step.starts):
            for layer in range(NUM_LAYERS):
                biased_attention(step.runner, layer, group, queries, outputs, 0.4)


@pytest.mark.parametrize("policy", ["snapkv", "asymkv", "momentkv"])
@pytest.mark.parametrize(
    ("requests", "number"),
    [((REQUESTS[0], REQUESTS[3]), 0), ((REQUESTS[2],), 0), (REQUESTS, 2)],
)
def test_attention_queues_its_kernels_and_little_else(
    policy: str, requests: tuple[Request, ...], number: int
) -> None:
    """Nothing is gathered in every layer, but queries that others lie between, and their outputs.

    Kernels themselves are not counted.
    """
    step = Step(resolve(policy), make_pool(InterleavedPagePool, ACCELERATOR), requests)
    queries = upload(step.queries, ACCELERATOR)
    outputs = torch.empty_like(queries)
    groups = query_batches(step.read(), step.starts)
    with launched(), Operators() as operators:
        for group in groups:
            biased_attention(step.runner, 1, group, queries, outputs, 0.4)
    assert operators.count == number
