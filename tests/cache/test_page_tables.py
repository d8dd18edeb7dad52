"""Page tables against dictionaries of lists, through random sequences of what a worker does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.attention.batch import ResidentBatch, ResidentBatches
from vllm_kvcompress.cache.page_order import known_packings
from vllm_kvcompress.cache.page_rows import RUN, PageIdRows
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import PackedPagePool
from vllm_kvcompress.cache.query_windows import PagedWindows, QueryWindows, window_blocks
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

LAYERS, HEADS, SIZE = 2, 3, 4
CPU = torch.device("cpu")


def make_tables() -> PageTables:
    packing = known_packings(SIZE, 2)[0]
    pool = PackedPagePool(
        pages=torch.zeros(0, 2 * SIZE * 2),
        pages_per_block=LAYERS * HEADS,
        layer_offsets=torch.tensor([0, HEADS]),
        num_heads=HEADS,
        block_size=SIZE,
        head_size=2,
        packings=(packing, packing),
    )
    return PageTables(pool)


class Model:
    """What the tables should hold, as plain lists."""

    def __init__(self) -> None:
        self.kept: dict[str, list[list[list[int]]]] = {}
        self.first_block: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}

    def row(self, name: str, layer: int, head: int) -> list[int]:
        tail = self.blocks[name][self.first_block[name] :]
        pages = [block * LAYERS * HEADS + layer * HEADS + head for block in tail]
        return self.kept[name][layer][head] + pages

    def grow(self, name: str, num_blocks: int, fresh: int) -> int:
        """New blocks from `fresh` on; the next free one."""
        self.blocks[name] += range(fresh, fresh + num_blocks)
        return fresh + num_blocks


class LateNumber:
    """A number that arrives when it has been asked for so many times."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.number = 0

    @property
    def value(self) -> int | None:
        self.delay -= 1
        return self.number if self.delay < 0 else None


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_tables_hold_what_lists_hold(data: st.DataObject) -> None:
    tables, model, fresh = make_tables(), Model(), 1000
    batches = ResidentBatches(tables)
    batches.max_table_bytes = data.draw(st.sampled_from([0, 2000, 2**26]))
    names = [f"r{i}" for i in range(12)]
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(names))
        action = data.draw(st.sampled_from(["event", "grow", "release"]))
        if action == "release":
            tables.release(name)
            for books in (model.kept, model.first_block, model.blocks):
                books.pop(name, None)
        elif action == "event":
            if name not in model.kept:
                tables.acquire(name)
                model.blocks[name] = [7, 8]
            slot, kept, most = tables.slots[name], [], 0
            for layer in range(LAYERS):
                most_pages = data.draw(st.sampled_from([5, 5, 5, 2 * RUN]))
                counts = [data.draw(st.integers(0, most_pages)) for _ in range(HEADS)]
                pages = list(range(fresh, fresh + sum(counts)))
                fresh += sum(counts)
                tables.replace(
                    range(layer, layer + 1), slot, torch.tensor(counts), torch.tensor(pages).long()
                )
                kept.append([[pages.pop(0) for _ in range(count)] for count in counts])
                most = max(most, *counts)
            model.kept[name] = kept
            model.first_block[name] = len(model.blocks[name]) - 1
            late = data.draw(st.one_of(st.none(), st.builds(LateNumber, st.integers(0, 3))))
            if late is None:
                tables.begin_tail(slot, model.first_block[name], most)
            else:
                late.number = most
                tables.begin_tail(slot, model.first_block[name], most + 3, late)
        elif name in model.kept:
            fresh = model.grow(name, data.draw(st.integers(0, 3)), fresh)
        order = data.draw(st.permutations(sorted({*model.kept, name, "uncompressed"})))
        for _ in range(data.draw(st.integers(0, 3))):
            tables.poll()
            check(batches, model, order)
            if model.kept:
                grown = data.draw(st.sampled_from(sorted(model.kept)))
                fresh = model.grow(grown, data.draw(st.sampled_from([1, 2, RUN])), fresh)


def check(batches: ResidentBatches, model: Model, order: list[str]) -> None:
    """One step of a batch in this order; requests that hold nothing are not compressed."""
    assert set(batches.tables.slots) == set(model.kept)
    blocks = {name: model.blocks.get(name, [3]) for name in order}
    width = max(len(blocks[name]) for name in order)
    block_table = torch.tensor([blocks[n] + [0] * (width - len(blocks[n])) for n in order])
    # Somewhere in the last block, at another place for each request.
    tokens = [(len(blocks[name]) - 1) * SIZE + 1 + i % SIZE for i, name in enumerate(order)]
    seq_lens = torch.tensor(tokens).int()
    found = batches.read(list(order), np.array(tokens), seq_lens, block_table.int())
    rows = sorted(row for batch in found for row in batch.rows.tolist())
    assert rows == [i for i, name in enumerate(order) if name in model.kept]
    for batch in found:
        check_part(batch, model, order, tokens)


