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
        values = load_columns(rows, start, length, BLOCK_SIZE, HEAD_SIZE, TILE, DIMS)
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
    root,
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
    """Writes norms [S, capacity]: the group's mean ||v L||, one tile of entries times its L.

    `num_weights` are the matrices of a layer."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    entry = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    total = tl.zeros([TILE], tl.float32)
    if start < length:
        rows = SequenceRows(pages + HEAD_SIZE, page_table + head * table_stride, page_stride)
        values = load_columns(rows, start, length, BLOCK_SIZE, HEAD_SIZE, TILE, DIMS)
        matrix = head // heads_per_layer * num_weights + head % num_weights
        from_dims = root + matrix * GROUP * HEAD_SIZE * HEAD_SIZE + dims * HEAD_SIZE
        for member in range(GROUP):
            squares = tl.zeros([TILE], tl.float32)
            for first in range(0, HEAD_SIZE, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                place = member * HEAD_SIZE * HEAD_SIZE + column
                mask = (dims < HEAD_SIZE)[:, None] & (column < HEAD_SIZE)[None, :]
                tile = tl.load(from_dims[:, None] + place[None, :], mask=mask, other=0.0)
                # In fp32, three products of tf32 are nearly one, and run on tensor cores.
                product = tl.dot(values, tile, input_precision="tf32x3")
                squares += tl.sum(product * product, 1)
            total += tl.sqrt(squares)
    tl.store(norms + head * capacity + entry, total / GROUP, mask=entry < capacity)


def _tile(entries: PagedEntries) -> tuple[int, int]:
    """Entries of a program, and columns of a matrix at once, that fit with three stages of them."""
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
    tile, columns = _tile(entries)
    extra = (len(output_weight), flags, output_weight.shape[3], output_weight.stride())
    sizes = dict(GROUP=output_weight.shape[2], COLUMNS=columns, num_warps=8, num_stages=3)
    return _launch("value_norms_l1", _l1_kernel, entries, output_weight, extra, tile, sizes)


def value_norms_l2(view: KVView, output_root: Tensor, num_layers: int = 1) -> Tensor:
    """Triton launcher of `value_norms_l2`: same signature and result."""
    entries = paged(view).body
    num_heads, dims = entries.num_sequences, entries.head_size
    expect(
        output_root.dim() == 4
        and num_heads % len(output_root) == len(output_root) % num_layers == 0
        and tuple(output_root.shape[2:]) == (dims, dims)
        and output_root.dtype == entries.pages.dtype
        and output_root.is_contiguous(),
        f"contiguous roots [{num_heads}, group, {dims}, {dims}] in {entries.pages.dtype}",
        f"{tuple(output_root.shape)} in {output_root.dtype}",
        "compute output_roots of every query head's projection",
    )
    tile, columns = _tile(entries) if entries.pages.element_size() == 2 else (64, 16)
    columns, group = min(columns, padded(dims)), output_root.shape[1]
    sizes = dict(GROUP=group, COLUMNS=columns, num_warps=8, num_stages=3)
    each = (len(output_root) // num_layers, num_heads // num_layers)
    return _launch("value_norms_l2", _l2_kernel, entries, output_root, each, tile, sizes)


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
