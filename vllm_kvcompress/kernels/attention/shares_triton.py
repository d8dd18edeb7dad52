"""Where a program's share of ragged sequences begins: their tiles, one sequence after the other."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_before(lengths, sequence, num_sequences, TILE: tl.constexpr, SCAN: tl.constexpr):
    """Tiles of the sequences before this one, and of all."""
    before = 0
    total = 0
    for start in range(0, num_sequences, SCAN):
        nth = start + tl.arange(0, SCAN)
        tiles = tl.cdiv(tl.load(lengths + nth, mask=nth < num_sequences, other=0), TILE)
        tiles = tiles.to(tl.int32)
        before += tl.sum(tl.where(nth < sequence, tiles, 0))
        total += tl.sum(tiles)
    return before, total


@triton.jit
def find_tile(lengths, tile, num_sequences, TILE: tl.constexpr, SCAN: tl.constexpr):
    """The sequence that a tile belongs to, and the tiles of the sequences before it."""
    sequence = 0
    before = 0
    total = 0
    for start in range(0, num_sequences, SCAN):
        nth = start + tl.arange(0, SCAN)
        inside = nth < num_sequences
        tiles = tl.cdiv(tl.load(lengths + nth, mask=inside, other=0), TILE).to(tl.int32)
        over = inside & (total + tl.cumsum(tiles, 0) <= tile)
        sequence += tl.sum(over.to(tl.int32))
        before += tl.sum(tl.where(over, tiles, 0))
        total += tl.sum(tiles)
    return sequence, before