def check_part(batch: ResidentBatch, model: Model, order: list[str], tokens: list[int]) -> None:
    """Requests that share a table."""
    page_table, lengths = batch.page_table.tolist(), batch.seq_lens.tolist()
    uncompressed = [i for i, name in enumerate(order) if name not in model.kept]
    assert batch.uncompressed.tolist() == uncompressed
    for i, row_number in enumerate(batch.rows.tolist()):
        name = order[row_number]
        tail_tokens = tokens[row_number] - model.first_block[name] * SIZE
        for layer in range(LAYERS):
            for head in range(HEADS):
                row = model.row(name, layer, head)
                assert page_table[layer][i * HEADS + head][: len(row)] == row
                expected = len(model.kept[name][layer][head]) * SIZE + tail_tokens
                assert lengths[layer][i * HEADS + head] == expected
    assert batch.same_in_all_layers == all(
        torch.equal(row, batch.seq_lens[0]) for row in batch.seq_lens
    )


def test_rows_get_room_for_the_longest_head_where_a_bound_is_known() -> None:
    counts, pages = torch.tensor([RUN - 1, 2, 0]), torch.arange(RUN + 1)
    widths = []
    for bound in (None, RUN - 1):
        tables = make_tables()
        tables.replace(range(1, 2), tables.acquire("a"), counts, pages, bound)
        slot = tables.slots["a"]
        widths.append(int(tables.rows.num_runs[slot]))
        table = tables.rows.read(torch.tensor([slot]), RUN)[1, 0]
        assert table[0, : RUN - 1].tolist() == list(range(RUN - 1))
        assert table[1, :2].tolist() == [RUN - 1, RUN]
        assert tables.counts[1, slot].tolist() == [RUN - 1, 2, 0]
    assert widths == [2, 1]


def test_a_long_request_makes_no_other_s_rows_longer() -> None:
    """Memory follows the sum of all; what is given back is used again."""
    rows = PageIdRows(LAYERS, HEADS, CPU)
    rows.add_slots(64)
    for slot in range(64):
        rows.reserve(slot, 40)
    rows.reserve(7, 40 * RUN)
    sum_of_runs = 63 + 40
    assert rows.runs.shape == (LAYERS, rows.runs.shape[1], HEADS, RUN)
    assert sum_of_runs < rows.runs.shape[1] < 1.3 * sum_of_runs + 8
    had = rows.runs.shape[1]
    for _ in range(9):
        rows.shorten(7, RUN)
        rows.reserve(9, 39 * RUN)
        rows.shorten(9, 0)
        rows.reserve(7, 39 * RUN)
    assert rows.runs.shape[1] == had


def test_rows_are_as_wide_as_a_bound_until_the_number_is_there() -> None:
    tables, late = make_tables(), LateNumber(1)
    late.number = 3
    slot = tables.acquire("a")
    for layer in range(LAYERS):
        tables.replace(range(layer, layer + 1), slot, torch.tensor([3, 1, 0]), torch.arange(4), 4)
    tables.begin_tail(slot, 10, 4, late)
    widths = []
    for _ in range(3):
        tables.poll()
        widths.append(tables.widths(np.array([slot])).tolist())
    assert widths == [[4], [3], [3]]


def test_what_comes_for_a_request_that_is_gone_is_passed_over() -> None:
    tables, late = make_tables(), LateNumber(0)
    late.number = 1
    tables.begin_tail(tables.acquire("a"), 10, 4, late)
    tables.release("a")
    slot = tables.acquire("b")
    tables.begin_tail(slot, 10, 4)
    tables.poll()
    assert tables.widths(np.array([slot])).tolist() == [4]


def test_what_comes_for_an_earlier_event_is_passed_over() -> None:
    tables, late = make_tables(), LateNumber(0)
    late.number = 1
    slot = tables.acquire("a")
    tables.begin_tail(slot, 10, 4, late)
    tables.begin_tail(slot, 12, 5)
    tables.poll()
    assert tables.widths(np.array([slot])).tolist() == [5]


