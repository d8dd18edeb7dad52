"""The best entries of every head, by counting digits of scores instead of sorting them.

Scores become 32-bit keys that sort as they do. Their four digits of eight bits are counted one
after the other, from the highest, each among the entries whose digits before it are those of the
lowest kept key:

    counts of a head: [ digit 0: 256 ] .. [ digit 3: 256 ] [ digit 3 in tile 0: 256 ] [ tile 1 ] ..

Every program derives the digits known so far from the counts, so that none waits for a choice. Of
entries with the lowest kept key the later ones stay: the counts by tile say how many lie behind.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device
from vllm_kvcompress.kernels.common.paged_entries import expect

TILE = 2048  # entries that a program goes through
SCAN = 256  # tiles whose counts it reads at once
NUM_DIGITS = 4  # of a key
BINS = tl.constexpr(256)
DIGITS = tl.constexpr(NUM_DIGITS)
SIGN = tl.constexpr(1 << 31)
ALL_BITS = tl.constexpr((1 << 32) - 1)


@triton.jit
def sort_keys(numbers):
    """uint32 keys in the order of fp32 numbers; both zeros are equal, NaN is lowest."""
    numbers = numbers.to(tl.float32)
    numbers = tl.where(numbers == numbers, numbers, float("-inf"))
    numbers = tl.where(numbers == 0.0, 0.0, numbers)
    bits = numbers.to(tl.uint32, bitcast=True)
    return tl.where(bits >= SIGN, bits ^ ALL_BITS, bits | SIGN)


@triton.jit
def _load_keys(scores, valid, num_entries, TILE: tl.constexpr):
    """[TILE] uint32 keys in the order of scores, which entries are valid, and their places."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.program_id(1).to(tl.int64) * num_entries + entry
    inside = entry < num_entries
    able = tl.load(valid + place, mask=inside, other=0) != 0
    return sort_keys(tl.load(scores + place, mask=inside, other=0.0)), able, place


@triton.jit
def _lowest_kept(counts, num_kept, KNOWN: tl.constexpr):
    """The first KNOWN digits of a head's lowest kept key, and how many with these are kept."""
    bins = tl.arange(0, BINS)
    left = tl.load(num_kept + tl.program_id(1)).to(tl.int32)
    digits = tl.zeros([], tl.uint32)
    for index in tl.static_range(KNOWN):
        values = tl.load(counts + index * BINS + bins)
        higher = tl.sum(values, 0) - tl.cumsum(values, 0)
        digit = tl.max(tl.where(higher + values >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins == digit, higher, 0), 0)
        digits = digits * BINS + digit.to(tl.uint32)
    return digits, left


@kernel("num_tiles")
def _count_kernel(
    scores, valid, num_kept, counts, num_entries, num_tiles, DIGIT: tl.constexpr, TILE: tl.constexpr
):
    """Counts how often a digit has each value: counts [H, DIGITS + tiles, BINS] int32."""
    counts += tl.program_id(1).to(tl.int64) * (DIGITS + num_tiles) * BINS
    keys, able, _ = _load_keys(scores, valid, num_entries, TILE)
    if DIGIT > 0:
        known, _ = _lowest_kept(counts, num_kept, DIGIT)
        able = able & (keys >> (8 * (DIGITS - DIGIT)) == known)
    digits = (keys >> (8 * (DIGITS - 1 - DIGIT))) % BINS
    values = tl.histogram(digits.to(tl.int32), BINS, mask=able)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + DIGIT * BINS + bins, values, mask=values > 0, sem="relaxed")
    if DIGIT == DIGITS - 1:
        tl.store(counts + (DIGITS + tl.program_id(0)) * BINS + bins, values)


@kernel("num_tiles")
def _keep_kernel(
    scores,
    valid,
    num_kept,
    counts,
    kept,
    num_entries,
    num_tiles,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Writes kept [H, n] bytes: 1 for the best entries."""
    counts += tl.program_id(1).to(tl.int64) * (DIGITS + num_tiles) * BINS
    keys, able, place = _load_keys(scores, valid, num_entries, TILE)
    lowest, left = _lowest_kept(counts, num_kept, DIGITS)
    later = tl.zeros([], tl.int32)
    for start in range(tl.program_id(0) + 1, num_tiles, SCAN):
        tiles = start + tl.arange(0, SCAN)
        of_tile = counts + (DIGITS + tiles) * BINS + (lowest % BINS).to(tl.int32)
        later += tl.sum(tl.load(of_tile, mask=tiles < num_tiles, other=0), 0)
    equal = (able & (keys == lowest)).to(tl.int32)
    behind = later + tl.sum(equal, 0) - tl.cumsum(equal, 0)
    best = (keys > lowest) | ((keys == lowest) & (behind < left))
    inside = tl.program_id(0) * TILE + tl.arange(0, TILE) < num_entries
    tl.store(kept + place, (able & best).to(tl.uint8), mask=inside)


def top_entries(scores: Tensor, valid: Tensor, num_kept: Tensor) -> Tensor:
    """Triton launcher of `top_entries`: same signature and result."""
    expect(
        scores.shape == valid.shape and num_kept.shape == scores.shape[:1],
        "scores and flags [H, n] and H numbers of kept entries",
        f"{tuple(scores.shape)}, {tuple(valid.shape)} and {tuple(num_kept.shape)}",
        "pass one row per head",
    )
    num_heads, num_entries = scores.shape
    kept = torch.empty(valid.shape, dtype=torch.bool, device=scores.device)
    if kept.numel() == 0:
        return kept
    num_tiles = triton.cdiv(num_entries, TILE)
    counts = torch.empty(
        (num_heads, NUM_DIGITS + num_tiles, BINS.value), dtype=torch.int32, device=scores.device
    )
    counts[:, :NUM_DIGITS] = 0
    inputs = (scores.contiguous(), valid.contiguous(), num_kept.contiguous(), counts)
    sizes = (num_entries, num_tiles)
    grid = (num_tiles, num_heads)
    with on_device(scores):
        for digit in range(NUM_DIGITS):
            _count_kernel[grid](*inputs, *sizes, DIGIT=digit, TILE=TILE, num_warps=8)
        _keep_kernel[grid](
            *inputs, kept.view(torch.uint8), *sizes, TILE=TILE, SCAN=SCAN, num_warps=8
        )
    return kept
