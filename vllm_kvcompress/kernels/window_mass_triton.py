"""The observation window's attention to each entry, without a [heads, window, tokens] tensor.

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

from vllm_kvcompress.kernels.common.fitting_triton import launch_fitting
from vllm_kvcompress.kernels.common.kv_view import KVView, paged
from vllm_kvcompress.kernels.common.launch_triton import (
    MOST_ROWS,
    kernel,
    on_device,
    padded,
    query_rows,
)
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect, tile_size
from vllm_kvcompress.kernels.common.paged_rows_triton import LOG2_E, finite_maximum
from vllm_kvcompress.kernels.common.window_rows_triton import (
    CHANGING,
    check_window,
    window_logits,
    window_rows,
)
from vllm_kvcompress.kernels.window_mass import Window

SPLIT_TILES = 8  # that a program of the first pass reads: enough programs for prompts of 8k tokens


@kernel(*CHANGING, "spacing", "sums_stride_s", "sums_stride_r")
def _row_sums_kernel(
    queries,
    pages,
    page_table,
    lengths,
    bias,
    sums,
    num_queries,
    bodies,
    bias_width,
    stride_w,
    stride_h,
    spacing,
    page_stride,
    table_stride,
    bias_stride,
    sums_stride_s,
    sums_stride_r,
    log2_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """sums [S, rows, splits]: natural log-sum-exp over one split's entries, -inf where unseen."""
    split = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    head = tl.program_id(2)
    length = tl.load(lengths + head).to(tl.int32)
    body = tl.load(bodies + head).to(tl.int32)
    query, visible = window_rows(
        queries,
        head,
        first_row,
        num_queries,
        length,
        stride_w,
        stride_h,
        spacing,
        GROUP,
        ROWS,
        HEAD_SIZE,
        DIMS,
    )
    wide = head.to(tl.int64)
    bias_row = bias
    if HAS_BIAS:
        bias_row += wide * bias_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    last = tl.minimum(tl.cdiv(length, TILE), (split + 1) * TILES)
    for tile in range(split * TILES, last):
        start = tile * TILE
        logits = window_logits(
            pages,
            page_table + wide * table_stride,
            bias_row,
            query,
            start,
            body,
            length,
            bias_width,
            page_stride,
            log2_scale,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            DIMS,
            HAS_BIAS,
        )
        nth = start + tl.arange(0, TILE)
        logits = tl.where(nth[None, :] < visible[:, None], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        top = finite_maximum(new_maximum)
        whole = whole * tl.exp2(maximum - top) + tl.sum(tl.exp2(logits - top[:, None]), 1)
        maximum = new_maximum
    # Minus infinity where nothing is seen, since the maximum is.
    natural = (maximum + tl.log2(tl.where(whole == 0.0, 1.0, whole))) * 0.6931471805599453
    row = first_row + tl.arange(0, ROWS)
    place = wide * sums_stride_s + row.to(tl.int64) * sums_stride_r + split
    tl.store(sums + place, natural, mask=row < num_queries * GROUP)


@kernel(*CHANGING, "spacing", "capacity")
def _column_sums_kernel(
    queries,
    pages,
    page_table,
    lengths,
    bias,
    lse,
    mass,
    num_queries,
    bodies,
    bias_width,
    capacity,
    stride_w,
    stride_h,
    spacing,
    page_stride,
    table_stride,
    bias_stride,
    log2_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """mass [S, capacity]: one tile's share of the attention of all rows; 0 behind the body."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1)
    length = tl.load(lengths + head).to(tl.int32)
    body = tl.load(bodies + head).to(tl.int32)
    wide = head.to(tl.int64)
    nth = start + tl.arange(0, TILE)
    columns = tl.zeros([TILE], tl.float32)
    bias_row = bias
    if HAS_BIAS:
        bias_row += wide * bias_stride
    num_rows = num_queries * GROUP
    if start < body:
        for first_row in range(0, num_rows, ROWS):
            query, visible = window_rows(
                queries,
                head,
                first_row,
                num_queries,
                length,
                stride_w,
                stride_h,
                spacing,
                GROUP,
                ROWS,
                HEAD_SIZE,
                DIMS,
            )
            logits = window_logits(
                pages,
                page_table + wide * table_stride,
                bias_row,
                query,
                start,
                body,
                length,
                bias_width,
                page_stride,
                log2_scale,
                BLOCK_SIZE,
                HEAD_SIZE,
                TILE,
                DIMS,
                HAS_BIAS,
            )
            row = first_row + tl.arange(0, ROWS)
            whole = tl.load(lse + wide * num_rows + row, mask=row < num_rows, other=0.0)
            weights = tl.exp2(logits - whole[:, None] * 1.4426950408889634)
            # Rows that see nothing have a log-sum-exp of minus infinity; they end here, too.
            seen = nth[None, :] < visible[:, None]
            columns += tl.sum(tl.where(seen, weights, 0.0), 0)
    columns = tl.where(nth < body, columns / num_rows, 0.0)
    tl.store(mass + wide * capacity + nth, columns, mask=nth < capacity)


def window_mass(
    view: KVView,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
    stride: int = 1,
) -> Tensor:
    """As `reference.window_mass`, in Triton."""
    entries = paged(view).entries
    if stride > 1:
        queries = queries[(len(queries) - 1) % stride :: stride]
    check_window(entries, queries)
    _check_bias(entries, bias)
    num_heads, capacity = entries.num_sequences, entries.capacity
    num_queries, num_rows = queries.shape[0], queries.shape[0] * queries.shape[1] // num_heads
    mass = queries.new_zeros((num_heads, capacity), dtype=torch.float32)
    if mass.numel() == 0 or num_queries == 0:
        return mass[:, : view.capacity]
    most = query_rows(num_rows)
    tile = tile_size(entries)
    sizes = dict(
        GROUP=num_rows // num_queries,
        BLOCK_SIZE=entries.block_size,
        HEAD_SIZE=entries.head_size,
        TILE=tile,
        DIMS=padded(entries.head_size),
        HAS_BIAS=bias is not None,
        num_warps=4 if most < MOST_ROWS else 8,
    )
    strides = (
        queries.stride(0),
        queries.stride(1),
        stride,
        entries.pages.stride(0),
        entries.page_table.stride(0),
        0 if bias is None else bias.stride(0),
    )
    pages = (entries.pages, entries.page_table, entries.flat_lengths, bias)
    bias_width = 0 if bias is None else bias.shape[1]
    splits = triton.cdiv(capacity, tile * SPLIT_TILES)
    sums = mass.new_empty((num_heads, num_rows, splits))

    def launch_sums(rows: int) -> None:
        _row_sums_kernel[(splits, triton.cdiv(num_rows, rows), num_heads)](
            queries,
            *pages,
            sums,
            num_queries,
            view.lengths,
            bias_width,
            *strides,
            *sums.stride()[:2],
            scale * LOG2_E,
            TILES=SPLIT_TILES,
            ROWS=rows,
            num_stages=4,
            **sizes,
        )

    with on_device(entries):
        launch_fitting("window_mass (sums)", most, entries.pages, launch_sums)
        lse = sums.logsumexp(dim=2)

    def launch_mass(rows: int) -> None:
        _column_sums_kernel[(triton.cdiv(capacity, tile), num_heads)](
            queries,
            *pages,
            lse,
            mass,
            num_queries,
            view.lengths,
            bias_width,
            capacity,
            *strides,
            scale * LOG2_E,
            ROWS=rows,
            num_stages=2,
            **sizes,
        )

    with on_device(entries):
        launch_fitting("window_mass", most, entries.pages, launch_mass)
    return mass[:, : view.capacity]


def window_masses(
    view: KVView,
    queries: Tensor,
    scale: float,
    windows: Sequence[Window],
    bias: Tensor | None = None,
) -> Tensor:
    """As `reference.window_masses`, one after the other."""
    num_queries = len(queries)
    masses = [
        window_mass(view, queries[num_queries - size :], scale, bias, stride)
        for size, stride in windows
    ]
    return torch.stack(masses)


def _check_bias(entries: PagedEntries, bias: Tensor | None) -> None:
    """Refuses a bias that is not [S, any] fp32 with rows side by side."""
    if bias is None:
        return
    expect(
        bias.dim() == 2 and bias.shape[0] == entries.num_sequences and bias.stride(1) == 1,
        f"a bias [{entries.num_sequences}, entries] whose rows lie side by side",
        f"{tuple(bias.shape)} with strides {bias.stride()}",
        "give every sequence a row; entries behind its end have no bias",
    )
    expect(
        bias.dtype == torch.float32,
        "a bias in fp32",
        str(bias.dtype),
        "convert it: logarithms of multiplicities need the precision",
    )
