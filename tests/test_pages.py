"""Pages: packings are permutations, and a page view reads what a layer wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.errors import InvariantError, UnsupportedError
from vllm_kvcompress.pages import PagePool, find_packing, flat_pages, known_packings

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


def test_a_layer_major_cache_is_refused() -> None:
    cache = torch.zeros(2, 5, 3, 4, 12)  # layers outermost
    with pytest.raises(InvariantError, match="must be BLHNC"):
        flat_pages([cache[0], torch.zeros(5, 3, 4, 12)])


@pytest.mark.parametrize("key_name", ["rows", "columns", "amx-key"])
@pytest.mark.parametrize("value_name", ["rows", "amx-value"])
def test_written_pages_read_back(key_name: str, value_name: str) -> None:
    packings = {p.name: p for p in known_packings(16, 32)}
    pool = PagePool(
        pages=torch.zeros(10, 2 * 16 * 32),
        pages_per_block=2,
        layer_offsets=torch.tensor([0, 1]),
        num_heads=1,
        key_packing=packings[key_name],
        value_packing=packings[value_name],
    )
    keys, values = torch.randn(3, 16, 32), torch.randn(3, 16, 32)
    where = torch.tensor([7, 2, 5])
    pool.write(where, keys, values)
    assert torch.equal(pool.keys(where), keys)
    assert torch.equal(pool.values(where), values)
    untouched = [i for i in range(10) if i not in where.tolist()]
    assert not pool.pages[untouched].any()
    assert pool.fresh_pages(torch.tensor([4, 0])).tolist() == [8, 9, 0, 1]
