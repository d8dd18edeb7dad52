"""MomentKV's correction of attention outputs, from states in pages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.launch_triton import (
    NumbersArguments,
    kernel,
    launch_fitting,
    padded,
    query_rows,
)
from vllm_kvcompress.kernels.common.paged_entries import check_out, mismatch
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers, PagedNumbers
from vllm_kvcompress.kernels.common.paged_rows_triton import (
    SequenceNumbers,
    load_numbers,
    sequence_numbers,
)
from vllm_kvcompress.kernels.merging.moments import packed_size

# Of the fp32 queries of a program, and of the rows of cross moments that it reads at once.
ROWS_BYTES, CROSS_BYTES = 1 << 15, 1 << 14


@kernel("num_queries", "table_stride")
def _correct_kernel(
    outputs,
    lse,
    queries,
    pages,
    halves,
    page_table,
    starts,
    lengths,
    num_queries,
    out_strides,
    query_strides,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ADDRESSED: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Corrects ROWS outputs of one sequence, if entries of it were evicted.

    `halves` are the same pages, viewed as 16-bit numbers.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = tl.program_id(1).to(tl.int64)
    index, member = (row // GROUP).to(tl.int64), (row % GROUP).to(tl.int64)
    inside = index < num_queries
    dims = tl.arange(0, DIMS)
    real = dims < HEAD_SIZE
    states = (pages, page_table, starts, lengths, table_stride)
    state = sequence_numbers(sequence, states, HEADS, PAGE, ADDRESSED)
    # The same, in 16 bits.
    crosses = SequenceNumbers(halves, state.page_ids, state.start, state.count)
    count = load_numbers(state, state.start, state.count > 0, PAGE)
    if count > 0:
        place = sequence * query_strides[0] + member * query_strides[1] + index * query_strides[2]
        mask = inside[:, None] & real[None, :]
        query = tl.load(queries + place[:, None] + dims[None, :], mask=mask, other=0.0)
        query = query.to(tl.float32)
        unit = load_numbers(state, state.start + 1, state.count > 0, PAGE)
        means = state.start + 2
        mean_key = load_numbers(state, means + dims, real, PAGE)
        logit = scale * tl.sum(query * mean_key[None, :], 1)
        place = (sequence * GROUP + member) * num_queries + index
        seen = tl.load(lse + place, mask=inside, other=0.0)
        weight = (1.0 / (1.0 + tl.exp(tl.log(count) + logit - seen)))[:, None]
        place = sequence * out_strides[0] + member * out_strides[1] + index * out_strides[2]
        for first in range(0, HEAD_SIZE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            some = column < HEAD_SIZE
            mean_value = load_numbers(state, means + HEAD_SIZE + column, some, PAGE)
            number = 2 * (means + 2 * HEAD_SIZE) + column[:, None] * HEAD_SIZE + dims[None, :]
            held = some[:, None] & real[None, :] & (state.count > 2 + 2 * HEAD_SIZE)
            cross = load_numbers(crosses, number, held, 2 * PAGE).to(tl.float32)
            estimate = tl.dot(query, tl.trans(cross), input_precision="tf32x3")
            estimate = estimate * (scale * unit) + mean_value[None, :]
            to = outputs + place[:, None] + column[None, :]
            written = inside[:, None] & some[None, :]
            own = tl.load(to, mask=written, other=0.0).to(tl.float32)
            mixed = weight * own + (1.0 - weight) * estimate
            tl.store(to, mixed.to(outputs.dtype.element_ty), mask=written)


def correct_with_moments(
    state: PagedNumbers | AddressedNumbers,
    outputs: Tensor,
    lse: Tensor,
    queries: Tensor,
    scale: float,
) -> None:
    """Triton launcher of `correct_with_moments`: same signature and result."""
    num_sequences, group, num_queries, head_size = queries.shape
    check_out(queries, outputs)
    if not (lse.shape == queries.shape[:3] and lse.is_contiguous() and lse.dtype == torch.float32):
        raise mismatch(
            f"contiguous log-sum-exps {tuple(queries.shape[:3])} in fp32",
            f"{tuple(lse.shape)} in {lse.dtype}",
            "pass the log-sum-exps of the same attention",
        )
    if not (state.num_sequences == num_sequences and state.pages.device == queries.device):
        raise mismatch(
            f"states of {num_sequences} sequences on {queries.device}",
            f"{state.num_sequences} on {state.device}",
            f"give every KV head of every request {packed_size(head_size)} numbers",
        )
    if outputs.numel() == 0:
        return
    most, numbers = ROWS_BYTES // (4 * padded(head_size)), NumbersArguments.of(state)

    def launch(rows: int) -> None:
        _correct_kernel[(triton.cdiv(num_queries * group, rows), num_sequences)](
            outputs,
            lse,
            queries,
            state.pages,
            state.pages.view(torch.float16),
            *numbers.tensors[1:],
            num_queries,
            outputs.stride()[:3],
            queries.stride()[:3],
            numbers.table_stride,
            scale,
            GROUP=group,
            HEADS=numbers.heads,
            ADDRESSED=numbers.addressed,
            PAGE=numbers.page,
            HEAD_SIZE=head_size,
            ROWS=rows,
            COLUMNS=CROSS_BYTES // (4 * padded(head_size)),
            DIMS=padded(head_size),
            num_warps=4,
            num_stages=2,
        )

    rows = query_rows(num_queries * group, most)
    launch_fitting("correct_with_moments", rows, queries, launch)
