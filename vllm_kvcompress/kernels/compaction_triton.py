"""Copies kept entries to fresh pages, keys and values together."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect

COPY_BYTES = 1 << 14  # of rows that a program holds in registers


@kernel("table_stride")
def _compact_kernel(
    pages,
    page_table,
    heads,
    kept_indices,
    targets,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copies ROWS rows of one target page: ROW_SIZE elements each, a key and its value."""
    target = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, WIDTH)
    inside = row < BLOCK_SIZE
    head = tl.load(heads + target).to(tl.int64)
    kept = tl.load(kept_indices + target * BLOCK_SIZE + row, mask=inside, other=0)
    source = tl.load(
        page_table + head * table_stride + kept // BLOCK_SIZE, mask=inside, other=0
    ).to(tl.int64)
    mask = inside[:, None] & (element < ROW_SIZE)[None, :]
    from_rows = pages + source * page_stride + (kept % BLOCK_SIZE) * ROW_SIZE
    rows = tl.load(from_rows[:, None] + element[None, :], mask=mask)
    to_page = pages + tl.load(targets + target).to(tl.int64) * page_stride
    tl.store(to_page + row[:, None] * ROW_SIZE + element[None, :], rows, mask=mask)


def compact_pages(
    entries: PagedEntries, page_counts: Tensor, kept_indices: Tensor, targets: Tensor
) -> None:
    """Triton launcher of `compact_pages`: same signature and result."""
    num_pages, size = targets.numel(), entries.block_size
    expect(
        kept_indices.numel() == num_pages * size and kept_indices.is_contiguous(),
        f"{num_pages * size} kept indices side by side for {num_pages} pages of {size} tokens",
        f"{kept_indices.numel()} with strides {kept_indices.stride()}",
        "keep full pages of every head",
    )
    expect(
        page_counts.numel() == entries.num_sequences,
        f"{entries.num_sequences} page counts, one per head",
        str(page_counts.numel()),
        "count the pages that each head keeps",
    )
    if num_pages == 0:
        return
    heads = torch.repeat_interleave(page_counts, output_size=num_pages)
    row_size = 2 * entries.head_size
    width = padded(row_size)
    rows = min(padded(size), padded(COPY_BYTES // (width * entries.pages.element_size())))
    with on_device(entries):
        _compact_kernel[(num_pages, triton.cdiv(size, rows))](
            entries.pages,
            entries.page_table,
            heads,
            kept_indices,
            targets.contiguous(),
            entries.pages.stride(0),
            entries.page_table.stride(0),
            BLOCK_SIZE=size,
            ROW_SIZE=row_size,
            ROWS=rows,
            WIDTH=width,
            num_warps=4,
        )
