"""Scores as numbers whose digits can be counted instead of sorting them."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

NUM_DIGITS = 4  # of a score
BINS = tl.constexpr(256)
DIGITS = tl.constexpr(NUM_DIGITS)
SIGN = tl.constexpr(1 << 31)
ALL_BITS = tl.constexpr((1 << 32) - 1)


@triton.jit
def sort_keys(numbers):
    """uint32 keys in the order of fp32 numbers; there is one zero, and what is none is lowest."""
    numbers = numbers.to(tl.float32)
    numbers = tl.where(numbers == numbers, numbers, float("-inf"))
    numbers = tl.where(numbers == 0.0, 0.0, numbers)
    bits = numbers.to(tl.uint32, bitcast=True)
    return tl.where(bits >= SIGN, bits ^ ALL_BITS, bits | SIGN)
