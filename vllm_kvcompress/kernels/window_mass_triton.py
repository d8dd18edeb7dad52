"""The observation window's attention to each entry, without a [heads, window, tokens] tensor.

The rows of a head are its queries and their group: row i * G + g is query i's member g.
Logits are computed twice: once for the log-sum-exp of every query, and once to add up what each
entry gets.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView, paged
from vllm_kvcompress.kernels.common.launch_triton import (
    MAX_QUERY_ROWS,
    entries_arguments,
    kernel,
    launch_fitting,
    query_rows,
)
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect, tile_size
from vllm_kvcompress.kernels.common.paged_rows_triton import (
    LOG2_E,
    SequenceRows,
    finite_maximum,
    load_columns,
    log_sum_exp,
)
from vllm_kvcompress.kernels.window_mass import Window

SPLIT_TILES = 8  # of a program of the first pass: enough programs for prompts of 8k tokens
# Numbers that change from event to event.
CHANGING = ("num_queries", "bias_width", "table_stride", "bias_stride")


@triton.jit
def window_logits(
    rows,
    biases,
    query,
    start,
    length,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """[any, TILE] logits in base 2 of the entries from `start` on, the first of them present.

    `biases` are all of them, or None, the first one of the sequence, and how many it has.
    """
    bias, first, num_biased = biases
    entry = start + tl.arange(0, TILE)
    keys = load_columns(rows, start, length, BLOCK_SIZE, HEAD_SIZE, TILE, query.shape[1])
    logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * log2_scale
    if bias is not None:
        added = tl.load(bias + first + entry, mask=entry < num_biased, other=0.0)
        logits += (added * 1.4426950408889634)[None, :]
    return logits


@triton.jit
def window_rows(
    window,
    head,
    start,
    length,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[ROWS, DIMS] queries of the rows from `start` on, and the number of entries each one sees.

    `window` is the queries with their strides and number, and the positions between them.
    """
    queries, strides, num_queries, spacing = window
    row = start + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    index = row // GROUP
    inside = index < num_queries
    place = index.to(tl.int64) * strides[0] + (head * GROUP + row % GROUP).to(tl.int64) * strides[1]
    mask = inside[:, None] & (dims < HEAD_SIZE)[None, :]
    query = tl.load(queries + place[:, None] + dims[None, :], mask=mask, other=0.0)
    visible = tl.where(inside, length - (num_queries - 1 - index) * spacing, 0)
    return query, visible


