"""Page ids of new blocks, appended to the requests' rows in one launch.

The host does not know the rows' lengths: the kernel reads how many pages each head has kept.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.common.paged_entries import expect
from vllm_kvcompress.kernels.tail_pages import TailRows


@kernel(
    *("num_added", "block_stride", "run_stride_l", "numbers_stride", "count_stride_l"),
    *("table_stride_l", "table_stride_r", "table_stride_h"),
)
def _append_kernel(
    runs,
    run_numbers,
    counts,
    offsets,
    added,
    block_table,
    table,
    num_added,
    block_stride,
    run_stride_l,
    numbers_stride,
    count_stride_l,
    table_stride_l,
    table_stride_r,
    table_stride_h,
    PAGES_PER_BLOCK: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Appends the pages of one block in all layers and heads: at most ROWS, a power of two.

    table_stride_h, the columns of the table's rows, is 0 without a table.
    """
    block_info = added + tl.program_id(0)
    request, slot = tl.load(block_info), tl.load(block_info + num_added)
    between = tl.load(block_info + 2 * num_added)
    row, logical = tl.load(block_info + 3 * num_added), tl.load(block_info + 4 * num_added)
    block = tl.load(block_table + row * block_stride + logical).to(tl.int64)
    index = tl.arange(0, ROWS)
    exists = index < NUM_LAYERS * NUM_HEADS
    layer, head = (index // NUM_HEADS).to(tl.int64), index % NUM_HEADS
    offset = tl.load(offsets + index, mask=exists, other=0)
    page = (block * PAGES_PER_BLOCK + offset).to(tl.int32)
    count = tl.load(counts + layer * count_stride_l + slot * NUM_HEADS + head, mask=exists, other=0)
    column = count + between
    number = tl.load(run_numbers + slot * numbers_stride + column // RUN, mask=exists, other=0)
    place = layer * run_stride_l + (number * NUM_HEADS + head) * RUN + column % RUN
    tl.store(runs + place, page, mask=exists)
    place = layer * table_stride_l + request * table_stride_r + head * table_stride_h + column
    tl.store(table + place, page, mask=exists & (column < table_stride_h))


def append_pages(
    rows: TailRows, added: Tensor, block_table: Tensor, table: Tensor | None = None
) -> None:
    """Triton launcher of `append_pages`: same signature and result."""
    num_layers, _, num_heads, run = rows.runs.shape
    contiguous = (rows.runs, rows.run_numbers, rows.counts, added)
    expect(
        all(each.is_contiguous() for each in contiguous) and block_table.stride(1) == 1,
        "rows and added blocks side by side, and block ids one behind the other",
        f"strides {[each.stride() for each in (*contiguous, block_table)]}",
        "call contiguous()",
    )
    table_strides = (0, 0, 0)
    if table is not None:
        strides = f"strides {table.stride()}"
        expect(table.is_contiguous(), "a contiguous table", strides, "pass all of its columns")
        table_strides = table.stride()[:3]
    with on_device(rows.runs):
        _append_kernel[(added.shape[1],)](
            rows.runs,
            rows.run_numbers,
            rows.counts,
            rows.offsets,
            added,
            block_table,
            rows.runs if table is None else table,
            added.shape[1],
            block_table.stride(0),
            rows.runs.stride(0),
            rows.run_numbers.stride(0),
            rows.counts.stride(0),
            *table_strides,
            PAGES_PER_BLOCK=rows.pages_per_block,
            NUM_LAYERS=num_layers,
            NUM_HEADS=num_heads,
            RUN=run,
            ROWS=padded(num_layers * num_heads),
        )
