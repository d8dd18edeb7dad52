"""OBCache over pages: how much the window's outputs would change without an entry.

One pass over the entries gives every query's output and log-sum-exp, in pieces of some tiles that
are then put together; a second one adds up what each entry changes. No [heads, window, tokens]
tensor is made.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.attention.tiles_triton import attend_tiles
from vllm_kvcompress.kernels.common.fitting_triton import launch_fitting
from vllm_kvcompress.kernels.common.kv_view import KVView, paged
from vllm_kvcompress.kernels.common.launch_triton import (
    MOST_ROWS,
    kernel,
    on_device,
    padded,
    query_rows,
)
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect, tile_size
from vllm_kvcompress.kernels.common.paged_rows_triton import LOG2_E, entry_offsets
from vllm_kvcompress.kernels.common.window_rows_triton import (
    CHANGING,
    check_window,
    window_logits,
    window_rows,
)

VARIANTS = ("value", "key", "joint")


@kernel(*CHANGING, "spacing", "num_splits", "num_tiles")
def _pieces_kernel(
    queries,
    pages,
    page_table,
    lengths,
    outputs,
    sums,
    num_queries,
    num_splits,
    num_tiles,
    stride_w,
    stride_h,
    spacing,
    page_stride,
    table_stride,
    log2_scale,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Attention over one split's entries, all in fp32: outputs [S, rows, splits, D], and sums
    [S, rows, splits], natural log-sum-exp; 0 and minus infinity where a row sees nothing."""
    split = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    head = tl.program_id(2)
    length = tl.load(lengths + head).to(tl.int32)
    query, visible = window_rows(
        queries,
        head,
        first_row,
        num_queries,
        length,
        stride_w,
        stride_h,
        spacing,
        GROUP,
        ROWS,
        HEAD_SIZE,
        DIMS,
    )
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    mixed, maximum, whole = attend_tiles(
        mixed,
        maximum,
        whole,
        query,
        visible,
        pages,
        page_table + head.to(tl.int64) * table_stride,
        None,
        None,
        0,
        0,
        split * num_tiles,
        tl.minimum(tl.cdiv(length, TILE), (split + 1) * num_tiles),
        length,
        page_stride,
        log2_scale,
        BLOCK_SIZE,
        HEAD_SIZE,
        TILE,
        DIMS,
        0,
        True,
    )
    some = tl.where(whole == 0.0, 1.0, whole)
    row = first_row + tl.arange(0, ROWS)
    num_rows = num_queries * GROUP
    place = (head.to(tl.int64) * num_rows + row) * num_splits + split
    dims = tl.arange(0, DIMS)
    inside = row < num_rows
    tl.store(
        outputs + place[:, None] * HEAD_SIZE + dims[None, :],
        mixed / some[:, None],
        mask=inside[:, None] & (dims < HEAD_SIZE)[None, :],
    )
    # Minus infinity where nothing is seen, since the maximum is.
    tl.store(sums + place, (maximum + tl.log2(some)) * 0.6931471805599453, mask=inside)


@triton.jit
def _squared_changes(in_base_2, output, values, squares, VARIANT: tl.constexpr):
    """[rows, TILE] squared changes for a weight of 1: |a v + b o|^2, where b is -e or 0.

    Args:
        in_base_2: [rows, TILE] logits e in base 2.
        output: [rows, DIMS] outputs o.
        values: [TILE, DIMS] values v.
        squares: [TILE] fp32 |v|^2.
    """
    change = tl.zeros(in_base_2.shape, tl.float32) + squares[None, :]
    if VARIANT != "value":
        along = tl.dot(output, tl.trans(values), input_precision="ieee")
        own = tl.sum(output.to(tl.float32) * output.to(tl.float32), 1)
        logits = in_base_2 * 0.6931471805599453
        of_value = logits
        if VARIANT == "joint":
            of_value = 1.0 + logits
        change = of_value * of_value * squares[None, :] - 2 * of_value * logits * along
        change = tl.maximum(change + logits * logits * own[:, None], 0.0)
    return change


