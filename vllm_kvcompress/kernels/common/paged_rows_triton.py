"""Loads and addresses that kernels over pages share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def entry_offsets(
    table_row,
    start,
    present,
    page_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """[TILE] int64 offsets of the keys of the entries from `start` on; values lie HEAD_SIZE behind.

    The first entry must be present. Page ids are widened before they are multiplied: caches of
    more than 2^31 elements are common.
    """
    entries = start + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        # The tile lies inside one page: one id for all rows, which lie one after the other.
        page = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        offsets = page * page_stride + ((entries % BLOCK_SIZE) * 2 * HEAD_SIZE).to(tl.int64)
    else:
        pages = tl.load(table_row + entries // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        offsets = pages * page_stride + (entries % BLOCK_SIZE) * 2 * HEAD_SIZE
    return offsets


@triton.jit
def addressed_ids(addresses, layer_offsets, layer, request, head, pages, page_stride):
    """A head's page ids in an `AddressedEntries`, the page of id 0, and the stride of ids."""
    row = addresses + request * 4
    ids = tl.cast(tl.load(row), tl.pointer_type(tl.int32))
    ids += layer * tl.load(row + 1) + head * tl.load(row + 2)
    per_block = tl.load(row + 3)
    of_blocks = per_block > 0
    first = tl.where(of_blocks, tl.load(layer_offsets + layer) + head, 0)
    return ids, pages + first * page_stride, tl.where(of_blocks, per_block, 1) * page_stride


@triton.jit
def load_rows(
    pages,
    table_row,
    entries,
    present,
    page_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[any, DIMS] keys of any entries, zeros where not present; values, if `pages` points
    HEAD_SIZE further."""
    dims = tl.arange(0, DIMS)
    page = tl.load(table_row + entries // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    rows = pages + page * page_stride + (entries % BLOCK_SIZE) * 2 * HEAD_SIZE
    mask = present[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(
    pages,
    table_row,
    start,
    length,
    page_stride,
    first_dim,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[TILE, DIMS] keys from dimension `first_dim` on, zeros behind the length; values, if
    `pages` points HEAD_SIZE further."""
    present = start + tl.arange(0, TILE) < length
    dims = first_dim + tl.arange(0, DIMS)
    offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
    rows = pages + offsets
    mask = present[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def sequence_numbers(
    table, starts, lengths, sequence, table_stride, HEADS: tl.constexpr, ADDRESSED: tl.constexpr
):
    """A sequence's row of page ids, the start of its numbers in these pages, and their count.

    Where ADDRESSED, the table is the addresses of an `AddressedNumbers` and its stride the layer.
    """
    request = sequence // HEADS
    if ADDRESSED:
        row = tl.cast(tl.load(table + request * 2), tl.pointer_type(tl.int32))
        row += table_stride * tl.load(table + request * 2 + 1)
    else:
        row = table + request * table_stride
    return row, tl.load(starts + sequence), tl.load(lengths + sequence)


@triton.jit
def paged_numbers(pages, table_row, numbers, held, PAGE: tl.constexpr):
    """Loads numbers from the pages in `table_row`, PAGE in each; 0 where not held."""
    page = tl.load(table_row + numbers // PAGE, mask=held, other=0).to(tl.int64)
    return tl.load(pages + page * PAGE + numbers % PAGE, mask=held, other=0.0)


@triton.jit
def finite_maximum(maximum):
    """The maximum to subtract from logits; 0 instead of minus infinity."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
