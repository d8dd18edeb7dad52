"""Choice of pages: scores of all of them, then the highest ones by counting digits.

A program of the first kernel scores a tile of a sequence's pages, so that even one sequence keeps
many programs busy. The second has a program per sequence: it finds the digits of the lowest chosen
score one after the other, as in `top_entries`, and then writes pages in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels import page_choice
from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.common.paged_entries import expect
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.page_choice import Choice, PageLists
from vllm_kvcompress.kernels.top_entries_triton import BINS, DIGITS, sort_keys

PAGES = 32  # whose summaries a program of the first kernel reads
TILE = 1024  # scores that one of the second goes through at once
MAX_QUERIES = 64  # of a sequence; a chunk has more, for which a matrix product is faster


@kernel("width", "table_stride", "num_first", "num_last")
def _scores_kernel(
    queries,
    summaries,
    scales,
    page_table,
    num_pages,
    scores,
    width,
    table_stride,
    num_first,
    num_last,
    head_size,
    group,
    VECTORS: tl.constexpr,
    BOUNDS: tl.constexpr,
    SCALED: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Writes scores [S, W] fp32: infinite where a page is always or never read."""
    sequence = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    count = tl.load(num_pages + sequence)
    exists = columns < count
    pages = tl.load(page_table + sequence * table_stride + columns, mask=exists, other=0)
    pages = pages.to(tl.int64)
    elements = tl.arange(0, ELEMENTS)
    inside = elements < head_size
    places = summaries + pages[:, None] * (VECTORS * head_size) + elements[None, :]
    both = exists[:, None] & inside[None, :]
    first = tl.load(places, mask=both, other=0.0).to(tl.float32)
    second = first
    if VECTORS > 1:
        second = tl.load(places + head_size, mask=both, other=0.0).to(tl.float32)
    joined = tl.full([PAGES], float("-inf"), tl.float32)
    for member in range(group):
        row = queries + (sequence * group + member) * head_size
        query = tl.load(row + elements, mask=inside, other=0.0).to(tl.float32)[None, :]
        if BOUNDS:
            products = tl.sum(tl.maximum(query * first, query * second), 1)
        else:
            products = tl.sum(query * first, 1)
            if VECTORS > 1:
                products = tl.maximum(products, tl.sum(query * second, 1))
            for part in tl.static_range(2, VECTORS):
                more = tl.load(places + part * head_size, mask=both, other=0.0).to(tl.float32)
                products = tl.maximum(products, tl.sum(query * more, 1))
        joined = tl.maximum(joined, products)
    if SCALED:
        joined *= tl.load(scales + pages, mask=exists, other=0.0)
    always = (columns < num_first) | (columns >= count - num_last)
    joined = tl.where(always, float("inf"), joined)
    joined = tl.where(exists, joined, float("-inf"))
    tl.store(scores + sequence * width + columns, joined, mask=columns < width)


@triton.jit
def _tile(scores, start, width, TILE: tl.constexpr):
    """Sort keys of a sequence's scores from `start` on, their columns, and which columns exist."""
    columns = start + tl.arange(0, TILE)
    inside = columns < width
    return sort_keys(tl.load(scores + columns, mask=inside, other=0.0)), columns, inside


@kernel("width", "table_stride", "most")
def _choose_kernel(
    scores, page_table, num_read, chosen, width, table_stride, most, TILE: tl.constexpr
):
    """Writes chosen [S, most] int32: pages of the highest scores, in their order, then zeros."""
    sequence = tl.program_id(0).to(tl.int64)
    scores += sequence * width
    page_table += sequence * table_stride
    chosen += sequence * most
    wanted = tl.load(num_read + sequence).to(tl.int32)
    bins, left, lowest, equals = tl.arange(0, BINS), wanted, tl.zeros([], tl.uint32), wanted
    for index in tl.static_range(DIGITS):
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, width, TILE):
            keys, _, able = _tile(scores, start, width, TILE)
            if index > 0:
                able = able & (keys >> (8 * (DIGITS - index)) == lowest)
            digits = (keys >> (8 * (DIGITS - 1 - index))) % BINS
            counts += tl.histogram(digits.to(tl.int32), BINS, mask=able)
        higher = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        digit = tl.max(tl.where(higher + counts >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins == digit, higher, 0), 0)
        equals = tl.sum(tl.where(bins == digit, counts, 0), 0)
        lowest = lowest * BINS + digit.to(tl.uint32)
    written, passed = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, width, TILE):
        keys, columns, inside = _tile(scores, start, width, TILE)
        equal = (inside & (keys == lowest)).to(tl.int32)
        late = passed + tl.cumsum(equal, 0) > equals - left
        kept = inside & ((keys > lowest) | ((equal > 0) & late))
        places = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        pages = tl.load(page_table + columns, mask=kept, other=0)
        tl.store(chosen + places, pages.to(tl.int32), mask=kept)
        written += tl.sum(kept.to(tl.int32), 0)
        passed += tl.sum(equal, 0)
    for start in range(0, most, TILE):
        places = start + tl.arange(0, TILE)
        nothing = tl.zeros([TILE], tl.int32)
        tl.store(chosen + places, nothing, mask=(places >= wanted) & (places < most))


def choose_pages(
    queries: Tensor,
    summaries: Tensor,
    pages: PageLists,
    choice: Choice,
    scales: Tensor | None = None,
) -> Tensor:
    """Triton launcher of `choose_pages`: same signature and result; the twin serves chunks."""
    num_sequences, group, head_size = queries.shape
    if group > MAX_QUERIES:
        return twin(page_choice.choose_pages)(queries, summaries, pages, choice, scales)
    (page_table, num_pages, num_read), vectors = pages, choice.num_means or 2
    expect(
        summaries.shape[1:] == (vectors * head_size,) and summaries.is_contiguous(),
        f"summaries [pages, {vectors * head_size}] of keys of the queries' size",
        f"{tuple(summaries.shape)}",
        "pass the summaries of the cache's pages",
    )
    expect(
        len(page_table) == num_sequences and page_table.stride(1) == 1,
        f"{num_sequences} rows of page ids that lie side by side",
        f"{tuple(page_table.shape)} with strides {page_table.stride()}",
        "pass one row per sequence",
    )
    width, device = page_table.shape[1], queries.device
    scores = torch.empty((num_sequences, width), dtype=torch.float32, device=device)
    chosen = torch.empty((num_sequences, choice.most), dtype=torch.int32, device=device)
    with on_device(queries):
        _scores_kernel[(triton.cdiv(width, PAGES), num_sequences)](
            queries.contiguous(),
            summaries,
            summaries if scales is None else scales,
            page_table,
            num_pages.contiguous(),
            scores,
            width,
            page_table.stride(0),
            choice.num_first,
            choice.num_last,
            head_size,
            group,
            VECTORS=vectors,
            BOUNDS=not choice.num_means,
            SCALED=scales is not None,
            ELEMENTS=padded(head_size),
            PAGES=PAGES,
        )
        _choose_kernel[(num_sequences,)](
            scores,
            page_table,
            num_read.contiguous(),
            chosen,
            width,
            page_table.stride(0),
            choice.most,
            TILE=TILE,
        )
    return chosen
