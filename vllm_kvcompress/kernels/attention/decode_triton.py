"""Decode attention over ragged pages: equal shares of work for all programs, then a reduction.

    tiles    | sequence 0        | sequence 1 | sequence 2 (empty) | sequence 3            |
    programs | 0       | 1       | 2       | 3                    | 4       | 5           |
    pieces   | 0       | 1  | 2 ...

Sequences are cut into tiles, and the tiles of all sequences, one sequence after the other, are
dealt in equal runs to a fixed number of programs. However ragged the lengths, no program has more
than its share, and no length is read on the host. A piece is the part of one sequence that one
program computes; along the tiles either the sequence or the program moves on, so that
`sequence + program` numbers the pieces without a table.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.attention.prefill_triton import attend_tiles
from vllm_kvcompress.kernels.common.launch_triton import (
    NumbersArguments,
    kernel,
    on_device,
    overlap_options,
    padded,
)
from vllm_kvcompress.kernels.common.paged_entries import (
    TILE_BYTES,
    AddressedEntries,
    PagedEntries,
    check_rows,
    tile_size,
)
from vllm_kvcompress.kernels.common.paged_numbers import (
    AddressedNumbers,
    PagedNumbers,
    check_attention,
)
from vllm_kvcompress.kernels.common.paged_rows_triton import (
    LOG2_E,
    SequenceRows,
    addressed_ids,
    finite_maximum,
    log_sum_exp,
    sequence_numbers,
)

SCAN = 1024  # lengths that are added up at once
INTERPRETED_PROGRAMS = 5  # few, so that small tests have sequences of several pieces


@dataclass(frozen=True)
class DecodeSettings:
    """How the work is divided; results do not depend on it.

    Attributes:
        programs_per_sm: programs that share a multiprocessor.
        tile_bytes: bytes of the keys of a tile.
        num_warps, num_stages: of a program. A load of keys takes two stages, since it goes through
            the page table: 5 keep two tiles in flight, 3 only one.
        pieces: pieces that a reduction reads at once.
        search: sequences that a program compares at once, to find its first tile.
    """

    programs_per_sm: int = 2
    tile_bytes: int = TILE_BYTES
    num_warps: int = 4
    num_stages: int = 5
    pieces: int = 32
    search: int = 128


SETTINGS = DecodeSettings()  # of all launches; others are put here to be measured


@kernel("num_sequences", "length_stride", "end_stride")
def _sum_kernel(
    lengths,
    tile_ends,
    num_sequences,
    length_stride,
    end_stride,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Sums the tiles of one layer."""
    layer = tl.program_id(0).to(tl.int64)
    total = 0
    for start in range(0, num_sequences, SCAN):
        sequence = start + tl.arange(0, SCAN)
        exists = sequence < num_sequences
        length = tl.load(lengths + layer * length_stride + sequence, mask=exists, other=0)
        tiles = tl.cdiv(length.to(tl.int32), TILE)
        ends = total + tl.cumsum(tiles, 0)
        tl.store(tile_ends + layer * end_stride + sequence, ends, mask=exists)
        total += tl.sum(tiles)


def sum_tiles(lengths: Tensor, tile_ends: Tensor, tile: int) -> None:
    """Triton launcher of `sum_tiles`: same signature and result."""
    num_layers, num_sequences = lengths.shape
    with on_device(lengths):
        _sum_kernel[(num_layers,)](
            lengths,
            tile_ends,
            num_sequences,
            lengths.stride(0),
            tile_ends.stride(0),
            TILE=tile,
            SCAN=SCAN,
        )


@triton.jit
def find_share(tile_ends, program, num_programs, num_sequences, WIDTH: tl.constexpr):
    """A program's first tile, the one behind its last, the sequence that the first one belongs to
    (num_sequences where there is none), and the tiles of the sequences before that.

    A search that compares WIDTH ends at once, one after the other up to three times: once for up to
    WIDTH sequences, which may be WIDTH^3. The number of all tiles is read with the first ends.
    """
    # No loop: with a while here, Triton 3.7 loses what it knows of how rows of pages are aligned.
    step = tl.where(num_sequences > WIDTH, WIDTH, 1)
    step = tl.where(num_sequences > WIDTH * WIDTH, WIDTH * WIDTH, step)
    last = (tl.arange(0, WIDTH) + 1) * step - 1
    ends = tl.load(tile_ends + last, mask=last < num_sequences, other=2147483647)
    total = tl.load(tile_ends + num_sequences - 1)
    share = tl.cdiv(total, num_programs)
    tile = program * share
    over = ends <= tile
    sequence = tl.sum(over.to(tl.int32)) * step
    before = tl.max(tl.where(over, ends, 0))
    while step > 1:
        step //= WIDTH
        last = sequence + (tl.arange(0, WIDTH) + 1) * step - 1
        ends = tl.load(tile_ends + last, mask=last < num_sequences, other=2147483647)
        over = ends <= tile
        sequence += tl.sum(over.to(tl.int32)) * step
        before = tl.maximum(before, tl.max(tl.where(over, ends, 0)))
    return tile, tl.minimum(tile + share, total), sequence, before


