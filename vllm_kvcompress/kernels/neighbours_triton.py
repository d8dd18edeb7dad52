"""How alike keys of the same head are, over pages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.paged_entries import PagedEntries, per_entry
from vllm_kvcompress.kernels.paged_rows_triton import load_rows, tile_size


@kernel("table_stride", "capacity")
def _compare_kernel(
    pages,
    page_table,
    lengths,
    others,
    found,
    capacity,
    page_stride,
    table_stride,
    COSINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """found [S, capacity]: cosines with the key before, or distances from others; else 0."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    table_row = page_table + head * table_stride
    nth = start + tl.arange(0, TILE)
    result = tl.zeros([TILE], tl.float32)
    if start < length:
        present = nth < length
        if COSINES:
            present = present & (nth > 0)
            other = nth - 1
        else:
            other = tl.load(others + head * capacity + nth, mask=present, other=0).to(tl.int32)
        own = load_rows(
            pages, table_row, nth, present, page_stride, BLOCK_SIZE, HEAD_SIZE, DIMS
        ).to(tl.float32)
        theirs = load_rows(
            pages, table_row, other, present, page_stride, BLOCK_SIZE, HEAD_SIZE, DIMS
        ).to(tl.float32)
        if COSINES:
            sizes = tl.sqrt(tl.sum(own * own, 1)) * tl.sqrt(tl.sum(theirs * theirs, 1))
            cosines = tl.sum(own * theirs, 1) / tl.maximum(sizes, 1e-12)
            result = tl.minimum(tl.maximum(cosines, -1.0), 1.0)
        else:
            apart = own - theirs
            result = tl.sqrt(tl.sum(apart * apart, 1))
    tl.store(found + head * capacity + nth, result, mask=nth < capacity)


def neighbour_cosines(entries: PagedEntries) -> Tensor:
    """As `paged_torch.neighbour_cosines`, in Triton."""
    return _compare(entries, None)


def key_distances(entries: PagedEntries, others: Tensor) -> Tensor:
    """As `paged_torch.key_distances`, in Triton."""
    return _compare(entries, per_entry(entries, "others", others, torch.int64))


def _compare(entries: PagedEntries, others: Tensor | None) -> Tensor:
    found = torch.empty(entries.num_sequences, entries.capacity, device=entries.device)
    if found.numel() == 0:
        return found
    tile = tile_size(entries)
    with on_device(entries):
        _compare_kernel[(triton.cdiv(entries.capacity, tile), entries.num_sequences)](
            entries.pages,
            entries.page_table,
            entries.flat_lengths,
            others,
            found,
            entries.capacity,
            entries.pages.stride(0),
            entries.page_table.stride(0),
            COSINES=others is None,
            BLOCK_SIZE=entries.block_size,
            HEAD_SIZE=entries.head_size,
            TILE=tile,
            DIMS=padded(entries.head_size),
        )
    return found
