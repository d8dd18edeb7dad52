"""Values of kept entries with those of evicted ones before them (CaM), over pages.

The kept entry number r gets from the evicted ones behind number r - m, m being how many targets
each has: neighbours in the cache, so that a tile of kept entries and the tiles before it make
matrix products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.paged_entries import PagedEntries, per_entry
from vllm_kvcompress.kernels.paged_rows_triton import load_rows, tile_size


@kernel("table_stride", "capacity", "num_targets", "num_tiles")
def _spread_kernel(
    pages,
    page_table,
    lengths,
    kept,
    numbers,
    shares,
    first_tiles,
    outputs,
    capacity,
    num_targets,
    num_tiles,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """outputs [S, capacity, HEAD_SIZE] of a tile of places; 0 where nothing is kept."""
    own_tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    table_row, row = page_table + head * table_stride, head * capacity
    length = tl.load(lengths + head).to(tl.int32)
    nth = own_tile * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    here = tl.load(kept + row + nth, mask=nth < length, other=0) != 0
    mixed = tl.zeros([TILE, DIMS], tl.float32)
    if tl.max(here.to(tl.int32), 0) > 0:
        number = tl.load(numbers + row + nth, mask=here, other=0) - 1
        first = tl.load(first_tiles + head * num_tiles + own_tile)
        for tile in range(first, own_tile + 1):
            from_nth = tile * TILE + tl.arange(0, TILE)
            present = from_nth < length
            values = load_rows(
                pages + HEAD_SIZE,
                table_row,
                from_nth,
                present,
                page_stride,
                BLOCK_SIZE,
                HEAD_SIZE,
                DIMS,
            )
            share = tl.load(shares + row + from_nth, mask=present, other=0.0)
            begins = tl.load(numbers + row + from_nth, mask=present, other=0)
            reaches = (from_nth[None, :] < nth[:, None]) & here[:, None]
            reaches = reaches & (begins[None, :] > number[:, None] - num_targets)
            weight = tl.where(reaches, share[None, :], 0.0).to(values.dtype)
            mixed = tl.dot(weight, values, mixed, input_precision="ieee")
        own = load_rows(
            pages + HEAD_SIZE, table_row, nth, here, page_stride, BLOCK_SIZE, HEAD_SIZE, DIMS
        )
        mixed += own.to(tl.float32)
    to = outputs + (row + nth)[:, None] * HEAD_SIZE + dims[None, :]
    mask = (nth < capacity)[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.store(to, mixed.to(outputs.dtype.element_ty), mask=mask)


def spread_values(entries: PagedEntries, kept: Tensor, shares: Tensor, num_targets: int) -> Tensor:
    """As `paged_torch.spread_values`, in Triton."""
    num_heads, capacity, dims = entries.num_sequences, entries.capacity, entries.head_size
    kept = per_entry(entries, "kept", kept, torch.bool)
    shares = per_entry(entries, "shares", shares, torch.float32)
    outputs = entries.pages.new_empty((num_heads, capacity, dims))
    if outputs.numel() == 0:
        return outputs
    tile = tile_size(entries)
    numbers = kept.cumsum(dim=1, dtype=torch.int32)
    # The first place that gives to the first entry that may be kept in a tile.
    before = functional.pad(numbers, (1, 0))[:, :-1:tile].contiguous()
    places = torch.searchsorted(numbers, before - num_targets, right=True)
    with on_device(entries):
        _spread_kernel[(triton.cdiv(capacity, tile), num_heads)](
            entries.pages,
            entries.page_table,
            entries.flat_lengths,
            kept,
            numbers,
            shares,
            (places // tile).to(torch.int32),
            outputs,
            capacity,
            num_targets,
            before.shape[1],
            entries.pages.stride(0),
            entries.page_table.stride(0),
            BLOCK_SIZE=entries.block_size,
            HEAD_SIZE=dims,
            TILE=tile,
            DIMS=padded(dims),
            num_warps=4,
            num_stages=3,
        )
    return outputs
