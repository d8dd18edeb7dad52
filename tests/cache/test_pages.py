"""Pages: packings are permutations, and a page view reads what a layer wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.cache.page_order import find_packing, known_packings
from vllm_kvcompress.cache.pages import (
    KEYS,
    VALUES,
    InterleavedPagePool,
    LatentPagePool,
    PackedPagePool,
    divided,
    flat_pages,
)
from vllm_kvcompress.errors import InvariantError, UnsupportedError

SIZES = [(16, 32), (32, 32), (32, 80), (128, 64), (4, 6)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("block_size", "head_size"), SIZES)
def test_packings_are_permutations(block_size: int, head_size: int, dtype: torch.dtype) -> None:
    rows = torch.arange(3 * block_size * head_size).view(3, block_size, head_size).to(dtype)
    for packing in known_packings(block_size, head_size):
        packed = packing.from_rows(rows)
        assert packed.shape == (3, block_size * head_size)
        assert sorted(packed.flatten().tolist()) == rows.flatten().tolist()
        assert torch.equal(packing.to_rows(packed), rows)


@pytest.mark.parametrize(("block_size", "head_size"), SIZES)
def test_single_rows_are_those_of_the_page(block_size: int, head_size: int) -> None:
    rows = torch.arange(3 * block_size * head_size).view(3, block_size, head_size)
    pages, tokens = torch.tensor([2, 0, 2, 1]), torch.tensor([0, block_size - 1, 3, 1])
    for packing in known_packings(block_size, head_size):
        taken = packing.take_rows(packing.from_rows(rows), pages, tokens)
        for row, page, token in zip(taken, pages.tolist(), tokens.tolist(), strict=True):
            assert torch.equal(row, rows[page, token])


def test_amx_offsets_are_those_that_were_seen() -> None:
    """Key element (t, d) at (t//16, d//2, t%16, d%2); value at (d//16, t//2, d%16, t%2)."""
    size, dim = 32, 64
    packings = {p.name: p for p in known_packings(size, dim)}
    rows = torch.arange(size * dim).view(size, dim)
    keys, values = (packings[n].from_rows(rows) for n in ("amx-key", "amx-value"))
    for t in range(size):
        for d in range(dim):
            assert keys[(t // 16) * 16 * dim + (d // 2) * 32 + (t % 16) * 2 + d % 2] == rows[t, d]
            offset = (d // 16) * 16 * size + (t // 2) * 32 + (d % 16) * 2 + t % 2
            assert values[offset] == rows[t, d]


def test_the_probe_names_the_packing_or_refuses() -> None:
    rows = torch.arange(32 * 32).view(32, 32)
    for packing in known_packings(32, 32):
        assert find_packing(packing.from_rows(rows), rows, "keys") == packing
    shuffled = rows.flatten()[torch.randperm(32 * 32, generator=torch.Generator().manual_seed(1))]
    with pytest.raises(UnsupportedError, match="stores keys in pages in an order that is none of"):
        find_packing(shuffled, rows, "keys")


def block_major(num_blocks: int, layers: int, heads: int, size: int, dim: int) -> torch.Tensor:
    """[blocks, layers, heads, tokens, 2 * dim] with a different number everywhere."""
    shape = (num_blocks, layers, heads, size, 2 * dim)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@given(layers=st.integers(1, 3), heads=st.integers(1, 3), blocks=st.integers(1, 4))
def test_page_view_covers_every_layer_and_head(layers: int, heads: int, blocks: int) -> None:
    size, dim = 4, 6
    cache = block_major(blocks, layers, heads, size, dim)
    pages, per_block, offsets = flat_pages([cache[:, layer] for layer in range(layers)])
    assert per_block == layers * heads
    for block in range(blocks):
        for layer in range(layers):
            for head in range(heads):
                page = pages[block * per_block + offsets[layer] + head]
                assert torch.equal(page, cache[block, layer, head].flatten())


@given(
    layers=st.integers(1, 3),
    others=st.integers(0, 2),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 4),
    split=st.integers(1, 4),
)
def test_parts_of_blocks_are_blocks_of_fewer_tokens(
    layers: int, others: int, heads: int, blocks: int, split: int
) -> None:
    """Every token, written where attention kernels write it, lies in one page of its block."""
    part, dim = 4, 6
    cache = torch.full_like(block_major(blocks, layers + others, heads, split * part, dim), -1)
    views = [divided(cache[:, layer], split) for layer in range(layers)]
    pages, per_part, offsets = flat_pages(views)
    assert per_part == (layers + others) * heads
    pool = InterleavedPagePool(pages, per_part, torch.tensor(offsets), heads, part, dim)
    for slot in range(blocks * split * part):  # the same number with blocks and with parts
        for layer, view in enumerate(views):
            for head in range(heads):
                number = (slot * layers + layer) * heads + head
                view[slot // part, head, slot % part] = float(number)
    for block in range(blocks):
        written = cache[block].flatten()
        assert int((written >= 0).sum()) == layers * heads * split * part * 2 * dim
        for token in range(split * part):
            slot = block * split * part + token
            for layer in range(layers):
                for head in range(heads):
                    page = pool.layer_page_ids(layer, torch.tensor([slot // part]))[head]
                    row = pool.take(page, torch.tensor([slot % part]), VALUES)
                    assert (row == (slot * layers + layer) * heads + head).all()


def test_blocks_of_no_whole_parts_are_refused() -> None:
    cache = block_major(3, 2, 2, 12, 6)
    with pytest.raises(InvariantError, match="expected blocks of 5 whole parts"):
        divided(cache[:, 0], 5)
    padded = torch.zeros(3, 2 * 2 * 12 * 12 + 8)[:, :-8].view(3, 2, 2, 12, 12)
    with pytest.raises(InvariantError, match="without padding"):
        divided(padded[:, 0], 3)


def test_a_layer_major_cache_is_refused() -> None:
    cache = torch.zeros(2, 5, 3, 4, 12)  # layers outermost
    with pytest.raises(InvariantError, match="must be BLHNC"):
        flat_pages([cache[0], torch.zeros(5, 3, 4, 12)])


@pytest.mark.parametrize("key_name", ["rows", "columns", "amx-key"])
@pytest.mark.parametrize("value_name", ["rows", "amx-value"])
def test_written_pages_read_back(key_name: str, value_name: str) -> None:
    packings = {p.name: p for p in known_packings(16, 32)}
    pool = PackedPagePool(
        pages=torch.zeros(10, 2 * 16 * 32),
        pages_per_block=2,
        layer_offsets=torch.tensor([0, 1]),
        num_heads=1,
        block_size=16,
        head_size=32,
        packings=(packings[key_name], packings[value_name]),
    )
    keys, values = torch.randn(3, 16, 32), torch.randn(3, 16, 32)
    where = torch.tensor([7, 2, 5])
    pool.write(where, keys, values)
    assert torch.equal(pool.keys(where, 0), keys)
    assert torch.equal(pool.values(where, 0), values)
    untouched = [i for i in range(10) if i not in where.tolist()]
    assert not pool.pages[untouched].any()
    assert pool.fresh_pages(torch.tensor([4, 0])).tolist() == [8, 9, 0, 1]


def test_packings_of_another_page_are_refused() -> None:
    packing = known_packings(16, 32)[0]
    with pytest.raises(InvariantError, match="packings of 16 tokens of 64 elements, got rows of"):
        PackedPagePool(
            torch.zeros(1, 2 * 16 * 64), 1, torch.tensor([0]), 1, 16, 64, (packing, packing)
        )


def interleaved_pool(size: int, dim: int) -> InterleavedPagePool:
    """Four blocks of two layers of two heads, seen through the layers' caches."""
    cache = block_major(4, 2, 2, size, dim)
    pages, per_block, offsets = flat_pages([cache[:, 0], cache[:, 1]])
    return InterleavedPagePool(pages, per_block, torch.tensor(offsets), 2, size, dim)


@pytest.mark.parametrize(("size", "dim"), [(16, 32), (4, 6), (1, 2)])
def test_interleaved_pages_are_the_layers_own_keys_and_values(size: int, dim: int) -> None:
    """`split` along the last dimension, as vLLM's GPU backends take K and V out of their cache."""
    pool = interleaved_pool(size, dim)
    cache = pool.pages.view(4, 2, 2, size, 2 * dim)
    keys, values = cache.split(dim, dim=-1)
    for block in range(4):
        for layer in range(2):
            for head in range(2):
                page = torch.tensor([pool.fresh_pages(torch.tensor([block]))[layer * 2 + head]])
                assert torch.equal(pool.keys(page, layer)[0], keys[block, layer, head])
                assert torch.equal(pool.values(page, layer)[0], values[block, layer, head])
                token = torch.tensor([size - 1])
                assert torch.equal(
                    pool.take(page, token, VALUES)[0], values[block, layer, head, -1]
                )


def test_interleaved_pages_read_back_and_leave_others_alone() -> None:
    pool = interleaved_pool(4, 6)
    before, where = pool.pages.clone(), torch.tensor([[7, 2], [5, 11]])
    keys, values = torch.randn(2, 2, 4, 6), torch.randn(2, 2, 4, 6)
    pool.write(where, keys, values)
    assert torch.equal(pool.keys(where, 0), keys)
    assert torch.equal(pool.values(where, 0), values)
    for page in range(16):
        if page not in where:
            assert torch.equal(pool.pages[page], before[page])


def test_latent_rows_are_keys_and_their_beginnings_values() -> None:
    """Two layers of one row of 6 elements per token, of which 4 are the value."""
    cache = torch.arange(3 * 2 * 4 * 6, dtype=torch.float32).view(3, 2, 4, 6)
    pages, per_block, offsets = flat_pages([cache[:, layer][:, None] for layer in range(2)])
    layers = torch.tensor(offsets)
    pool = LatentPagePool(pages, per_block, layers, 1, 4, 6, value_size=4)
    assert pool.cache_of_one_head.shape == (6, 1, 4, 6)
    page, zeros = pool.layer_page_ids(1, torch.tensor([2]))[0], torch.zeros(1, 2)
    row = cache[2, 1, 3].clone()
    token = torch.tensor([3])
    assert torch.equal(pool.keys(page, 1)[0, 3], row)
    assert torch.equal(pool.values(page, 1)[0, 3], torch.cat((row[:4], zeros[0])))
    assert torch.equal(pool.take(page, token, KEYS)[0], row)
    assert torch.equal(pool.take(page, token, VALUES), torch.cat((row[None, :4], zeros), dim=1))
    assert torch.equal(cache[2, 1, 3], row), "reading a value changes no row"
    pool.put(page, token, KEYS, torch.full((1, 6), -1.0))
    pool.write(page - 1, torch.full((1, 4, 6), -2.0))
    assert bool((cache[2, 1, 3] == -1).all())
    assert bool((cache[2, 0] == -2).all())
    assert int((cache < 0).sum()) == 6 + 24


def test_entries_are_the_tokens_of_a_page_table() -> None:
    pool = interleaved_pool(4, 6)
    table, lengths = torch.tensor([[3, 9], [14, -1]]), torch.tensor([7, 2])
    entries = pool.entries(table, lengths)
    keys, values = entries.keys(), entries.values()
    for sequence, length in enumerate(lengths.tolist()):
        for index in range(length):
            page, token = table[sequence, index // 4].item(), index % 4
            row = pool.pages[page, token * 12 : token * 12 + 12]
            assert torch.equal(torch.cat((keys[sequence, index], values[sequence, index])), row)
