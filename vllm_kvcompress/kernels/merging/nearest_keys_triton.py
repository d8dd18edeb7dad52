"""The kept key that is most similar to each evicted one (D2O), over pages.

Kept and evicted entries are listed head by head, so that no product of a tile of one and a tile of
the other is wasted. Kept keys are copied next to one another first, since every program reads all
of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView, paged
from vllm_kvcompress.kernels.common.launch_triton import (
    entries_arguments,
    kernel,
    launch_fitting,
    on_device,
)
from vllm_kvcompress.kernels.common.paged_entries import per_entry, tile_size
from vllm_kvcompress.kernels.common.paged_rows_triton import SequenceRows

# Of the evicted keys of a program, and of each tile of kept ones that it reads.
ROWS_BYTES, TILE_BYTES = 1 << 16, 1 << 15


@triton.jit
def _listed_keys(
    rows,
    listed,
    first,
    count,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[TILE, DIMS] keys of the entries from number `first` on in a list of `count`, and the
    [TILE] entries; zeros behind the list's end."""
    index = first + tl.arange(0, TILE)
    present = index < count
    entries = tl.load(listed + index, mask=present, other=0)
    page = tl.load(rows.page_ids + entries // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    places = rows.pages + page * rows.page_stride + (entries % BLOCK_SIZE) * 2 * HEAD_SIZE
    dims = tl.arange(0, DIMS)
    mask = present[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(places[:, None] + dims[None, :], mask=mask, other=0.0), entries


@kernel("table_stride", "capacity")
def _copy_kernel(
    pages,
    page_table,
    listed,
    counts,
    copies,
    inverse,
    capacity,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes copies [S, room, HEAD_SIZE] of listed keys, in the list's order, and inverse [S, room]
    fp32 inverses of their norms; zero keys behind the list's end, up to the end of a tile."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    count = tl.load(counts + head).to(tl.int32)
    if first < count:
        page_ids = page_table + head * table_stride
        rows = SequenceRows(pages, page_ids, page_stride)
        keys, _ = _listed_keys(
            rows, listed + head * capacity, first, count, BLOCK_SIZE, HEAD_SIZE, TILE, DIMS
        )
        keys32 = keys.to(tl.float32)
        norms = tl.sqrt(tl.sum(keys32 * keys32, 1))
        to = head * tl.num_programs(0) * TILE + first + tl.arange(0, TILE)
        tl.store(inverse + to, 1.0 / tl.maximum(norms, 1e-8))
        dims = tl.arange(0, DIMS)
        places = copies + to[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(places, keys, mask=(dims < HEAD_SIZE)[None, :])


@kernel("table_stride", "capacity", "room")
def _nearest_kernel(
    pages,
    page_table,
    kept,
    num_kept,
    gone,
    num_gone,
    copies,
    inverse,
    cosines,
    places,
    capacity,
    room,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes cosines and places [S, capacity] of a tile of evicted entries, against kept ones."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    count, total = tl.load(num_gone + head).to(tl.int32), tl.load(num_kept + head).to(tl.int32)
    page_ids, kept_row = page_table + head * table_stride, kept + head * capacity
    rows = SequenceRows(pages, page_ids, page_stride)
    if (first < count) & (total > 0):
        own, entries = _listed_keys(
            rows, gone + head * capacity, first, count, BLOCK_SIZE, HEAD_SIZE, ROWS, DIMS
        )
        best = tl.full([ROWS], float("-inf"), tl.float32)
        nearest = tl.zeros([ROWS], tl.int32)
        dims = tl.arange(0, DIMS)
        for start in range(0, total, TILE):
            index = start + tl.arange(0, TILE)
            place = head * room + index
            addresses = copies + place[:, None] * HEAD_SIZE + dims[None, :]
            if DIMS == HEAD_SIZE:
                keys = tl.load(addresses)
            else:
                keys = tl.load(addresses, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
            scales = tl.load(inverse + place)
            hidden = tl.where(index < total, 0.0, float("-inf"))
            products = tl.dot(own, tl.trans(keys), input_precision="ieee")
            products = tl.fma(products, scales[None, :], hidden[None, :])
            highest, which = tl.max(products, 1, return_indices=True)
            nearest = tl.where(highest > best, start + which, nearest)
            best = tl.maximum(highest, best)
        own32 = own.to(tl.float32)
        norms = tl.sqrt(tl.sum(own32 * own32, 1))
        mask = first + tl.arange(0, ROWS) < count
        to = head * capacity + entries
        tl.store(cosines + to, best / tl.maximum(norms, 1e-8), mask=mask)
        tl.store(places + to, tl.load(kept_row + nearest).to(tl.int64), mask=mask)


def nearest_keys(view: KVView, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Triton launcher of `nearest_keys`: same signature and result."""
    entries = paged(view).body
    num_heads, capacity = entries.num_sequences, entries.capacity
    kept = per_entry(entries, "kept", kept, torch.bool)
    cosines = torch.zeros((num_heads, capacity), device=entries.device)
    places = torch.zeros((num_heads, capacity), dtype=torch.int64, device=entries.device)
    if cosines.numel() == 0:
        return cosines, places
    here, gone = _listed(kept & view.valid), _listed(view.valid & ~kept)
    tile = tile_size(entries, TILE_BYTES)
    num_tiles = triton.cdiv(capacity, tile)
    copies = entries.pages.new_empty((num_heads, num_tiles * tile, entries.head_size))
    inverse = cosines.new_empty((num_heads, num_tiles * tile))
    (*pages, _), strides, sizes = entries_arguments(entries)
    sizes |= dict(TILE=tile)

    def launch(rows: int) -> None:
        _nearest_kernel[(triton.cdiv(capacity, rows), num_heads)](
            *pages,
            *here,
            *gone,
            copies,
            inverse,
            cosines,
            places,
            capacity,
            num_tiles * tile,
            *strides,
            **sizes,
            ROWS=rows,
            num_warps=8,
        )

    with on_device(entries):
        _copy_kernel[(num_tiles, num_heads)](
            *pages, *here, copies, inverse, capacity, *strides, **sizes
        )
    rows = tile_size(entries, ROWS_BYTES)
    launch_fitting("nearest_keys", rows, entries.pages, launch)
    return cosines, places


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """[S, n] int32 entries whose flag is set, in order, then anything; and [S] their number."""
    number = flags.cumsum(dim=1)
    last = flags.shape[1]
    to = torch.where(flags, number - 1, last)
    entries = torch.arange(last, dtype=torch.int32, device=flags.device).expand_as(to)
    listed = torch.empty((flags.shape[0], last + 1), dtype=torch.int32, device=flags.device)
    listed.scatter_(1, to, entries)
    return listed[:, :last].contiguous(), number[:, -1].contiguous()