QUERY_HEADS, HEAD_SIZE = 6, 2


def make_paged_windows(window: int, requests: list[str]) -> PagedWindows:
    """Every request with blocks of its own, in no order; nobody else's rows may ever change."""
    count = window_blocks(window, QUERY_HEADS, HEADS, 2 * SIZE)
    packing = known_packings(SIZE, HEAD_SIZE)[0]
    pool = PackedPagePool(
        pages=torch.zeros(count * len(requests) * LAYERS * HEADS, 2 * SIZE * HEAD_SIZE),
        pages_per_block=LAYERS * HEADS,
        layer_offsets=torch.tensor([0, HEADS]),
        num_heads=HEADS,
        block_size=SIZE,
        head_size=HEAD_SIZE,
        packings=(packing, packing),
    )
    windows = PagedWindows(pool, window, QUERY_HEADS)
    blocks = list(range(count * len(requests)))[::-1]
    for index, name in enumerate(requests):
        windows.hold(name, tuple(blocks[index :: len(requests)]))
    return windows


def event(request_id: str, position: int, window: int) -> EventPlan:
    """Makes the event of a request that ends a step with so many tokens."""
    return EventPlan(
        request_id=request_id,
        group=0,
        policy="snapkv",
        trigger="prompt",
        position=position,
        window_size=min(window, position),
        first_block=0,
        end_block=position // SIZE,
        resident_blocks=0,
        fresh_block_ids=(),
    )


@pytest.mark.parametrize("paged", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_query_windows_return_the_last_queries(paged: bool, data: st.DataObject) -> None:
    """Requests advance by random chunks; each window equals a slice of all its queries."""
    window = data.draw(st.integers(1, 9))
    names = [f"r{i}" for i in range(10)]
    windows: QueryWindows | PagedWindows = QueryWindows(LAYERS, window, CPU)
    if paged:
        windows = make_paged_windows(window, names)
    history: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(sorted(history)), unique=True, min_size=1))
        rows, batch = [], []
        for name in chosen:
            start, num = len(history[name]), data.draw(st.integers(1, 8))
            values = [1000.0 * int(name[1:]) + start + i for i in range(num)]
            seen = min(num, window)
            rows.append((name, len(batch), Observation(num - seen, start + num - seen, seen)))
            history[name] += values
            batch += values
        head = torch.arange(QUERY_HEADS * HEAD_SIZE).view(QUERY_HEADS, HEAD_SIZE) / 32
        queries = torch.tensor(batch).view(-1, 1, 1) + head
        ending = data.draw(st.lists(st.sampled_from(chosen), unique=True))
        where = windows.locate(rows, [event(name, len(history[name]), window) for name in ending])
        for layer in range(LAYERS):
            windows.record(layer, queries + 0.5 * layer, where)
            for name in chosen:
                num = min(window, len(history[name]))
                found = windows.find([(name, len(history[name]))], num)
                read = windows.read(layer, found)[:, 0]
                expected = torch.tensor(history[name][-num:]).view(-1, 1, 1) + head + 0.5 * layer
                assert torch.equal(read, expected)
        for name in ending:
            windows.end_event(name)
            if not paged:
                history[name] = []  # a ring begins anew
        if not paged and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(history)))
            windows.release(gone)
            history[gone] = []


def test_windows_that_lie_in_their_step_take_no_room() -> None:
    """128 short prompts in a step, and one that was begun in the step before."""
    names, window = [f"r{i}" for i in range(128)], 4
    windows = QueryWindows(LAYERS, window, CPU)
    queries = torch.arange(128 * 6.0).view(-1, 1, 1)
    begun = windows.locate([("begun", 0, Observation(0, 5, 3))])
    windows.record(0, queries, begun)
    rows = [(name, 6 * index, Observation(2, 2, window)) for index, name in enumerate(names)]
    rows.append(("begun", 100, Observation(0, 8, 1)))
    where = windows.locate(
        rows, [*(event(name, 6, window) for name in names), event("begun", 9, 4)]
    )
    windows.record(0, queries, where)
    assert windows.buffers is not None
    assert windows.buffers.shape[1] == 8
    assert set(windows.slots) == {"begun"}
    two = windows.read(0, windows.find([("r3", 6), ("r100", 6)], window)).squeeze().T.tolist()
    assert two == [[20, 21, 22, 23], [602, 603, 604, 605]]
    read = windows.read(0, windows.find([("begun", 9)], window))
    assert read.flatten().tolist() == [0, 1, 2, 100]
