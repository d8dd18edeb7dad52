"""Loads and addresses that kernels over pages share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


class SequenceRows(NamedTuple):
    """Where a sequence's keys lie; its values, if `pages` points HEAD_SIZE further.

    Attributes:
        pages: pointer to the first page.
        page_ids: pointer to the sequence's row of the page table.
        page_stride: elements between pages.
    """

    pages: Any
    page_ids: Any
    page_stride: Any


class SequenceNumbers(NamedTuple):
    """A sequence's numbers in pages.

    Attributes:
        pages: pointer to the first page.
        page_ids: pointer to the ids of the pages with its numbers.
        start: index of its first number in these pages.
        count: how many it has.
    """

    pages: Any
    page_ids: Any
    start: Any
    count: Any


@triton.jit
def entry_offsets(
    rows,
    start,
    present,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """[TILE] int64 offsets of the keys of the entries from `start` on.

    The first entry must be present. Page ids are widened before they are multiplied: caches of
    more than 2^31 elements are common.
    """
    entries = start + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        # The tile lies inside one page: one id for all rows, which lie one after the other.
        page = tl.load(rows.page_ids + start // BLOCK_SIZE)
    else:
        page = tl.load(rows.page_ids + entries // BLOCK_SIZE, mask=present, other=0)
    places = (entries % BLOCK_SIZE) * 2 * HEAD_SIZE
    return page.to(tl.int64) * rows.page_stride + places.to(tl.int64)


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
def load_columns(
    rows,
    start,
    length,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[TILE, DIMS] keys, zeros behind the length."""
    present = start + tl.arange(0, TILE) < length
    dims = tl.arange(0, DIMS)
    keys = rows.pages + entry_offsets(rows, start, present, BLOCK_SIZE, HEAD_SIZE, TILE)
    mask = present[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(keys[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def sequence_numbers(
    sequence, numbers, HEADS: tl.constexpr, PAGE: tl.constexpr, ADDRESSED: tl.constexpr
):
    """The `SequenceNumbers` of a sequence.

    `numbers` are the tensors and the stride of a `NumbersArguments`; the constants are its others.
    """
    pages, table, starts, lengths, table_stride = numbers
    first, row, start, count = 0, 0, 0, 0  # not None: Triton 3.6 returns no tuple that holds it
    if PAGE > 0:
        first = pages
        request = sequence // HEADS
        if ADDRESSED:
            row = tl.cast(tl.load(table + request * 2), tl.pointer_type(tl.int32))
            row += table_stride * tl.load(table + request * 2 + 1)
        else:
            row = table + request * table_stride
        start, count = tl.load(starts + sequence), tl.load(lengths + sequence)
    return SequenceNumbers(first, row, start, count)


@triton.jit
def load_numbers(numbers, index, held, PAGE: tl.constexpr):
    """Loads those of a sequence's pages, PAGE in each, by their index; 0 where not held."""
    page = tl.load(numbers.page_ids + index // PAGE, mask=held, other=0).to(tl.int64)
    return tl.load(numbers.pages + page * PAGE + index % PAGE, mask=held, other=0.0)


@triton.jit
def log_sum_exp(maximum, weight_sum):
    """The natural log-sum-exp of logits in base 2, given their maximum and the sum of weights.

    Of no logits it is minus infinity, since their maximum is.
    """
    return (maximum + tl.log2(tl.where(weight_sum == 0.0, 1.0, weight_sum))) * 0.6931471805599453


@triton.jit
def finite_maximum(maximum):
    """The maximum to subtract from logits; 0 instead of minus infinity."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
