"""KeyDiff over pages: once over the keys for the anchor, and once for the cosines with it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.paged_entries import PagedEntries, expect
from vllm_kvcompress.kernels.paged_rows_triton import entry_offsets, tile_size

ANCHORS = ("mean_normalized", "mean_raw", "pairwise")


@triton.jit
def _load_keys(
    pages,
    table_row,
    start,
    length,
    page_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[TILE, DIMS] fp32 keys, zeros behind the length, and [TILE] one over their norms."""
    present = start + tl.arange(0, TILE) < length
    dims = tl.arange(0, DIMS)
    offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
    keys = tl.load(
        pages + offsets[:, None] + dims[None, :],
        mask=present[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    ).to(tl.float32)
    norms = tl.sqrt(tl.sum(keys * keys, 1))
    return keys, 1.0 / tl.maximum(norms, 1e-8)


@kernel("table_stride", "num_tiles")
def _anchor_kernel(
    pages,
    page_table,
    lengths,
    parts,
    num_tiles,
    page_stride,
    table_stride,
    NORMALIZED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """parts [S, tiles, HEAD_SIZE] fp32: the sum of a tile's keys, or of its unit keys."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    dims = tl.arange(0, DIMS)
    total = tl.zeros([DIMS], tl.float32)
    if tile * TILE < length:
        keys, inverse = _load_keys(
            pages,
            page_table + head * table_stride,
            tile * TILE,
            length,
            page_stride,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            DIMS,
        )
        if NORMALIZED:
            keys = keys * inverse[:, None]
        total = tl.sum(keys, 0)
    place = (head * num_tiles + tile) * HEAD_SIZE + dims
    tl.store(parts + place, total, mask=dims < HEAD_SIZE)


@kernel("table_stride", "capacity")
def _cosine_kernel(
    pages,
    page_table,
    lengths,
    anchors,
    scores,
    capacity,
    page_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """scores [S, capacity]: unit keys times anchors [S, HEAD_SIZE]; 0 behind the length."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    dims = tl.arange(0, DIMS)
    nth = start + tl.arange(0, TILE)
    dots = tl.zeros([TILE], tl.float32)
    if start < length:
        anchor = tl.load(anchors + head * HEAD_SIZE + dims, mask=dims < HEAD_SIZE, other=0.0)
        keys, inverse = _load_keys(
            pages,
            page_table + head * table_stride,
            start,
            length,
            page_stride,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            DIMS,
        )
        dots = tl.sum(keys * anchor[None, :], 1) * inverse
    tl.store(scores + head * capacity + nth, dots, mask=nth < capacity)


def keydiff_scores(entries: PagedEntries, anchor: str) -> Tensor:
    """As `paged_torch.keydiff_scores`, in Triton; not for the anchor `median`."""
    expect(
        anchor in ANCHORS,
        f"an anchor of {', '.join(ANCHORS)}",
        repr(anchor),
        "other anchors need the keys gathered: use kernels.keydiff_scores",
    )
    num_heads, capacity = entries.num_sequences, entries.capacity
    scores = torch.empty(num_heads, capacity, device=entries.device)
    if scores.numel() == 0:
        return scores
    tile = tile_size(entries)
    num_tiles = triton.cdiv(capacity, tile)
    parts = scores.new_empty((num_heads, num_tiles, entries.head_size))
    lengths = entries.flat_lengths
    pages = (entries.pages, entries.page_table, lengths)
    strides = (entries.pages.stride(0), entries.page_table.stride(0))
    sizes = dict(
        BLOCK_SIZE=entries.block_size,
        HEAD_SIZE=entries.head_size,
        TILE=tile,
        DIMS=padded(entries.head_size),
    )
    grid = (num_tiles, num_heads)
    with on_device(entries):
        _anchor_kernel[grid](
            *pages, parts, num_tiles, *strides, NORMALIZED=anchor != "mean_raw", **sizes
        )
        towards = _directed(parts.sum(dim=1), lengths, anchor)
        _cosine_kernel[grid](*pages, towards, scores, capacity, *strides, **sizes)
    return scores


def _directed(totals: Tensor, lengths: Tensor, anchor: str) -> Tensor:
    """[S, D] by which unit keys are multiplied: minus the unit anchor, or minus the sum itself."""
    if anchor == "pairwise":
        return -totals
    centre = totals / lengths[:, None].clamp_min(1)
    return -centre / torch.linalg.vector_norm(centre, dim=1, keepdim=True).clamp_min(1e-8)