@kernel(*CHANGING, "spacing")
def _row_sums_kernel(
    queries,
    pages,
    page_table,
    lengths,
    bias,
    num_queries,
    bodies,
    bias_width,
    query_strides,
    spacing,
    page_stride,
    table_stride,
    bias_stride,
    log2_scale,
    sums,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes sums [S, rows, splits]: log-sum-exp of a split's entries, -inf where unseen."""
    split = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    head = tl.program_id(2)
    length = tl.load(lengths + head).to(tl.int32)
    body = tl.load(bodies + head).to(tl.int32)
    window = (queries, query_strides, num_queries, spacing)
    query, visible = window_rows(window, head, first_row, length, GROUP, ROWS, HEAD_SIZE, DIMS)
    head64 = head.to(tl.int64)
    page_ids = page_table + head64 * table_stride
    rows = SequenceRows(pages, page_ids, page_stride)
    biases = (bias, head64 * bias_stride, tl.minimum(body, bias_width))
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    last = tl.minimum(tl.cdiv(length, TILE), (split + 1) * TILES)
    for tile in range(split * TILES, last):
        start = tile * TILE
        logits = window_logits(
            rows, biases, query, start, length, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE
        )
        entry = start + tl.arange(0, TILE)
        logits = tl.where(entry[None, :] < visible[:, None], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        top = finite_maximum(new_maximum)
        weight_sum *= tl.exp2(maximum - top)
        weight_sum += tl.sum(tl.exp2(logits - top[:, None]), 1)
        maximum = new_maximum
    row = first_row + tl.arange(0, ROWS)
    place = (head64 * num_queries * GROUP + row) * tl.num_programs(0) + split
    tl.store(sums + place, log_sum_exp(maximum, weight_sum), mask=row < num_queries * GROUP)


@kernel(*CHANGING, "spacing", "capacity")
def _column_sums_kernel(
    queries,
    pages,
    page_table,
    lengths,
    bias,
    num_queries,
    bodies,
    bias_width,
    query_strides,
    spacing,
    page_stride,
    table_stride,
    bias_stride,
    log2_scale,
    lse,
    mass,
    capacity,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes mass [S, capacity]: one tile's share of all rows' attention, 0 behind the body."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1)
    length = tl.load(lengths + head).to(tl.int32)
    body = tl.load(bodies + head).to(tl.int32)
    head64 = head.to(tl.int64)
    entry = start + tl.arange(0, TILE)
    columns = tl.zeros([TILE], tl.float32)
    window = (queries, query_strides, num_queries, spacing)
    page_ids = page_table + head64 * table_stride
    rows = SequenceRows(pages, page_ids, page_stride)
    biases = (bias, head64 * bias_stride, tl.minimum(body, bias_width))
    num_rows = num_queries * GROUP
    if start < body:
        for first_row in range(0, num_rows, ROWS):
            query, visible = window_rows(
                window, head, first_row, length, GROUP, ROWS, HEAD_SIZE, DIMS
            )
            logits = window_logits(
                rows, biases, query, start, length, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE
            )
            row = first_row + tl.arange(0, ROWS)
            row_lse = tl.load(lse + head64 * num_rows + row, mask=row < num_rows, other=0.0)
            weights = tl.exp2(logits - row_lse[:, None] * 1.4426950408889634)
            # Also hides rows that see nothing, whose log-sum-exp is minus infinity.
            seen = entry[None, :] < visible[:, None]
            columns += tl.sum(tl.where(seen, weights, 0.0), 0)
    columns = tl.where(entry < body, columns / num_rows, 0.0)
    tl.store(mass + head64 * capacity + entry, columns, mask=entry < capacity)


def window_mass(
    view: KVView,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
    stride: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """Triton launcher of `window_mass`: same signature and result."""
    entries = paged(view).entries
    if stride > 1:
        queries = queries[(len(queries) - 1) % stride :: stride]
    _check_window(entries, queries, bias)
    num_heads, capacity = entries.num_sequences, entries.capacity
    num_queries, num_rows = queries.shape[0], queries.shape[0] * queries.shape[1] // num_heads
    mass = queries.new_zeros((num_heads, capacity), dtype=torch.float32)
    if mass.numel() == 0 or num_queries == 0:
        return mass[:, : view.capacity]
    most = query_rows(num_rows)
    tile = tile_size(entries)
    pages, page_strides, sizes = entries_arguments(entries)
    sizes |= dict(GROUP=num_rows // num_queries, TILE=tile)
    sizes |= dict(num_warps=4 if most < MAX_QUERY_ROWS else 8)
    bias_width, bias_stride = (0, 0) if bias is None else (bias.shape[1], bias.stride(0))
    strides = (queries.stride()[:2], stride, *page_strides, bias_stride)
    window = (num_queries, view.lengths, bias_width)
    inputs = (queries, *pages, bias, *window, *strides, scale * LOG2_E)
    splits = triton.cdiv(capacity, tile * SPLIT_TILES)
    sums = mass.new_empty((num_heads, num_rows, splits))

    def launch_sums(rows: int) -> None:
        grid = (splits, triton.cdiv(num_rows, rows), num_heads)
        _row_sums_kernel[grid](*inputs, sums, TILES=SPLIT_TILES, ROWS=rows, num_stages=4, **sizes)

    launch_fitting("window_mass (sums)", most, entries.pages, launch_sums)
    lse = sums.logsumexp(dim=2)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().repeat(1, num_queries))

    def launch_mass(rows: int) -> None:
        grid = (triton.cdiv(capacity, tile), num_heads)
        _column_sums_kernel[grid](*inputs, lse, mass, capacity, ROWS=rows, num_stages=2, **sizes)

    launch_fitting("window_mass", most, entries.pages, launch_mass)
    return mass[:, : view.capacity]


def window_masses(
    view: KVView,
    queries: Tensor,
    scale: float,
    windows: Sequence[Window],
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Triton launcher of `window_masses`: one window after the other."""
    num_queries = len(queries)
    masses = [
        window_mass(view, queries[num_queries - size :], scale, bias, stride, sinks)
        for size, stride in windows
    ]
    return torch.stack(masses)


def _check_window(entries: PagedEntries, queries: Tensor, bias: Tensor | None) -> None:
    """Refuses queries that are not [window, S * group, D] in the pages' type, and a bias that is
    not [S, any] fp32, element by element."""
    num_heads, size, dtype = entries.num_sequences, entries.head_size, entries.pages.dtype
    fits = queries.dim() == 3 and num_heads > 0 and queries.shape[1] % num_heads == 0
    expect(
        fits and queries.shape[2] == size and queries.dtype == dtype and queries.stride(2) == 1,
        f"queries [window, {num_heads} * group, {size}] in {dtype}, rows side by side",
        f"{tuple(queries.shape)} in {queries.dtype} with strides {queries.stride()}",
        "pass the last queries of all query heads, converted, or call contiguous()",
    )
    if bias is None:
        return
    fits = bias.dim() == 2 and bias.shape[0] == num_heads and bias.stride(1) == 1
    expect(
        fits and bias.dtype == torch.float32,
        f"a bias [{num_heads}, entries] in fp32 whose rows lie side by side",
        f"{tuple(bias.shape)} in {bias.dtype} with strides {bias.stride()}",
        "give every sequence a row of logarithms, which need the precision",
    )
