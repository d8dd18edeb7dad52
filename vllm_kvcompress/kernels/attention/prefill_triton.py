"""Attention of a chunk's queries over compressed pages and, causally, the chunk itself.

    entries   [ kept ................ ][ chunk: m entries ]
    row i * G + g: query i of the chunk, member g, sees all but the last m - 1 - i entries

Members of a group are rows of one program, since they see the same entries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.attention.tiles_triton import attend_tiles
from vllm_kvcompress.kernels.common.launch_triton import (
    MAX_QUERY_ROWS,
    NumbersArguments,
    entries_arguments,
    kernel,
    launch_fitting,
    on_device,
    query_rows,
)
from vllm_kvcompress.kernels.common.paged_entries import (
    PagedEntries,
    check_out,
    check_queries,
    tile_size,
)
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers, check_bias
from vllm_kvcompress.kernels.common.paged_rows_triton import LOG2_E, sequence_numbers


@kernel("num_queries", "table_stride", "bias_table_stride")
def _prefill_kernel(
    queries,
    pages,
    page_table,
    lengths,
    bias_pages,
    bias_table,
    bias_starts,
    bias_lengths,
    outputs,
    lse,
    num_queries,
    query_stride_s,
    query_stride_g,
    query_stride_m,
    output_stride_s,
    output_stride_g,
    output_stride_m,
    page_stride,
    table_stride,
    bias_table_stride,
    log2_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    BIAS_PAGE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Attends ROWS rows of one sequence; the last rows first, since these have most to do."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    index, member = row // GROUP, row % GROUP
    inside = index < num_queries
    dims = tl.arange(0, DIMS)
    mask = inside[:, None] & (dims < HEAD_SIZE)[None, :]
    member64, index64 = member.to(tl.int64), index.to(tl.int64)
    place = sequence * query_stride_s + member64 * query_stride_g + index64 * query_stride_m
    query = tl.load(queries + place[:, None] + dims[None, :], mask=mask, other=0.0)
    length = tl.load(lengths + sequence).to(tl.int32)
    visible = tl.where(inside, length - (num_queries - 1 - index), 0)
    bias_row, bias_start, bias_length = bias_table, 0, 0
    if BIAS_PAGE > 0:
        bias_row, bias_start, bias_length = sequence_numbers(
            bias_table, bias_starts, bias_lengths, sequence, bias_table_stride, BIAS_HEADS, False
        )
    table_row = page_table + sequence * table_stride
    # Tiles that even the block's first query sees in full need no mask.
    least = tl.maximum(length - (num_queries - 1 - block * ROWS // GROUP), 0)
    most = tl.max(visible, 0)
    unmasked_tiles = least // TILE
    sums = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for edges in tl.static_range(2):
        mixed, maximum, sums = attend_tiles(
            mixed,
            maximum,
            sums,
            query,
            visible,
            pages,
            table_row,
            bias_pages,
            bias_row,
            bias_start,
            bias_length,
            0 if edges == 0 else unmasked_tiles,
            unmasked_tiles if edges == 0 else tl.cdiv(most, TILE),
            length,
            page_stride,
            log2_scale,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            DIMS,
            BIAS_PAGE,
            edges == 1,
        )
    nothing = sums == 0.0
    mixed = tl.where(nothing[:, None], 0.0, mixed / tl.where(nothing, 1.0, sums)[:, None])
    place = sequence * output_stride_s + member64 * output_stride_g + index64 * output_stride_m
    tl.store(
        outputs + place[:, None] + dims[None, :], mixed.to(outputs.dtype.element_ty), mask=mask
    )
    if HAS_LSE:
        # Without entries the log-sum-exp is minus infinity, since the maximum is.
        natural = (maximum + tl.log2(tl.where(nothing, 1.0, sums))) * 0.6931471805599453
        place = (sequence * GROUP + member64) * num_queries + index64
        tl.store(lse + place, natural, mask=inside)


def prefill_attention(
    entries: PagedEntries,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None = None,
    with_lse: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Triton launcher of `prefill_attention`: same signature and result."""
    outputs = torch.empty_like(queries) if out is None else out
    check_queries(entries, queries, "group", "m")
    check_out(queries, outputs)
    check_bias(entries, bias)
    shape = num_sequences, group, num_queries = queries.shape[:3]
    lse = queries.new_empty(shape, dtype=torch.float32) if with_lse else None
    if outputs.numel() == 0:
        return outputs, lse
    pages, strides, sizes = entries_arguments(entries)
    most, numbers = query_rows(num_queries * group), NumbersArguments.of(bias)

    def launch(rows: int) -> None:
        _prefill_kernel[(triton.cdiv(num_queries * group, rows), num_sequences)](
            queries,
            *pages,
            *numbers.tensors,
            outputs,
            lse,
            num_queries,
            *queries.stride()[:3],
            *outputs.stride()[:3],
            *strides,
            numbers.table_stride,
            scale * LOG2_E,
            GROUP=group,
            TILE=tile_size(entries),
            ROWS=rows,
            BIAS_HEADS=numbers.heads,
            BIAS_PAGE=numbers.page,
            HAS_LSE=with_lse,
            num_warps=4 if most < MAX_QUERY_ROWS else 8,
            num_stages=4,
            **sizes,
        )

    with on_device(entries):
        launch_fitting("prefill_attention", most, entries.pages, launch)
    return outputs, lse