@triton.jit
def rows_of_head(pages, page_stride, table, sequence, request, head, ADDRESSED: tl.constexpr):
    """The `SequenceRows` of a sequence, which is one head of one request.

    `table` is the page table, or the addresses where ADDRESSED, with the offsets of layers, the
    layer, and the stride between sequences.
    """
    page_table, layer_offsets, layer, table_stride = table
    page_ids, first_page, stride = page_table + sequence * table_stride, pages, page_stride
    if ADDRESSED:
        page_ids, first_page, stride = addressed_ids(
            page_table, layer_offsets, layer, request, head, pages, page_stride
        )
    return SequenceRows(first_page, page_ids, stride)


@triton.jit
def store_piece(
    piece_outputs,
    piece_lse,
    piece,
    softmax,
    exists,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Writes a piece's outputs and log-sum-exps, if it exists.

    `softmax` is outputs, maximum and weight_sum of `attend_tiles`.
    """
    outputs, maximum, weight_sum = softmax
    member, dims = tl.arange(0, outputs.shape[0]), tl.arange(0, outputs.shape[1])
    # Without entries the log-sum-exp is minus infinity, since the maximum is.
    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    row = piece * GROUP + member
    written = (member < GROUP) & exists
    tl.store(piece_lse + row, maximum + tl.log2(weight_sum), mask=written)
    tl.store(
        piece_outputs + row[:, None] * HEAD_SIZE + dims[None, :],
        outputs / weight_sum[:, None],
        mask=written[:, None] & (dims < HEAD_SIZE)[None, :],
    )


@kernel("num_sequences", "table_stride", "bias_table_stride", "layer")
def _pieces_kernel(
    queries,
    pages,
    page_table,
    layer_offsets,
    layer,
    lengths,
    tile_ends,
    bias_pages,
    bias_table,
    bias_starts,
    bias_lengths,
    piece_outputs,
    piece_lse,
    num_sequences,
    query_strides,
    page_stride,
    table_stride,
    bias_table_stride,
    log2_scale,
    HEADS: tl.constexpr,
    ADDRESSED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    BIAS_PAGE: tl.constexpr,
    SEARCH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attends one program's run of tiles; HEADS sequences share a row of queries.

    Where ADDRESSED, page_table and bias_table are addresses, and layer_offsets, layer and
    bias_table_stride say of which layer.
    piece_outputs [S + programs, GROUP, HEAD_SIZE] and piece_lse [S + programs, GROUP], the
    log-sum-exps of the logits in base 2, both fp32; only the rows of pieces are written.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    tile, end, sequence, before = find_share(
        tile_ends, program, tl.num_programs(0), num_sequences, SEARCH
    )
    member = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    inside = (member < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    while tile < end:
        # Loads that need no page ids are issued together, for empty sequences, too.
        sequence_end = tl.load(tile_ends + sequence)
        length = tl.load(lengths + sequence).to(tl.int32)
        sequence64 = sequence.to(tl.int64)
        request, head = sequence64 // HEADS, sequence64 % HEADS
        table = (page_table, layer_offsets, layer, table_stride)
        rows = rows_of_head(pages, page_stride, table, sequence64, request, head, ADDRESSED)
        biases = (bias_pages, bias_table, bias_starts, bias_lengths, bias_table_stride)
        bias = sequence_numbers(sequence64, biases, BIAS_HEADS, BIAS_PAGE, ADDRESSED)
        place = request * query_strides[0] + head * query_strides[1]
        place += member[:, None] * query_strides[2] + dims[None, :]
        query = tl.load(queries + place, mask=inside, other=0.0)
        stop = tl.minimum(end, sequence_end)
        softmax = attend_tiles(
            tl.zeros([ROWS, DIMS], tl.float32),
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            query,
            tl.full([ROWS], 0, tl.int32) + length,
            rows,
            bias,
            tile - before,
            stop - before,
            length,
            log2_scale,
            BLOCK_SIZE,
            HEAD_SIZE,
            TILE,
            BIAS_PAGE,
            True,
        )
        piece = sequence64 + program
        store_piece(piece_outputs, piece_lse, piece, softmax, tile < stop, GROUP, HEAD_SIZE)
        tile = stop
        before = sequence_end
        sequence += 1


@triton.jit
def mix_pieces(
    piece_outputs,
    piece_lse,
    sequence,
    member,
    first,
    last,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Adds up the pieces of one query head, of programs `first` to `last`, by softmax shares.

    Returns:
        [DIMS] outputs not yet divided by weight_sum, [1] maximum in base 2, and [1] weight_sum.
    """
    dims = tl.arange(0, DIMS)
    maximum = tl.full([1], float("-inf"), tl.float32)
    weight_sum = tl.zeros([1], tl.float32)
    mixed = tl.zeros([DIMS], tl.float32)
    for start in range(first, last + 1, PIECES):
        program = start + tl.arange(0, PIECES)
        exists = program <= last
        row = (sequence + program).to(tl.int64) * GROUP + member
        piece_sums = tl.load(piece_lse + row, mask=exists, other=float("-inf"))
        parts = tl.load(
            piece_outputs + row[:, None] * HEAD_SIZE + dims[None, :],
            mask=exists[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(piece_sums, 0))
        top = finite_maximum(new_maximum)
        weights = tl.exp2(piece_sums - top)
        shrink = tl.exp2(maximum - top)
        weight_sum = weight_sum * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * parts, 0)
        maximum = new_maximum
    return mixed, maximum, weight_sum


@kernel("num_sequences", "num_programs", "layer")
def _reduce_kernel(
    piece_outputs,
    piece_lse,
    tile_ends,
    outputs,
    lse,
    queries,
    query_targets,
    layer_bytes,
    layer,
    num_sequences,
    num_programs,
    query_strides,
    out_strides,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Adds up the pieces of one query head of one sequence, weighted by their softmax shares.

    Copies the query, too, where query_targets [S, GROUP] has an address for it.
    """
    sequence = tl.program_id(0)
    member = tl.program_id(1)
    sequence64 = sequence.to(tl.int64)
    if HAS_TARGETS:
        target = tl.load(query_targets + sequence64 * GROUP + member)
    total = tl.load(tile_ends + num_sequences - 1)
    end = tl.load(tile_ends + sequence)
    before = tl.load(tile_ends + sequence - 1, mask=sequence > 0, other=0)
    if OVERLAPS:  # The kernel in front writes the pieces; all loads above are older.
        tl.extra.cuda.gdc_wait()
    share = tl.maximum(tl.cdiv(total, num_programs), 1)
    first = before // share
    # An empty sequence has no pieces: its last one is before its first.
    last = tl.where(end > before, (end - 1) // share, first - 1)
    mixed, maximum, weight_sum = mix_pieces(
        piece_outputs, piece_lse, sequence, member, first, last, GROUP, HEAD_SIZE, DIMS, PIECES
    )
    dims = tl.arange(0, DIMS)
    nothing = weight_sum == 0.0
    mixed = tl.where(nothing, 0.0, mixed / tl.where(nothing, 1.0, weight_sum))
    request, head = sequence64 // HEADS, sequence64 % HEADS
    to = outputs + request * out_strides[0] + head * out_strides[1] + member * out_strides[2]
    tl.store(to + dims, mixed.to(outputs.dtype.element_ty), mask=dims < HEAD_SIZE)
    if HAS_LSE:
        place = sequence64 * GROUP + member + tl.arange(0, 1)
        tl.store(lse + place, log_sum_exp(maximum, weight_sum))
    if HAS_TARGETS:
        wanted = (dims < HEAD_SIZE) & (target != 0)
        target += tl.load(layer_bytes + layer)
        to = tl.cast(target, tl.pointer_type(queries.dtype.element_ty))
        query = queries + request * query_strides[0] + head * query_strides[1]
        query += member * query_strides[2]
        tl.store(to + dims, tl.load(query + dims, mask=wanted), mask=wanted)


def decode_attention(
    entries: PagedEntries,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None = None,
    with_lse: bool = True,
    out: Tensor | None = None,
    tile_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Triton launcher of `decode_attention`: same signature and result."""
    out = torch.empty_like(queries) if out is None else out
    check_attention(entries, queries, out, bias, "group")
    lse = queries.new_empty(queries.shape[:2], dtype=torch.float32) if with_lse else None
    lengths = entries.flat_lengths
    if tile_ends is None:
        tile_ends = torch.empty_like(lengths, dtype=torch.int32)
        sum_tiles(lengths[None], tile_ends[None], tile_size(entries, SETTINGS.tile_bytes))
    runs = (lengths, tile_ends)
    _launch(entries, queries[:, None], out[:, None], runs, scale, bias, lse)
    return out, lse


def decode_rows(
    entries: AddressedEntries,
    queries: Tensor,
    scale: float,
    out: Tensor,
    bias: AddressedNumbers | None = None,
    with_lse: bool = False,
) -> Tensor | None:
    """Triton launcher of `decode_rows`: same signature and result."""
    by_head = (entries.num_heads, -1)
    check_rows(entries, queries, out)
    queries, out, lse = queries.unflatten(1, by_head), out.unflatten(1, by_head), None
    if with_lse:
        lse = queries.new_empty((len(entries.lengths), queries.shape[2]), dtype=torch.float32)
    runs = (entries.lengths, entries.tile_ends)
    _launch(entries, queries, out, runs, scale, bias, lse)
    return lse


class TableArguments(NamedTuple):
    """Arguments of a launch that say where page ids are, and where queries are copied to.

    Attributes:
        page_ids: page table, or addresses of page ids.
        layer_offsets: of addresses; None for a page table.
        layer: of addresses; 0 for a page table.
        stride: between rows of a page table; 0 for addresses.
        targets: addresses of queries; None: they are not copied.
        layer_bytes: bytes between layers behind these.
    """

    page_ids: Tensor
    layer_offsets: Tensor | None = None
    layer: int = 0
    stride: int = 0
    targets: Tensor | None = None
    layer_bytes: Tensor | None = None

    @classmethod
    def of(cls, holder: PagedEntries | AddressedEntries) -> Self:
        """Takes them from entries."""
        if not isinstance(holder, AddressedEntries):
            return cls(holder.page_table, stride=holder.page_table.stride(0))
        table, copied = (holder.addresses, holder.layer_offsets, holder.layer), holder.query_targets
        return (
            cls(*table) if copied is None else cls(*table, 0, copied.addresses, copied.layer_bytes)
        )


def _launch(
    holder: PagedEntries | AddressedEntries,
    queries: Tensor,
    out: Tensor,
    runs: tuple[Tensor, Tensor],
    scale: float,
    bias: PagedNumbers | AddressedNumbers | None,
    lse: Tensor | None,
) -> None:
    """Launches both kernels for [requests, heads, group, head size] queries, a sequence per head.

    `runs` are the sequences' lengths, and the tiles up to each one's end.
    """
    num_requests, heads, group, head_size = queries.shape
    num_sequences, programs = num_requests * heads, _num_programs(holder.device)
    if num_sequences == 0:
        return
    num_pieces = num_sequences + programs
    # Two tensors, since parts of one may begin anywhere, and Triton compiles a kernel anew for
    # tensors that do not begin at a multiple of 16 bytes.
    pieces = queries.new_empty((num_pieces, group, head_size), dtype=torch.float32)
    piece_lse = queries.new_empty((num_pieces, group), dtype=torch.float32)
    numbers, table = NumbersArguments.of(bias), TableArguments.of(holder)
    sizes = overlap_options(holder.device)
    sizes |= dict(HEADS=heads, GROUP=group, HEAD_SIZE=head_size, DIMS=padded(head_size))
    with on_device(holder.pages):
        _pieces_kernel[(programs,)](
            queries,
            holder.pages,
            table.page_ids,
            table.layer_offsets,
            table.layer,
            *runs,
            *numbers.tensors,
            pieces,
            piece_lse,
            num_sequences,
            queries.stride()[:3],
            holder.pages.stride(0),
            table.stride,
            numbers.table_stride,
            scale * LOG2_E,
            ADDRESSED=isinstance(holder, AddressedEntries),
            BLOCK_SIZE=holder.block_size,
            TILE=tile_size(holder, SETTINGS.tile_bytes),
            ROWS=padded(group),
            BIAS_HEADS=numbers.heads,
            BIAS_PAGE=numbers.page,
            SEARCH=SETTINGS.search,
            num_warps=SETTINGS.num_warps,
            num_stages=SETTINGS.num_stages,
            **sizes,
        )
        _reduce_kernel[(num_sequences, group)](
            pieces,
            piece_lse,
            runs[1],
            out,
            lse,
            queries,
            table.targets,
            table.layer_bytes,
            table.layer,
            num_sequences,
            programs,
            queries.stride()[:3],
            out.stride()[:3],
            PIECES=SETTINGS.pieces,
            HAS_LSE=lse is not None,
            HAS_TARGETS=table.targets is not None,
            num_warps=4,
            **sizes,
        )


def _num_programs(device: torch.device) -> int:
    """Programs that run at the same time."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return int(count) * SETTINGS.programs_per_sm
