"""The observation window's queries and their logits, for kernels that score entries by these.

The rows of a head are its queries and their group: row i * G + g is query i's member g.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect
from vllm_kvcompress.kernels.common.paged_rows_triton import entry_offsets

# Numbers that change from event to event.
CHANGING = ("num_queries", "bias_width", "table_stride", "bias_stride")


@triton.jit
def window_logits(
    pages,
    table_row,
    bias_row,
    query,
    start,
    body,
    length,
    bias_width,
    page_stride,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """[rows, TILE] logits in base 2 of the entries from `start` on, the first of them present."""
    nth = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    present = nth < length
    offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
    keys = tl.load(
        pages + offsets[:, None] + dims[None, :],
        mask=present[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * log2_scale
    if HAS_BIAS:
        # The tail behind the body has no bias.
        weighed = (nth < body) & (nth < bias_width)
        added = tl.load(bias_row + nth, mask=weighed, other=0.0)
        logits += (added * 1.4426950408889634)[None, :]
    return logits


@triton.jit
def window_rows(
    queries,
    head,
    start,
    num_queries,
    length,
    stride_w,
    stride_h,
    spacing,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Rows from `start` on: [ROWS, DIMS] queries, and how many entries each one sees.

    Queries are `spacing` positions apart.
    """
    row = start + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    nth = row // GROUP
    inside = nth < num_queries
    place = nth.to(tl.int64) * stride_w + (head * GROUP + row % GROUP).to(tl.int64) * stride_h
    query = tl.load(
        queries + place[:, None] + dims[None, :],
        mask=inside[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    visible = tl.where(inside, length - (num_queries - 1 - nth) * spacing, 0)
    return query, visible


def check_window(entries: PagedEntries, queries: Tensor) -> None:
    """Refuses queries that are not [window, S * group, D] in the pages' type.

    Raises:
        InvariantError: they are not.
    """
    num_heads = entries.num_sequences
    expect(
        queries.dim() == 3
        and num_heads > 0
        and queries.shape[1] % num_heads == 0
        and queries.shape[2] == entries.head_size,
        f"queries [window, {num_heads} * group, {entries.head_size}]",
        str(tuple(queries.shape)),
        "pass the last queries of all query heads",
    )
    expect(
        queries.dtype == entries.pages.dtype and queries.stride(2) == 1,
        f"queries of the pages' type {entries.pages.dtype}, rows side by side",
        f"{queries.dtype} with strides {queries.stride()}",
        "convert them, or call contiguous()",
    )
