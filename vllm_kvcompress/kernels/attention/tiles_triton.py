"""The inner loop of attention over pages, which decoding and prefill share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvcompress.kernels.common.paged_rows_triton import (
    entry_offsets,
    finite_maximum,
    paged_numbers,
)


@triton.jit
def attend_tiles(
    outputs,
    maximum,
    weight_sum,
    query,
    visible,
    pages,
    table_row,
    bias_pages,
    bias_row,
    bias_start,
    bias_length,
    first_tile,
    last_tile,
    length,
    page_stride,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
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
        first_tile, last_tile: tiles of the sequence, the last not included.
        bias_pages, bias_row: pages of biases, and the sequence's row of page ids.
        bias_start, bias_length: index of its first bias in these pages, and their number.
        BIAS_PAGE: numbers of such a page; 0: there are no biases.
        EDGES: whether some rows do not see some of these entries.

    Returns:
        outputs, maximum and weight_sum.
    """
    dims = tl.arange(0, DIMS)
    for tile in range(first_tile, last_tile):
        start = tile * TILE
        entries = start + tl.arange(0, TILE)
        present = entries < length
        offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
        rows = pages + offsets[:, None] + dims[None, :]
        mask = present[:, None]
        if DIMS != HEAD_SIZE:
            mask = mask & (dims < HEAD_SIZE)[None, :]
        keys = tl.load(rows, mask=mask, other=0.0)
        values = tl.load(rows + HEAD_SIZE, mask=mask, other=0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * log2_scale
        if BIAS_PAGE > 0:
            added = paged_numbers(
                bias_pages, bias_row, bias_start + entries, entries < bias_length, BIAS_PAGE
            )
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
