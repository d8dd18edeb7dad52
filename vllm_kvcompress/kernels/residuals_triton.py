"""What MomentKV's state does not predict of each value, over pages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.fitting_triton import launch_fitting
from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.moments_torch import moment_size, split_moments
from vllm_kvcompress.kernels.paged_entries import PagedEntries, expect
from vllm_kvcompress.kernels.paged_rows_triton import load_columns

TILE = 64  # entries of a program


@kernel("table_stride", "capacity")
def _residuals_kernel(
    pages,
    page_table,
    lengths,
    turn,
    means,
    residuals,
    capacity,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """residuals [S, capacity]: |v - mean - k turn|, with `turn` [S, D, D] in stripes of columns."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    table_row = page_table + head * table_stride
    nth = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    squares = tl.zeros([TILE], tl.float32)
    if start < length:
        keys = load_columns(
            pages,
            table_row,
            start,
            length,
            page_stride,
            0,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            DIMS,
        ).to(tl.float32)
        rows = turn + head * HEAD_SIZE * HEAD_SIZE + dims * HEAD_SIZE
        for first in range(0, HEAD_SIZE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < HEAD_SIZE
            mask = (dims < HEAD_SIZE)[:, None] & inside[None, :]
            stripe = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
            mean = tl.load(means + head * HEAD_SIZE + column, mask=inside, other=0.0)
            values = load_columns(
                pages + HEAD_SIZE,
                table_row,
                start,
                length,
                page_stride,
                first,
                BLOCK_SIZE,
                HEAD_SIZE,
                TILE,
                COLUMNS,
            ).to(tl.float32)
            # Three products of tf32 are nearly one of fp32, and run on tensor cores.
            rest = values - mean[None, :] - tl.dot(keys, stripe, input_precision="tf32x3")
            squares += tl.sum(rest * rest, 1)
    found = tl.where(nth < length, tl.sqrt(squares), 0.0)
    tl.store(residuals + head * capacity + nth, found, mask=nth < capacity)


def moment_residuals(entries: PagedEntries, state: Tensor, scale: float) -> Tensor:
    """As `paged_torch.moment_residuals`, in Triton."""
    num_heads, capacity, dims = entries.num_sequences, entries.capacity, entries.head_size
    expect(
        tuple(state.shape) == (num_heads, moment_size(dims)) and state.dtype == torch.float32,
        f"a state [{num_heads}, {moment_size(dims)}] in fp32",
        f"{tuple(state.shape)} in {state.dtype}",
        "start from zeros, and pass what add_to_moments returned",
    )
    residuals = torch.empty(num_heads, capacity, device=entries.device)
    if residuals.numel() == 0:
        return residuals
    count, _, means, cross = split_moments(state, dims)
    turn = cross.transpose(1, 2) * (scale / count.clamp_min(1))[:, None, None]
    turn, means = turn.contiguous(), means.contiguous()

    def launch(tile: int) -> None:
        _residuals_kernel[(triton.cdiv(capacity, tile), num_heads)](
            entries.pages,
            entries.page_table,
            entries.flat_lengths,
            turn,
            means,
            residuals,
            capacity,
            entries.pages.stride(0),
            entries.page_table.stride(0),
            BLOCK_SIZE=entries.block_size,
            HEAD_SIZE=dims,
            TILE=tile,
            COLUMNS=32 if dims <= 128 else 16,
            DIMS=padded(dims),
            num_warps=4,
            num_stages=2,
        )

    with on_device(entries):
        launch_fitting("moment_residuals", TILE, entries.pages, launch)
    return residuals
