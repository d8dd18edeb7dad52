"""Where a program's share of ragged sequences begins: their tiles, one sequence after the other."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device

SCAN = 1024  # lengths that are added up at once


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
    """One layer."""
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
    """As `reference.sum_tiles`, in Triton."""
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
