"""Attention of a chunk's queries over compressed pages and, causally, the chunk itself.

Decoding shares the inner loop, `attend_tiles`.

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

from vllm_kvcompress.kernels.common.launch_triton import (
    MAX_QUERY_ROWS,
    NumbersArguments,
    entries_arguments,
    kernel,
    launch_fitting,
    query_rows,
)
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, tile_size
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers, check_attention
from vllm_kvcompress.kernels.common.paged_rows_triton import (
    LOG2_E,
    SequenceRows,
    entry_offsets,
    finite_maximum,
    load_numbers,
    log_sum_exp,
    sequence_numbers,
)


@triton.jit
def attend_tiles(
    outputs,
    maximum,
    weight_sum,
    query,
    visible,
    rows,
    bias,
    first_tile,
    last_tile,
    length,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BIAS_PAGE: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Adds the entries of some tiles to a running softmax.

    Args:
        outputs: [rows, DIMS] fp32 not yet divided by `weight_sum`.
        maximum: [rows] fp32 of the logits so far, in base 2.
        weight_sum: [rows] fp32 sum of the weights so far.
        query: [rows, DIMS].
        visible: [rows] number of entries that each row sees.
        rows: the sequence's `SequenceRows`.
        bias: `SequenceNumbers` that are added to the logits of its first entries.
        first_tile, last_tile: tiles of the sequence, the last not included.
        BIAS_PAGE: numbers of a page of these; 0: there are none.
        EDGES: whether some rows do not see some of these entries.

    Returns:
        outputs, maximum and weight_sum.
    """
    dims = tl.arange(0, query.shape[1])
    for tile in range(first_tile, last_tile):
        start = tile * TILE
        entries = start + tl.arange(0, TILE)
        present = entries < length
        offsets = entry_offsets(rows, start, present, BLOCK_SIZE, HEAD_SIZE, TILE)
        places = rows.pages + offsets[:, None] + dims[None, :]
        mask = present[:, None]
        if query.shape[1] != HEAD_SIZE:
            mask = mask & (dims < HEAD_SIZE)[None, :]
        keys = tl.load(places, mask=mask, other=0.0)
        values = tl.load(places + HEAD_SIZE, mask=mask, other=0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * log2_scale
        if BIAS_PAGE > 0:
            added = load_numbers(bias, bias.start + entries, entries < bias.count, BIAS_PAGE)
            logits += (added * 1.4426950408889634)[None, :]
        if EDGES:
            logits = tl.where(entries[None, :] < visible[:, None], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        top = finite_maximum(new_maximum)
        weights = tl.exp2(logits - top[:, None])
        shrink = tl.exp2(maximum - top)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        outputs = outputs * shrink[:, None]
        outputs = tl.dot(weights.to(values.dtype), values, outputs, input_precision="ieee")
        maximum = new_maximum
    return outputs, maximum, weight_sum


@triton.jit
def attend_visible(
    query,
    visible,
    least_visible,
    rows,
    bias,
    length,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BIAS_PAGE: tl.constexpr,
):
    """Attends the entries that each row sees, with a mask only where some rows do not see some.

    Args:
        query, visible, rows, bias: as in `attend_tiles`.
        least_visible: entries that all of the rows see.

    Returns:
        outputs, maximum and weight_sum of `attend_tiles`.
    """
    outputs = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    weight_sum = tl.zeros([query.shape[0]], tl.float32)
    most_visible = tl.max(visible, 0)
    unmasked_tiles = least_visible // TILE
    for edges in tl.static_range(2):
        outputs, maximum, weight_sum = attend_tiles(
            outputs,
            maximum,
            weight_sum,
            query,
            visible,
            rows,
            bias,
            0 if edges == 0 else unmasked_tiles,
            unmasked_tiles if edges == 0 else tl.cdiv(most_visible, TILE),
            length,
            log2_scale,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            BIAS_PAGE,
            edges == 1,
        )
    return outputs, maximum, weight_sum


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
    query_strides,
    out_strides,
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
    place = sequence * query_strides[0] + member64 * query_strides[1] + index64 * query_strides[2]
    query = tl.load(queries + place[:, None] + dims[None, :], mask=mask, other=0.0)
    length = tl.load(lengths + sequence).to(tl.int32)
    visible = tl.where(inside, length - (num_queries - 1 - index), 0)
    biases = (bias_pages, bias_table, bias_starts, bias_lengths, bias_table_stride)
    bias = sequence_numbers(sequence, biases, BIAS_HEADS, BIAS_PAGE, False)
    page_ids = page_table + sequence * table_stride
    rows = SequenceRows(pages, page_ids, page_stride)
    least = tl.maximum(length - (num_queries - 1 - block * ROWS // GROUP), 0)
    mixed, maximum, sums = attend_visible(
        query,
        visible,
        least,
        rows,
        bias,
        length,
        log2_scale,
        BLOCK_SIZE,
        HEAD_SIZE,
        TILE,
        BIAS_PAGE,
    )
    nothing = sums == 0.0
    mixed = tl.where(nothing[:, None], 0.0, mixed / tl.where(nothing, 1.0, sums)[:, None])
    place = sequence * out_strides[0] + member64 * out_strides[1] + index64 * out_strides[2]
    tl.store(
        outputs + place[:, None] + dims[None, :], mixed.to(outputs.dtype.element_ty), mask=mask
    )
    if HAS_LSE:
        place = (sequence * GROUP + member64) * num_queries + index64
        tl.store(lse + place, log_sum_exp(maximum, sums), mask=inside)


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
    check_attention(entries, queries, outputs, bias, "group", "m")
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
            queries.stride()[:3],
            outputs.stride()[:3],
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

    launch_fitting("prefill_attention", most, entries.pages, launch)
    return outputs, lse