@kernel(*CHANGING, "spacing", "capacity")
def _change_kernel(
    queries,
    pages,
    page_table,
    lengths,
    outputs,
    lse,
    changes,
    num_queries,
    bodies,
    capacity,
    stride_w,
    stride_h,
    spacing,
    page_stride,
    table_stride,
    log2_scale,
    VARIANT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """changes [S, capacity]: of all rows' outputs, for one tile of entries; 0 behind the body."""
    start = tl.program_id(0) * TILE
    head = tl.program_id(1)
    wide = head.to(tl.int64)
    length = tl.load(lengths + head).to(tl.int32)
    body = tl.load(bodies + head).to(tl.int32)
    table_row = page_table + wide * table_stride
    nth = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    columns = tl.zeros([TILE], tl.float32)
    num_rows = num_queries * GROUP
    if start < body:
        present = nth < length
        offsets = entry_offsets(table_row, start, present, page_stride, BLOCK_SIZE, HEAD_SIZE, TILE)
        values = tl.load(
            pages + offsets[:, None] + HEAD_SIZE + dims[None, :],
            mask=present[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )
        squares = tl.sum(values.to(tl.float32) * values.to(tl.float32), 1)
        for first_row in range(0, num_rows, ROWS):
            query, visible = window_rows(
                queries,
                head,
                first_row,
                num_queries,
                length,
                stride_w,
                stride_h,
                spacing,
                GROUP,
                ROWS,
                HEAD_SIZE,
                DIMS,
            )
            in_base_2 = window_logits(
                pages,
                table_row,
                lse,
                query,
                start,
                length,
                length,
                0,
                page_stride,
                log2_scale,
                BLOCK_SIZE,
                HEAD_SIZE,
                TILE,
                DIMS,
                False,
            )
            row = first_row + tl.arange(0, ROWS)
            whole = tl.load(lse + wide * num_rows + row, mask=row < num_rows, other=0.0)
            weights = tl.exp2(in_base_2 - whole[:, None] * 1.4426950408889634)
            weights = tl.where(nth[None, :] < visible[:, None], weights, 0.0)
            output = tl.load(
                outputs + (wide * num_rows + row)[:, None] * HEAD_SIZE + dims[None, :],
                mask=(row < num_rows)[:, None] & (dims < HEAD_SIZE)[None, :],
                other=0.0,
            )
            change = _squared_changes(in_base_2, output, values, squares, VARIANT)
            columns += tl.sum(weights * weights * change, 0)
    columns = tl.where(nth < body, columns, 0.0)
    tl.store(changes + wide * capacity + nth, columns, mask=nth < capacity)


class _Launch(NamedTuple):
    """What both kernels are given.

    Attributes:
        entries: of all heads.
        most: rows of a program, at most.
        num_rows: queries of a head, with their group.
        first: tensors that come first.
        strides: in the kernels' order.
        log2_scale: of the logits.
        options: constants, and warps.
    """

    entries: PagedEntries
    most: int
    num_rows: int
    first: tuple[Tensor, ...]
    strides: tuple[int, ...]
    log2_scale: float
    options: dict[str, int]

    @classmethod
    def of(cls, entries: PagedEntries, queries: Tensor, scale: float, spacing: int) -> Self:
        """For queries [window, query heads, D], which are so many positions apart."""
        group = queries.shape[1] // entries.num_sequences
        num_rows = queries.shape[0] * group
        most = query_rows(num_rows)
        options = dict(
            GROUP=group,
            BLOCK_SIZE=entries.block_size,
            HEAD_SIZE=entries.head_size,
            TILE=tile_size(entries),
            DIMS=padded(entries.head_size),
            num_warps=4 if most < MOST_ROWS else 8,
        )
        tables = (entries.pages.stride(0), entries.page_table.stride(0))
        strides = (queries.stride(0), queries.stride(1), spacing, *tables)
        first = (queries, entries.pages, entries.page_table, entries.flat_lengths)
        return cls(entries, most, num_rows, first, strides, scale * LOG2_E, options)


def window_perturbation(
    view: KVView, queries: Tensor, scale: float, variant: str, stride: int = 1
) -> Tensor:
    """As `reference.window_perturbation`, in Triton."""
    entries = paged(view).entries
    queries = queries[(len(queries) - 1) % stride :: stride]
    check_window(entries, queries)
    expect(
        variant in VARIANTS,
        f"a variant of {', '.join(VARIANTS)}",
        repr(variant),
        "say what is pruned of an entry",
    )
    num_heads, capacity = entries.num_sequences, entries.capacity
    changes = queries.new_zeros((num_heads, capacity), dtype=torch.float32)
    if changes.numel() == 0 or queries.shape[0] == 0:
        return changes[:, : view.capacity]
    launch = _Launch.of(entries, queries, scale, stride)
    outputs, lse = _attended(launch)
    outputs = outputs.to(queries.dtype)

    def launch_change(rows: int) -> None:
        _change_kernel[(triton.cdiv(capacity, launch.options["TILE"]), num_heads)](
            *launch.first,
            outputs,
            lse,
            changes,
            queries.shape[0],
            view.lengths,
            capacity,
            *launch.strides,
            launch.log2_scale,
            VARIANT=variant,
            ROWS=rows,
            num_stages=2,
            **launch.options,
        )

    with on_device(entries):
        launch_fitting(
            f"window_perturbation ({variant})", launch.most, entries.pages, launch_change
        )
    return changes[:, : view.capacity]


def _attended(launch: _Launch) -> tuple[Tensor, Tensor]:
    """[S, rows, D] fp32 outputs of all queries over all entries, and [S, rows] log-sum-exp."""
    entries, queries, num_rows = launch.entries, launch.first[0], launch.num_rows
    splits = _num_splits(entries, num_rows)
    num_tiles = triton.cdiv(entries.capacity, launch.options["TILE"])
    shape = (entries.num_sequences, num_rows, splits)
    pieces = queries.new_empty((*shape, entries.head_size), dtype=torch.float32)
    sums = queries.new_empty(shape, dtype=torch.float32)

    def launch_pieces(rows: int) -> None:
        _pieces_kernel[(splits, triton.cdiv(num_rows, rows), entries.num_sequences)](
            *launch.first,
            pieces,
            sums,
            queries.shape[0],
            splits,
            triton.cdiv(num_tiles, splits),
            *launch.strides,
            launch.log2_scale,
            ROWS=rows,
            num_stages=3,
            **launch.options,
        )

    with on_device(entries):
        launch_fitting("window_perturbation (outputs)", launch.most, entries.pages, launch_pieces)
        return _joined(pieces, sums)


def _joined(pieces: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """[S, rows, D] outputs and [S, rows] log-sum-exp of all splits together."""
    lse = sums.logsumexp(dim=2)
    # Rows that see nothing anywhere have minus infinity twice, and outputs of 0.
    shares = (sums - lse[..., None]).exp().nan_to_num(0.0)
    return (shares[:, :, None] @ pieces)[:, :, 0], lse


def _num_splits(entries: PagedEntries, num_rows: int) -> int:
    """Into how many parts entries are split: to keep a GPU busy, and not more.

    Args:
        entries: S = KV heads.
        num_rows: queries of a head, with their group.
    """
    programs = entries.num_sequences * -(-num_rows // MOST_ROWS)
    return max(1, min(-(-entries.capacity // 1024), 512 // programs))
