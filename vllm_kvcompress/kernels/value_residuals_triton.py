"""How far values are from their weighted sum, and neighbours together, over pages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.paged_entries import PagedEntries, expect, per_entry
from vllm_kvcompress.kernels.paged_rows_triton import load_rows
from vllm_kvcompress.kernels.paged_shapes import RESIDUALS_SPLIT

TILE = 32  # entries at once, in fp32
TILES = RESIDUALS_SPLIT // TILE  # that a program of the first pass reads


@kernel("table_stride", "capacity")
def _sums_kernel(
    pages,
    page_table,
    lengths,
    weights,
    sums,
    capacity,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    DIMS: tl.constexpr,
):
    """sums [S, splits, HEAD_SIZE] fp32: one split's values, weighted."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    dims = tl.arange(0, DIMS)
    total = tl.zeros([DIMS], tl.float32)
    for tile in range(split * TILES, tl.minimum((split + 1) * TILES, tl.cdiv(length, TILE))):
        nth = tile * TILE + tl.arange(0, TILE)
        present = nth < length
        weight = tl.load(weights + head * capacity + nth, mask=present, other=0.0)
        values = load_rows(
            pages + HEAD_SIZE,
            page_table + head * table_stride,
            nth,
            present,
            page_stride,
            BLOCK_SIZE,
            HEAD_SIZE,
            DIMS,
        )
        total += tl.sum(weight[:, None] * values.to(tl.float32), 0)
    place = (head * tl.num_programs(0) + split) * HEAD_SIZE + dims
    tl.store(sums + place, total, mask=dims < HEAD_SIZE)


@kernel("table_stride", "capacity")
def _norms_kernel(
    pages,
    page_table,
    lengths,
    centres,
    norms,
    capacity,
    page_stride,
    table_stride,
    ORDER: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """norms [1 + PAIRS, S, capacity] fp32 of residuals, and of sums of two; 0 where none is."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    table_row = page_table + head * table_stride
    nth = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_SIZE
    centre = tl.load(centres + head * HEAD_SIZE + dims, mask=inside, other=0.0)
    own = load_rows(
        pages + HEAD_SIZE, table_row, nth, nth < length, page_stride, BLOCK_SIZE, HEAD_SIZE, DIMS
    )
    rest = own.to(tl.float32) - centre[None, :]
    norm = tl.sum(tl.abs(rest), 1) if ORDER == 1 else tl.sqrt(tl.sum(rest * rest, 1))
    to = norms + head * capacity + nth
    tl.store(to, tl.where(nth < length, norm, 0.0), mask=nth < capacity)
    for apart in tl.static_range(1, PAIRS + 1):
        behind = nth + apart
        theirs = load_rows(
            pages + HEAD_SIZE,
            table_row,
            behind,
            behind < length,
            page_stride,
            BLOCK_SIZE,
            HEAD_SIZE,
            DIMS,
        )
        both = rest + theirs.to(tl.float32) - centre[None, :]
        norm = tl.where(behind < length, tl.sqrt(tl.sum(both * both, 1)), 0.0)
        to += tl.num_programs(1).to(tl.int64) * capacity
        tl.store(to, norm, mask=nth < capacity)


def value_residuals(entries: PagedEntries, weights: Tensor, order: int, num_pairs: int) -> Tensor:
    """As `paged_torch.value_residuals`, in Triton."""
    num_heads, capacity, dims = entries.num_sequences, entries.capacity, entries.head_size
    weights = per_entry(entries, "weights", weights, torch.float32)
    expect(order in (1, 2), "norms of order 1 or 2", str(order), "pass one of these")
    norms = torch.empty((1 + num_pairs, num_heads, capacity), device=entries.device)
    if norms.numel() == 0:
        return norms
    splits = triton.cdiv(capacity, RESIDUALS_SPLIT)
    sums = norms.new_empty((num_heads, splits, dims))
    pages = (entries.pages, entries.page_table, entries.flat_lengths)
    strides = (capacity, entries.pages.stride(0), entries.page_table.stride(0))
    sizes = dict(
        BLOCK_SIZE=entries.block_size, HEAD_SIZE=dims, TILE=TILE, DIMS=padded(dims), num_warps=4
    )
    with on_device(entries):
        _sums_kernel[(splits, num_heads)](*pages, weights, sums, *strides, TILES=TILES, **sizes)
        _norms_kernel[(triton.cdiv(capacity, TILE), num_heads)](
            *pages, sums.sum(dim=1), norms, *strides, ORDER=order, PAIRS=num_pairs, **sizes
        )
    return norms
