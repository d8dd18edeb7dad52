"""Means of kept entries and of those that go to them (D2O), over pages.

Which entry goes where is anything, so sums are made by atomic additions in fp32; their order, and
with it the last bits, may differ from run to run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.paged_entries import PagedEntries, per_entry
from vllm_kvcompress.kernels.paged_rows_triton import load_rows

TILE = 32  # entries at once, in fp32


@kernel("table_stride", "capacity")
def _add_kernel(
    pages,
    page_table,
    lengths,
    targets,
    weights,
    sums,
    capacity,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Adds a tile's weighted rows to those of their targets in sums [S, capacity, HEAD_SIZE]."""
    nth = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    weight = tl.load(weights + head * capacity + nth, mask=nth < length, other=0.0)
    goes = weight > 0
    target = tl.load(targets + head * capacity + nth, mask=goes, other=0)
    table_row = page_table + head * table_stride
    rows = load_rows(pages, table_row, nth, goes, page_stride, BLOCK_SIZE, HEAD_SIZE, DIMS)
    dims = tl.arange(0, DIMS)
    to = sums + (head * capacity + target)[:, None] * HEAD_SIZE + dims[None, :]
    mask = goes[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.atomic_add(to, weight[:, None] * rows.to(tl.float32), mask=mask, sem="relaxed")


@kernel("table_stride", "capacity")
def _mean_kernel(
    pages,
    page_table,
    lengths,
    kept,
    totals,
    sums,
    outputs,
    capacity,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """outputs [S, capacity, HEAD_SIZE]: own rows with the sums, by their weight; 0 if not kept."""
    nth = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    here = tl.load(kept + head * capacity + nth, mask=nth < length, other=0) != 0
    total = tl.load(totals + head * capacity + nth, mask=here, other=0.0)
    table_row = page_table + head * table_stride
    own = load_rows(pages, table_row, nth, here, page_stride, BLOCK_SIZE, HEAD_SIZE, DIMS)
    dims = tl.arange(0, DIMS)
    place = (head * capacity + nth)[:, None] * HEAD_SIZE + dims[None, :]
    inside = (dims < HEAD_SIZE)[None, :]
    added = tl.load(sums + place, mask=here[:, None] & inside, other=0.0)
    mean = (own.to(tl.float32) + added) / (1.0 + total)[:, None]
    mask = (nth < capacity)[:, None] & inside
    tl.store(outputs + place, mean.to(outputs.dtype.element_ty), mask=mask)


def merge_into(
    entries: PagedEntries, kept: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As `paged_torch.merge_into`, in Triton."""
    num_heads, capacity, dims = entries.num_sequences, entries.capacity, entries.head_size
    kept = per_entry(entries, "kept", kept, torch.bool)
    targets = per_entry(entries, "targets", targets, torch.int64)
    weights = per_entry(entries, "weights", weights, torch.float32)
    keys = entries.pages.new_empty((num_heads, capacity, dims))
    values = torch.empty_like(keys)
    if keys.numel() == 0:
        return keys, values
    totals = torch.zeros_like(weights).scatter_add_(1, targets, weights)
    sums = torch.empty_like(keys, dtype=torch.float32)
    table = (entries.page_table, entries.flat_lengths)
    strides = (capacity, entries.pages.stride(0), entries.page_table.stride(0))
    grid = (triton.cdiv(capacity, TILE), num_heads)
    sizes = dict(
        BLOCK_SIZE=entries.block_size, HEAD_SIZE=dims, TILE=TILE, DIMS=padded(dims), num_warps=4
    )
    with on_device(entries):
        for first, outputs in ((0, keys), (dims, values)):
            rows = entries.pages[:, first:]
            _add_kernel[grid](rows, *table, targets, weights, sums.zero_(), *strides, **sizes)
            _mean_kernel[grid](
                rows, *table, kept.contiguous(), totals, sums, outputs, *strides, **sizes
            )
    return keys, values
