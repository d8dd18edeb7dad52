"""MomentKV's state after a set of entries was evicted, over pages.

Twice over the entries, as in the torch twin: once for the means of what was evicted, and once for
the cross moments around these. One pass with uncentred sums would cancel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.fitting_triton import launch_fitting
from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.moments_torch import join_moments, moment_size
from vllm_kvcompress.kernels.paged_entries import PagedEntries, expect, per_entry
from vllm_kvcompress.kernels.paged_rows_triton import entry_offsets

TILE = 32  # entries at once, in fp32
SPLIT_TILES = 16  # that a program reads: few, for enough programs, but each writes [D, D] numbers


@kernel("table_stride", "capacity")
def _sums_kernel(
    pages,
    page_table,
    lengths,
    evicted,
    counts,
    sums,
    page_stride,
    table_stride,
    capacity,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    DIMS: tl.constexpr,
):
    """counts [S, splits] and sums [S, splits, 2, HEAD_SIZE] fp32 of one split's keys and values."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    dims = tl.arange(0, DIMS)
    count = tl.zeros([TILE], tl.float32)
    table_row = page_table + head * table_stride
    of_keys, of_values = tl.zeros([DIMS], tl.float32), tl.zeros([DIMS], tl.float32)
    for tile in range(split * TILES, tl.minimum((split + 1) * TILES, tl.cdiv(length, TILE))):
        start = tile * TILE
        nth = start + tl.arange(0, TILE)
        present = nth < length
        offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
        gone = tl.load(evicted + head * capacity + nth, mask=present, other=0) != 0
        mask = gone[:, None] & (dims < HEAD_SIZE)[None, :]
        rows = pages + offsets[:, None] + dims[None, :]
        keys = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(rows + HEAD_SIZE, mask=mask, other=0.0).to(tl.float32)
        count += gone.to(tl.float32)
        of_keys += tl.sum(keys, 0)
        of_values += tl.sum(values, 0)
    part = head * tl.num_programs(0) + split
    tl.store(counts + part, tl.sum(count, 0))
    tl.store(sums + part * 2 * HEAD_SIZE + dims, of_keys, mask=dims < HEAD_SIZE)
    tl.store(sums + (part * 2 + 1) * HEAD_SIZE + dims, of_values, mask=dims < HEAD_SIZE)


@kernel("table_stride", "capacity")
def _cross_kernel(
    pages,
    page_table,
    lengths,
    evicted,
    means,
    cross,
    page_stride,
    table_stride,
    capacity,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """cross [S, splits, D, D] fp32: one split's (v - mean v)(k - mean k)^T, some columns of it."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * COLUMNS
    length = tl.load(lengths + head).to(tl.int32)
    dims = tl.arange(0, DIMS)
    column = first + tl.arange(0, COLUMNS)
    inside = dims < HEAD_SIZE
    mean_key = tl.load(means + head * 2 * HEAD_SIZE + column, mask=column < HEAD_SIZE, other=0.0)
    mean_value = tl.load(means + (head * 2 + 1) * HEAD_SIZE + dims, mask=inside, other=0.0)
    total = tl.zeros([DIMS, COLUMNS], tl.float32)
    table_row = page_table + head * table_stride
    for tile in range(split * TILES, tl.minimum((split + 1) * TILES, tl.cdiv(length, TILE))):
        start = tile * TILE
        nth = start + tl.arange(0, TILE)
        present = nth < length
        offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
        gone = tl.load(evicted + head * capacity + nth, mask=present, other=0) != 0
        some = gone[:, None] & (column < HEAD_SIZE)[None, :]
        keys = tl.load(pages + offsets[:, None] + column[None, :], mask=some, other=0.0)
        every = gone[:, None] & inside[None, :]
        rows = pages + HEAD_SIZE + offsets
        values = tl.load(rows[:, None] + dims[None, :], mask=every, other=0.0)
        keys = tl.where(some, keys.to(tl.float32) - mean_key[None, :], 0.0)
        values = tl.where(every, values.to(tl.float32) - mean_value[None, :], 0.0)
        total = tl.dot(tl.trans(values), keys, total, input_precision="tf32x3")
    part = head * tl.num_programs(0) + split
    place = (part * HEAD_SIZE + dims[:, None]) * HEAD_SIZE + column[None, :]
    tl.store(cross + place, total, mask=inside[:, None] & (column < HEAD_SIZE)[None, :])


def add_to_moments(entries: PagedEntries, state: Tensor, evicted: Tensor) -> Tensor:
    """As `paged_torch.add_to_moments`, in Triton."""
    num_heads, dims = entries.num_sequences, entries.head_size
    _check(entries, state)
    evicted = per_entry(entries, "evicted", evicted, torch.bool)
    if num_heads == 0 or entries.capacity == 0:
        return state.clone()
    splits = triton.cdiv(entries.capacity, TILE * SPLIT_TILES)
    counts = state.new_empty((num_heads, splits))
    sums = state.new_empty((num_heads, splits, 2, dims))
    cross = state.new_empty((num_heads, splits, dims, dims))
    pages = (entries.pages, entries.page_table, entries.flat_lengths, evicted.view(torch.uint8))
    strides = (entries.pages.stride(0), entries.page_table.stride(0), entries.capacity)
    sizes = dict(
        BLOCK_SIZE=entries.block_size,
        HEAD_SIZE=dims,
        TILE=TILE,
        TILES=SPLIT_TILES,
        DIMS=padded(dims),
    )
    most, warps = (64, 4) if dims <= 128 else (32, 8)
    with on_device(entries):
        _sums_kernel[(splits, num_heads)](*pages, counts, sums, *strides, num_warps=4, **sizes)
        count = counts.sum(dim=1)
        means = sums.sum(dim=1) / count.clamp_min(1)[:, None, None]

        def launch(columns: int) -> None:
            _cross_kernel[(splits, num_heads, triton.cdiv(dims, columns))](
                *pages,
                means,
                cross,
                *strides,
                COLUMNS=columns,
                num_warps=warps,
                num_stages=2,
                **sizes,
            )

        launch_fitting("add_to_moments", most, entries.pages, launch)
    return join_moments(state, count, means[:, 0], means[:, 1], cross.sum(dim=1))


def _check(entries: PagedEntries, state: Tensor) -> None:
    shape = (entries.num_sequences, moment_size(entries.head_size))
    expect(
        tuple(state.shape) == shape and state.dtype == torch.float32,
        f"a state {list(shape)} in fp32",
        f"{tuple(state.shape)} in {state.dtype}",
        "start from zeros at a first event",
    )
