"""Numbers that are carried from event to event lie in the state pages as documented."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.event_cases import (
    BLOCK_SIZE,
    GROUP,
    NUM_HEADS,
    Request,
    make_pool,
    state_numbers,
)
from tests.policies.cases import HEAD_SIZE, NUM_LAYERS, Shape, make_pipeline
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.cache.policy_state import PolicyState

SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
CARRIED = {
    "h2o": ("accumulated",),
    "d2o": ("accumulated",),
    "kvmerger": ("bias", "accumulated"),
    "asymkv": ("bias", "positions"),
    "kvslimmer": ("bias", "positions", "running"),
}


@pytest.mark.parametrize("policy", CARRIED)
def test_runs_of_entries_are_found_name_by_name(policy: str, tmp_path: Path) -> None:
    """Numbers per head first, then each name's, head after head."""
    request = Request(make_pipeline(policy, SHAPE, tmp_path), make_pool(InterleavedPagePool))
    request.compress(request.positions[0])
    pool, tables, pipeline = request.pool, request.runner.tables, request.pipeline
    assert pipeline.token_state == CARRIED[policy]
    slot, carried = tables.slots["r"], PolicyState(tables)
    for layer in range(NUM_LAYERS):
        numbers = state_numbers(pool, tables.state[layer, slot]).tolist()
        kept = [BLOCK_SIZE * count for count in tables.counts[layer, slot].tolist()]
        place = NUM_HEADS * pipeline.state_size(HEAD_SIZE)
        for name in CARRIED[policy]:
            runs = carried.entry_numbers(pipeline, name, torch.tensor([slot]))
            found = runs.layers[layer].gathered(max(kept)).tolist()
            for head in range(NUM_HEADS):
                positions = numbers[place : place + kept[head]]
                assert found[head] == positions + [0.0] * (max(kept) - kept[head])
                if name == "positions":
                    assert positions == sorted(set(positions))
                place += kept[head]


@pytest.mark.parametrize("policy", ["momentkv", "d2o"])
def test_runs_of_heads_are_found(policy: str, tmp_path: Path) -> None:
    request = Request(make_pipeline(policy, SHAPE, tmp_path), make_pool(InterleavedPagePool))
    request.compress(request.positions[0])
    pool, tables, pipeline = request.pool, request.runner.tables, request.pipeline
    slot, size = tables.slots["r"], pipeline.state_size(HEAD_SIZE)
    runs = PolicyState(tables).head_numbers(pipeline, torch.tensor([slot]))
    for layer in range(NUM_LAYERS):
        numbers = state_numbers(pool, tables.state[layer, slot])[: NUM_HEADS * size]
        assert torch.equal(runs.layers[layer].whole(size), numbers.view(NUM_HEADS, size))


@pytest.mark.parametrize("kind", [InterleavedPagePool, PackedPagePool])
def test_blocks_with_numbers_make_way_for_tokens(kind: type[PagePool], tmp_path: Path) -> None:
    """Once, and no other block changes: one may hold a prefix that a request hits."""
    request = Request(make_pipeline("h2o", SHAPE, tmp_path), make_pool(kind))
    request.compress(request.positions[0])
    pool, state = request.pool, request.runner.policy_state
    fresh = set(state.blocks)
    assert {page // pool.pages_per_block for page in request.runner.tables.state.flatten().tolist()}
    one, *others = sorted(fresh)
    outside = next(block for block in range(len(pool.pages)) if block not in fresh)
    before = pool.pages.clone().unflatten(0, (-1, pool.pages_per_block))
    state.zero_reused_blocks({one, outside})
    after = pool.pages.unflatten(0, (-1, pool.pages_per_block))
    assert not after[one].any()
    unchanged = [block for block in range(len(before)) if block != one]
    assert torch.equal(after[unchanged].nan_to_num(), before[unchanged].nan_to_num())
    assert state.blocks == set(others)
    pool.pages.fill_(1)
    state.zero_reused_blocks({one})
    assert bool(pool.pages.all())
