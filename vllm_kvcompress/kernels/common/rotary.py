"""Cached keys turned from one position to another, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """By how much every entry's key is turned.

    Attributes:
        steps: [H, n] int64 positions.
        frequencies: [r / 2] fp32 radians per position; dims from r on are not rotary.
        halves: pairs are dims i and i + r / 2 (else 2 i and 2 i + 1).
    """

    steps: Tensor
    frequencies: Tensor
    halves: bool = True


def turn(keys: Tensor, turns: Turns) -> Tensor:
    """Keys [H, n, D] fp32 as they would be so many positions later."""
    size = turns.frequencies.numel()
    angles = turns.steps[..., None].float() * turns.frequencies
    cos, sin = angles.cos(), angles.sin()
    if turns.halves:
        first, second = slice(0, size), slice(size, 2 * size)
    else:
        first, second = slice(0, 2 * size, 2), slice(1, 2 * size, 2)
    a, b = keys[..., first], keys[..., second]
    turned = keys.clone()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned
