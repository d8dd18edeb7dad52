"""Blocks in host memory, and page tables that follow them back, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cache.test_page_tables import CPU, HEADS, LAYERS, SIZE
from vllm_kvcompress.cache.host_blocks import HostBlocks
from vllm_kvcompress.cache.page_tables import PageTables, SavedTable
from vllm_kvcompress.cache.pages import InterleavedPagePool

PER_BLOCK, NUM_BLOCKS, NUM_SLOTS = LAYERS * HEADS, 12, 9


def make_pool() -> InterleavedPagePool:
    return InterleavedPagePool(
        pages=torch.randn(NUM_BLOCKS * PER_BLOCK, 2 * SIZE * 2),
        pages_per_block=PER_BLOCK,
        layer_offsets=torch.tensor([0, HEADS], device=CPU),
        num_heads=HEADS,
        block_size=SIZE,
        head_size=2,
    )


@pytest.mark.parametrize("seed", range(20))
def test_blocks_come_back_to_others_and_tables_follow(seed: int) -> None:
    """Every page that the table names has its content; all other pages stay as they were."""
    draw, pool = random.Random(seed), make_pool()
    tables, host = PageTables(pool), HostBlocks(pool, NUM_SLOTS)
    count = draw.randrange(1, 6)
    former, blocks = (draw.sample(range(NUM_BLOCKS), count) for _ in range(2))
    slots = draw.sample(range(NUM_SLOTS), count)
    if seed % 2:  # neighbours, which are copied at once
        former, slots = list(range(2, 2 + count)), list(range(count))
    owned = [block * PER_BLOCK + page for block in former for page in range(PER_BLOCK)]
    names = [[[draw.choice(owned) for _ in range(4)] for _ in range(HEADS)] for _ in range(LAYERS)]
    state = [[draw.choice(owned)] for _ in range(LAYERS)]
    stale = (max(former) + 1) * PER_BLOCK  # behind the end of a row
    names[0][0][3] = stale
    table, state_pages = (torch.tensor(each, dtype=torch.int32) for each in (names, state))
    counts = torch.full((LAYERS, HEADS), 3, dtype=torch.int32)
    tables.saved[7] = SavedTable(table, counts, state_pages, [9] * LAYERS, 4)
    before = [page.clone() for page in pool.pages]
    host.store(former, slots)
    for block in former:
        pool.pages[block * PER_BLOCK : (block + 1) * PER_BLOCK] = -1.0
    others = pool.pages.clone()
    host.load(slots, blocks)
    tables.move_saved(7, former, blocks)
    saved = tables.saved[7]
    for layer in range(LAYERS):
        for head in range(HEADS):
            for column, name in enumerate(names[layer][head]):
                moved = int(saved.table[layer, head, column])
                if name == stale:
                    assert moved == stale
                else:
                    assert torch.equal(pool.pages[moved], before[name])
        assert torch.equal(pool.pages[int(saved.state[layer, 0])], before[state[layer][0]])
    for page in range(len(pool.pages)):
        if page // PER_BLOCK not in blocks:
            assert torch.equal(pool.pages[page], others[page])
