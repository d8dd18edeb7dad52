"""Norms of values after the output projection (CriticalKV); projected values are not stored."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView, paged
from vllm_kvcompress.kernels.common.launch_triton import (
    entries_arguments,
    kernel,
    launch_fitting,
    padded,
)
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect, per_entry
from vllm_kvcompress.kernels.common.paged_rows_triton import SequenceRows, load_columns

L2_TILE = 64  # entries of a program


@kernel("table_stride", "capacity", "num_weights")
def _l1_kernel(
    pages,
    page_table,
    lengths,
    weight,
    norms,
    capacity,
    page_stride,
    table_stride,
    num_weights,
    wanted,
    width,
    weight_strides,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes norms [S, capacity]: one tile of entries times all columns of its head's W_O."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    entry = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    asked = tl.load(wanted + head * capacity + entry, mask=entry < length, other=0) != 0
    total = tl.zeros([TILE], tl.float32)
    if tl.max(asked.to(tl.int32), 0) > 0:
        page_ids = page_table + head * table_stride
        rows = SequenceRows(pages + HEAD_SIZE, page_ids, page_stride)
        values = load_columns(rows, start, length, 0, BLOCK_SIZE, HEAD_SIZE, TILE, DIMS)
        from_dims = weight + head % num_weights * weight_strides[0]
        from_dims += dims.to(tl.int64) * weight_strides[1]
        for member in range(GROUP):
            for first in range(0, width, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                place = member * weight_strides[2] + column.to(tl.int64) * weight_strides[3]
                mask = (dims < HEAD_SIZE)[:, None] & (column < width)[None, :]
                tile = tl.load(from_dims[:, None] + place[None, :], mask=mask, other=0.0)
                projected = tl.dot(values, tile, input_precision="ieee")
                total += tl.sum(tl.abs(projected), 1)
    total = tl.where(asked, total / GROUP, 0.0)
    tl.store(norms + head * capacity + entry, total, mask=entry < capacity)


@kernel("table_stride", "capacity", "num_weights", "heads_per_layer")
def _l2_kernel(
    pages,
    page_table,
    lengths,
    gram,
    norms,
    capacity,
    page_stride,
    table_stride,
    num_weights,
    heads_per_layer,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes norms [S, capacity]: mean sqrt(v Q v^T) of the group, with Q in stripes of columns.

    `num_weights` are the matrices of a layer."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    page_ids = page_table + head * table_stride
    rows = SequenceRows(pages + HEAD_SIZE, page_ids, page_stride)
    entry = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    total = tl.zeros([TILE], tl.float32)
    if start < length:
        values = load_columns(rows, start, length, 0, BLOCK_SIZE, HEAD_SIZE, TILE, DIMS).to(
            tl.float32
        )
        matrix = head // heads_per_layer * num_weights + head % num_weights
        for member in range(GROUP):
            row = matrix * GROUP + member
            from_dims = gram + row * HEAD_SIZE * HEAD_SIZE + dims * HEAD_SIZE
            squares = tl.zeros([TILE], tl.float32)
            for first in range(0, HEAD_SIZE, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                mask = (dims < HEAD_SIZE)[:, None] & (column < HEAD_SIZE)[None, :]
                stripe = tl.load(from_dims[:, None] + column[None, :], mask=mask, other=0.0)
                # Three products of tf32 are nearly one of fp32, and run on tensor cores.
                product = tl.dot(values, stripe, input_precision="tf32x3")
                same = load_columns(
                    rows, start, length, first, BLOCK_SIZE, HEAD_SIZE, TILE, COLUMNS
                )
                squares += tl.sum(product * same.to(tl.float32), 1)
            total += tl.sqrt(tl.maximum(squares, 0.0))
    tl.store(norms + head * capacity + entry, total / GROUP, mask=entry < capacity)


def _l1_tile(entries: PagedEntries) -> tuple[int, int]:
    """Entries of a program, and columns of W_O at once, that fit with three stages of them."""
    row_bytes = padded(entries.head_size) * entries.pages.element_size()
    if row_bytes <= 256:
        return 128, 128
    return (128, 64) if row_bytes <= 512 else (64, 32)


def value_norms_l1(view: KVView, output_weight: Tensor, wanted: Tensor) -> Tensor:
    """Triton launcher of `value_norms_l1`: same signature and result."""
    entries = paged(view).body
    num_heads, dims = entries.num_sequences, entries.head_size
    expect(
        output_weight.dim() == 4
        and num_heads % len(output_weight) == 0
        and output_weight.shape[1] == dims
        and output_weight.dtype == entries.pages.dtype,
        f"o_proj [{num_heads}, {dims}, group, width] in {entries.pages.dtype}",
        f"{tuple(output_weight.shape)} in {output_weight.dtype}",
        "split it by KV head and group",
    )
    flags = per_entry(entries, "wanted", wanted, torch.bool).view(torch.uint8)
    tile, columns = _l1_tile(entries)
    extra = (len(output_weight), flags, output_weight.shape[3], output_weight.stride())
    sizes = dict(GROUP=output_weight.shape[2], COLUMNS=columns, num_warps=8, num_stages=3)
    return _launch("value_norms_l1", _l1_kernel, entries, output_weight, extra, tile, sizes)


def value_norms_l2(view: KVView, output_gram: Tensor, num_layers: int = 1) -> Tensor:
    """Triton launcher of `value_norms_l2`: same signature and result."""
    entries = paged(view).body
    num_heads, dims = entries.num_sequences, entries.head_size
    expect(
        output_gram.dim() == 4
        and num_heads % len(output_gram) == len(output_gram) % num_layers == 0
        and tuple(output_gram.shape[2:]) == (dims, dims)
        and output_gram.dtype == torch.float32
        and output_gram.is_contiguous(),
        f"contiguous Gram matrices [{num_heads}, group, {dims}, {dims}] in fp32",
        f"{tuple(output_gram.shape)} in {output_gram.dtype}",
        "compute W W^T in fp32 for every query head",
    )
    columns = 32 if dims <= 128 else 16
    sizes = dict(GROUP=output_gram.shape[1], COLUMNS=columns, num_warps=4, num_stages=2)
    each = (len(output_gram) // num_layers, num_heads // num_layers)
    return _launch("value_norms_l2", _l2_kernel, entries, output_gram, each, L2_TILE, sizes)


def _launch(
    name: str,
    norms_kernel: Any,
    entries: PagedEntries,
    weight: Tensor,
    extra: tuple[Any, ...],
    most: int,
    sizes: dict[str, int],
) -> Tensor:
    """Norms [S, capacity] by a kernel whose programs take at most `most` entries."""
    num_heads, capacity = entries.num_sequences, entries.capacity
    norms = torch.empty(num_heads, capacity, device=entries.device)
    pages, strides, page_sizes = entries_arguments(entries)

    def launch(tile: int) -> None:
        arguments = (*pages, weight, norms, capacity, *strides, *extra)
        grid = (triton.cdiv(capacity, tile), num_heads)
        norms_kernel[grid](*arguments, TILE=tile, **sizes, **page_sizes)

    if norms.numel():
        launch_fitting(name, most, entries.pages, launch)
    return norms
