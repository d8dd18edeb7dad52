"""Merges groups of neighbours over pages: every entry is read once, by its group's first."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.paged_entries import PagedEntries, per_entry
from vllm_kvcompress.kernels.rotary_torch import Turns

TILE_BYTES = 1 << 13  # of the fp32 keys, and as much of values, that a program holds


@triton.jit
def _turned(
    key,
    rows,
    step,
    frequencies,
    active,
    ROTARY: tl.constexpr,
    HALVES: tl.constexpr,
    DIMS: tl.constexpr,
):
    """[TILE, DIMS] keys, which lie at `rows`, as they would be `step` positions later."""
    dims = tl.arange(0, DIMS)
    if HALVES:
        pair, earlier = dims % (ROTARY // 2), dims < ROTARY // 2
        partner = tl.where(earlier, dims + ROTARY // 2, dims - ROTARY // 2)
    else:
        pair, earlier = dims // 2, dims % 2 == 0
        partner = tl.where(earlier, dims + 1, dims - 1)
    rotary = dims < ROTARY
    mask = active[:, None] & rotary[None, :]
    other = tl.load(rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = step[:, None] * tl.load(frequencies + pair, mask=rotary, other=0.0)[None, :]
    return key * tl.cos(angle) + tl.where(earlier, -1.0, 1.0)[None, :] * other * tl.sin(angle)


@kernel("table_stride", "capacity")
def _merge_kernel(
    pages,
    page_table,
    lengths,
    link,
    key_weights,
    value_weights,
    keys_out,
    values_out,
    steps,
    frequencies,
    capacity,
    page_stride,
    table_stride,
    ROTARY: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """A tile of places: those that begin a group go along it, entry by entry, all at once."""
    head = tl.program_id(1).to(tl.int64)
    nth = tl.program_id(0) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    inside = (dims < HEAD_SIZE)[None, :]
    length = tl.load(lengths + head).to(tl.int32)
    table_row = page_table + head * table_stride
    joins = tl.load(link + head * capacity + nth, mask=nth < length, other=1)
    active = (nth < length) & ((joins == 0) | (nth == 0))
    size = tl.zeros([TILE], tl.int32)
    key_whole, value_whole = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    keys, values = tl.zeros([TILE, DIMS], tl.float32), tl.zeros([TILE, DIMS], tl.float32)
    own_keys, own_values = tl.zeros([TILE, DIMS], tl.float32), tl.zeros([TILE, DIMS], tl.float32)
    entry = nth
    more = tl.max(active.to(tl.int32), 0)
    while more > 0:
        page = tl.load(table_row + entry // BLOCK_SIZE, mask=active, other=0).to(tl.int64)
        rows = pages + page * page_stride + (entry % BLOCK_SIZE) * 2 * HEAD_SIZE
        mask = active[:, None] & inside
        keys_at = rows[:, None] + dims[None, :]
        key = tl.load(keys_at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(keys_at + HEAD_SIZE, mask=mask, other=0.0).to(tl.float32)
        place = head * capacity + entry
        of_key = tl.load(key_weights + place, mask=active, other=0.0)
        of_value = tl.load(value_weights + place, mask=active, other=0.0)
        if ROTARY > 0:
            step = tl.load(steps + place, mask=active, other=0).to(tl.float32)
            turned = _turned(key, rows, step, frequencies, active, ROTARY, HALVES, DIMS)
            keys += of_key[:, None] * turned
        else:
            keys += of_key[:, None] * key
        values += of_value[:, None] * value
        key_whole += of_key
        value_whole += of_value
        first = (entry == nth)[:, None]
        own_keys = tl.where(first, key, own_keys)
        own_values = tl.where(first, value, own_values)
        size += active.to(tl.int32)
        entry += 1
        joins = tl.load(link + head * capacity + entry, mask=active & (entry < length), other=0)
        active = active & (joins != 0)
        more = tl.max(active.to(tl.int32), 0)
    alone = (size == 1)[:, None]
    keys = tl.where(alone, own_keys, keys / tl.maximum(key_whole, 1e-30)[:, None])
    values = tl.where(alone, own_values, values / tl.maximum(value_whole, 1e-30)[:, None])
    to = (head * capacity + nth)[:, None] * HEAD_SIZE + dims[None, :]
    mask = (nth < capacity)[:, None] & inside
    tl.store(keys_out + to, keys.to(keys_out.dtype.element_ty), mask=mask)
    tl.store(values_out + to, values.to(values_out.dtype.element_ty), mask=mask)


def merge_groups(
    entries: PagedEntries,
    link: Tensor,
    key_weights: Tensor,
    value_weights: Tensor,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """As `paged_torch.merge_groups`, in Triton."""
    num_heads, capacity, dims = entries.num_sequences, entries.capacity, entries.head_size
    link = per_entry(entries, "link", link, torch.bool)
    key_weights = per_entry(entries, "key_weights", key_weights, torch.float32)
    value_weights = per_entry(entries, "value_weights", value_weights, torch.float32)
    keys = torch.empty(
        (num_heads, capacity, dims), dtype=entries.pages.dtype, device=entries.device
    )
    values = torch.empty_like(keys)
    if keys.numel() == 0:
        return keys, values
    tile = max(1, TILE_BYTES // (4 * padded(dims)))
    with on_device(entries):
        _merge_kernel[(triton.cdiv(capacity, tile), num_heads)](
            entries.pages,
            entries.page_table,
            entries.flat_lengths,
            link.view(torch.uint8),
            key_weights,
            value_weights,
            keys,
            values,
            None if turns is None else turns.steps.contiguous(),
            None if turns is None else turns.frequencies,
            capacity,
            entries.pages.stride(0),
            entries.page_table.stride(0),
            ROTARY=0 if turns is None else 2 * turns.frequencies.numel(),
            HALVES=turns is not None and turns.halves,
            BLOCK_SIZE=entries.block_size,
            HEAD_SIZE=dims,
            TILE=tile,
            DIMS=padded(dims),
            num_warps=4,
        )
    return keys, values
